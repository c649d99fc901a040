"""What the KV cache's bookkeeping costs the thread that runs it, in microseconds of CPU time (medians).

    python -m tools.bench.kv_cache [--sequences 64] [--prompt 2250] [--repeats 31]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from ingot.runtime.kv import KvCache, KvSequence
from ingot.runtime.kv.events import EventBuffer

_BLOCK_SIZE = 16
_CONTEXT = 1000
_WINDOW = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64, help="running sequences of 1,000 tokens")
    parser.add_argument("--prompt", type=int, default=2250, help="tokens of an admitted prompt")
    parser.add_argument("--repeats", type=int, default=31)
    args = parser.parse_args()
    for name, windows in (("one table", (None,)), ("and one with a window of 512", (None, _WINDOW))):
        _steps(name, windows, args.sequences)
    blocks = -(-args.prompt // _BLOCK_SIZE)
    roomy, full = blocks * (args.repeats + 2), blocks * 4
    _admissions("nothing cached, free blocks", KvCache(roomy, _BLOCK_SIZE), args, hit=False)
    _admissions("nothing cached, each block evicts one", KvCache(full, _BLOCK_SIZE), args, hit=False)
    events = EventBuffer()
    _admissions("the same, with events", KvCache(full, _BLOCK_SIZE, events=events), args, hit=False)
    _admissions("the same, to a host tier", KvCache(full, _BLOCK_SIZE, num_host_blocks=full), args, hit=False)
    _admissions("all cached", KvCache(roomy, _BLOCK_SIZE), args, hit=True)


def _steps(name: str, windows: tuple[int | None, ...], num_sequences: int) -> None:
    """Generation: grow and advance by a token, for all sequences; in each step as many of them fill a block."""
    kv = KvCache(num_sequences * 2 * _CONTEXT // _BLOCK_SIZE * len(windows), _BLOCK_SIZE, windows)
    sequences = []
    for index in range(num_sequences):
        seq = KvSequence(_tokens(_CONTEXT + index % _BLOCK_SIZE))
        kv.acquire(seq, num_new=len(seq.tokens))
        kv.advance(seq, len(seq.tokens))
        sequences.append(seq)

    def step() -> None:
        for seq in sequences:
            seq.tokens.append(1)
            kv.grow(seq, len(seq.tokens))
            kv.advance(seq, len(seq.tokens))

    times = [_cpu_us(step) for _ in range(320)]
    median, mean = statistics.median(times), statistics.mean(times)
    print(f"step of {num_sequences} sequences, {name}: {median:.0f} us, mean {mean:.0f}")


def _admissions(name: str, kv: KvCache, args: argparse.Namespace, hit: bool) -> None:
    prompt = _tokens(args.prompt)
    if hit:
        seq = KvSequence(prompt)
        kv.acquire(seq, num_new=len(prompt))
        kv.advance(seq, len(prompt))
        kv.release(seq)
    times: dict[str, list[float]] = {"probe": [], "acquire": [], "advance": [], "release": []}
    for _ in range(args.repeats):
        seq = KvSequence(list(prompt) if hit else _tokens(args.prompt))
        times["probe"].append(_cpu_us(partial(kv.probe, seq)))
        times["acquire"].append(_cpu_us(partial(kv.acquire, seq, num_new=args.prompt)))
        times["advance"].append(_cpu_us(partial(kv.advance, seq, args.prompt)))
        times["release"].append(_cpu_us(partial(kv.release, seq)))
        kv.take_copies()
    figures = ", ".join(f"{step} {statistics.median(values):.0f} us" for step, values in times.items())
    print(f"prompt of {args.prompt} tokens, {name}: {figures}")


def _tokens(count: int) -> list[int]:
    return [random.randrange(50_000) for _ in range(count)]


def _cpu_us(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return 1e6 * (time.process_time() - begin)


if __name__ == "__main__":
    main()
