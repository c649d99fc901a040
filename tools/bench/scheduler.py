"""What a step costs the scheduler and the KV cache: sequences of 1,000 tokens that generate.

    python -m tools.bench.scheduler [--sequences 64] [--windows none,1024]

Prints the median of five times 160 steps, in µs of CPU time a step: plan and advance; plan_steady and advance, as the
executor does it beside the device; plan and advance with another sequence that waits because the batch is full.
"""

import argparse
import statistics
from collections.abc import Callable
from time import thread_time

from ingot.runtime.kv import KvCache, KvSequence
from ingot.runtime.scheduler import Scheduler, SchedulerSettings, Sequence, StepPlan

BLOCK_SIZE = 16
MAX_NUM_TOKENS = 8192
STEPS = 10 * BLOCK_SIZE
REPEATS = 5
ANSWER = STEPS * (3 * REPEATS + 1)  # tokens; no sequence ends


class Bench:
    def __init__(self, num_sequences: int, windows: tuple[int | None, ...]) -> None:
        blocks = (num_sequences + 1) * (1000 + ANSWER) // BLOCK_SIZE
        self.kv = KvCache(blocks * len(windows), BLOCK_SIZE, windows, max_chunk=MAX_NUM_TOKENS)
        self.scheduler: Scheduler[Sequence] = Scheduler(self.kv, SchedulerSettings(num_sequences, MAX_NUM_TOKENS))
        for index in range(num_sequences):
            self.add(index, 1000 + index % BLOCK_SIZE)
        while not all(sequence.generates for sequence in self.scheduler.sequences):
            plan = self.scheduler.plan()
            self.scheduler.advance(plan)
            self.append_tokens(plan)

    def add(self, name: int, length: int) -> None:
        tokens = [name] * length
        self.scheduler.add(Sequence(str(name), tokens, length + ANSWER, KvSequence(tokens)))

    def append_tokens(self, plan: StepPlan[Sequence]) -> None:
        self.kv.take_copies()
        for sequence, _, _ in plan.entries:
            if not sequence.num_pending:
                sequence.tokens.append(0)

    def steps(self) -> float:
        """Seconds."""
        seconds = 0.0
        for _ in range(STEPS):
            begin = thread_time()
            plan = self.scheduler.plan()
            self.scheduler.advance(plan)
            seconds += thread_time() - begin
            self.append_tokens(plan)
        return seconds

    def steady_steps(self) -> float:
        seconds = 0.0
        plan = self.scheduler.plan()
        for _ in range(STEPS):
            begin = thread_time()
            after = self.scheduler.plan_steady()
            self.scheduler.advance(plan)
            seconds += thread_time() - begin
            self.append_tokens(plan)
            assert after is not None
            plan = after
        self.scheduler.advance(plan)
        self.append_tokens(plan)
        return seconds


def report(name: str, steps: Callable[[], float]) -> None:
    times = sorted(steps() / STEPS * 1e6 for _ in range(REPEATS))
    print(f"{name:35} {statistics.median(times):7.1f} µs a step   ({times[0]:.1f} to {times[-1]:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.scheduler")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--windows", default="none", help="window of each table, separated by commas")
    options = parser.parse_args()
    windows = tuple(None if window == "none" else int(window) for window in options.windows.split(","))
    bench = Bench(options.sequences, windows)
    report("plan + advance", bench.steps)
    report("plan_steady + advance", bench.steady_steps)
    bench.add(options.sequences, 1000)
    report("plan + advance, one more waits", bench.steps)


if __name__ == "__main__":
    main()
