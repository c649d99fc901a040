"""What drafts are worth on this machine: tokens a second with and without, in turns, and what a step takes by tokens.

    python -m tools.bench.speculation ENGINE [--drafts 0 2 4 8] [--tokens 160] [--rounds 3] [--only repeats|free|steps]
                                             [--at-once] [--num-workers N] [--processor-time] [--context 256]

One request at a time. `repeats`: answers that hold much of their prompt (a text given back, a code edit, quotes);
`free`: answers that don't, greedy, and sampled at a temperature of 0.8. All engines are loaded at once; every prompt is
answered by one after the other, round by round, and compared with the first of --drafts in the same round: what else
the machine does meanwhile touches all alike. Prompts come from the prefix cache after the first round: the rate is that
of generation, from the first token to the last. --at-once: the prompts of a kind run together, and the rate is that of
all of them, from the beginning to the last token. Engines need a chat template.
--processor-time: seconds are those that the process computes, on all its cores together; for machines that others use
too, with --num-workers 1, as workers that wait for each other compute nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ingot.runtime.engine import Engine
from ingot.runtime.program import Program
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.sampling_state import SequenceSampling

TEXT = (
    "The harbour of Ostrava lies behind a long stone wall. In the morning the fishing boats come back, and the market "
    "opens at seven. Anna Kovar sells mackerel and herring there since 1987; her brother Pavel repairs nets in a shed "
    "beside the lighthouse. When the wind blows from the north, nobody goes out, and the men play cards in the tavern "
    "at the corner of Mill Street. The tavern belongs to an old captain who has sailed around the world twice.")
CODE = '''\
def total_price(items, tax_rate, discount):
    """Sum of the prices of all items, with tax and without the discount."""
    total = 0
    for item in items:
        if item.price < 0:
            raise ValueError("price of " + item.name + " is negative")
        total = total + item.price * item.quantity
    total = total * (1 + tax_rate)
    total = total - discount
    return total
'''
PROMPTS = {
    "repeats": [
        f"Repeat the following text word for word, without any change.\n\n{TEXT}",
        f"Write this text again and replace the name Anna by Maria.\n\n{TEXT}",
        f"Rename the variable total to result in this function. Write the whole function.\n\n```python\n{CODE}```",
        f"Quote every sentence of this text that is about people.\n\n{TEXT}",
    ],
    "free": [
        "Explain how a sailing boat can move against the wind.",
        "Write a story about a girl who finds a map in the attic of her grandmother's house.",
        "What should somebody know who moves to a large city for the first time?",
        "Describe the taste of an orange to somebody who has never eaten one.",
    ],
}
SAMPLINGS: dict[str, dict[str, dict[str, Any]]] = {
    "repeats": {"greedy": {}},
    "free": {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 1}},
}
Clock = Callable[[], float]


@dataclass
class Runs:
    """Of one kind of prompts with one number of drafts. rates: tokens a second; ratios: to the first, per answer."""

    rates: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0
    drafted: int = 0
    accepted: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("engine")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 2, 4, 8], metavar="K")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=[*PROMPTS, "steps"])
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--num-workers", type=int)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--context", type=int, default=256, help="tokens before the step whose time is taken")
    options = parser.parse_args()
    clock = time.process_time if options.processor_time else time.perf_counter
    with ExitStack() as stack:
        engines = {drafts: stack.enter_context(Engine.load(options.engine, num_workers=options.num_workers,
                                                           kv_cache_tokens=8192, speculative_tokens=drafts))
                   for drafts in options.drafts}
        if options.only in (None, "steps"):
            print_step_times(next(iter(engines.values())).program, max(options.drafts), options.context, clock)
        for kind, prompts in PROMPTS.items():
            if options.only in (None, kind):
                for name, sampling in SAMPLINGS[kind].items():
                    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, **sampling)
                    groups = [prompts] if options.at_once else [[prompt] for prompt in prompts]
                    print_runs(f"{kind}, {name}", answer_all(engines, groups, params, options.rounds, clock))


def answer_all(engines: dict[int, Engine], groups: list[list[str]], params: SamplingParams, rounds: int,
               clock: Clock) -> dict[int, Runs]:
    """groups: of prompts that run together."""
    found = {drafts: Runs() for drafts in engines}
    for number in range(rounds + 1):  # the first finds the step times, and fills the prefix caches
        for prompts in groups:
            first = 0.0
            for drafts, engine in engines.items():
                rate = answer(engine, prompts, params, found[drafts] if number else Runs(), clock)
                first = first or rate
                if number:
                    found[drafts].rates.append(rate)
                    found[drafts].ratios.append(rate / first)
    return found


def answer(engine: Engine, prompts: list[str], params: SamplingParams, runs: Runs, clock: Clock) -> float:
    """Tokens a second: of one answer behind its first token, of several all together. Its counts go to `runs`."""
    recorder = engine._loop._recorder
    before = recorder.steps, recorder.draft_tokens, recorder.accepted_draft_tokens
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    if len(chats) > 1:
        begin = clock()
        num_tokens = sum(len(answer.token_ids) for answer in engine.generate(chats, params))
        rate = num_tokens / (clock() - begin)
    else:
        times = [clock() for _ in engine.stream(chats[0], params)]
        num_tokens, rate = len(times), (len(times) - 1) / (times[-1] - times[0])
    runs.num_tokens += num_tokens
    runs.num_steps += recorder.steps - before[0]
    runs.drafted += recorder.draft_tokens - before[1]
    runs.accepted += recorder.accepted_draft_tokens - before[2]
    return rate


def print_runs(title: str, found: dict[int, Runs]) -> None:
    print(f"\n{title:22}   tokens/s   ratio (least .. most)     drafted  accepted   tokens a step")
    for drafts, runs in found.items():
        share = f"{runs.accepted / runs.drafted:8.0%}" if runs.drafted else "       -"
        ratios = runs.ratios
        rate, ratio = statistics.median(runs.rates), statistics.median(ratios)
        spread = f"({min(ratios):.2f} .. {max(ratios):.2f})"
        print(f"  up to {drafts:2} drafted       {rate:9.1f}   {ratio:5.2f} {spread}     {runs.drafted:9}  {share}   "
              f"{runs.num_tokens / runs.num_steps:8.2f}", flush=True)


def print_step_times(program: Program, most: int, context: int, clock: Clock, rounds: int = 15) -> None:
    """Steps of one sequence that verify 0 .. most drafted tokens, each with its row of logits; counts in turns."""
    counts = range(1, most + 2)
    times: dict[int, list[float]] = {count: [] for count in counts}
    size = program.block_size
    tables = [list(range(-(-(context + most + 1) // size)))] * len(program.kv_windows)
    sampling = SequenceSampling(SamplingParams(), [])
    for _ in range(rounds):
        for count in counts:
            inputs = program.inputs[0]
            inputs.clear()
            inputs.add([7] * count, context, tables, count)
            inputs.sampling.fill([sampling] * count)
            begin = clock()
            program.launch(inputs)
            program.wait()
            times[count].append(clock() - begin)
    first = statistics.median(times[1])
    print(f"a step of one sequence behind {context} tokens, by its tokens (median of {rounds}, in turns)")
    for count in counts:
        middle = statistics.median(times[count])
        print(f"  {count:3}   {middle * 1e3:8.2f} ms   {middle / first:5.2f}", flush=True)


if __name__ == "__main__":
    main()
