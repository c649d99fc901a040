"""Prompt tokens that are really computed when many prompts with shared documents arrive together.

    python -m tools.prefix_workload [--requests 100] [--prompt-tokens 2250] [--max-num-tokens 8192] [--seed 0] [--json]

Each prompt is an instruction, some documents and a question. The documents come as a retrieval ranks them: the best of
a topic, which others that ask about the topic have too, then some of its own. No length is a multiple of the block
size, so prompts part ways in the middle of blocks. Counted are the prompt tokens that a device would compute:

    no reuse              all of them
    block hashing         whole blocks of 16 tokens are found from the step after the one that wrote them on; prompts of
                          one step, and those that are being computed, compute the same twice
    block hashing, warm   whole blocks, with every other prompt cached beforehand: what hashing can reach at best
    ideal                 token-level radix tree with every other prompt cached beforehand: each token of the tree once
    Ingot                 the scheduler and the KV cache that serve, step by step, with a device that answers at once

The counts depend on nothing but the arguments.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from ingot.runtime.kv import CacheKey, KvCache, KvSequence
from ingot.runtime.scheduler import Scheduler, SchedulerSettings
from ingot.runtime.scheduler import Sequence as Scheduled

VOCAB_SIZE = 49152
BLOCK_SIZE = 16
DOCUMENTS = 5  # of a prompt
SHARED_DOCUMENTS = 3  # of these, on average: 60 %
REQUESTS_PER_TOPIC = 10
MAX_BATCH_SIZE = 128
ANSWER_TOKENS = 64

Prompt = list[int]


@dataclass(frozen=True)
class Counts:
    """Prompt tokens, of all requests together. shared_documents: the part of the documents that others have too."""

    requests: int
    prompt_tokens: int
    shared_documents: float
    no_reuse: int
    block_hashing: int
    block_hashing_warm: int
    ideal: int
    ingot: int

    @property
    def over_ideal(self) -> float:
        return self.ingot / self.ideal


def prompts(requests: int, prompt_tokens: int, seed: int) -> tuple[list[Prompt], float]:
    """Prompts of exactly so many tokens, in order of arrival, and the part of their documents that is shared."""
    source = random.Random(seed)
    mean = prompt_tokens * 2 // (2 * DOCUMENTS + 3)

    def text(length: int) -> Prompt:
        return [source.randrange(VOCAB_SIZE) for _ in range(length)]

    def length() -> int:
        """Around the mean, never a whole number of blocks."""
        tokens = source.randint(mean * 4 // 5, mean * 6 // 5)
        return tokens + (tokens % BLOCK_SIZE == 0)

    instruction = text(length() // 2)
    topics = [[text(length()) for _ in range(DOCUMENTS)] for _ in range(-(-requests // REQUESTS_PER_TOPIC))]
    made: list[Prompt] = []
    used: Counter[int] = Counter()
    for request in range(requests):
        topic = topics[request % len(topics)]
        shared = min(SHARED_DOCUMENTS + source.choice((-2, -1, 0, 0, 1, 2)), DOCUMENTS)
        used.update(map(id, topic[:shared]))
        documents = topic[:shared] + [text(length()) for _ in range(DOCUMENTS - shared)]
        prompt = [*instruction, *(token for document in documents for token in document)]
        question = max(prompt_tokens - len(prompt), source.randint(20, 60))
        made.append(prompt[: prompt_tokens - question] + text(question))
    source.shuffle(made)
    return made, sum(uses for uses in used.values() if uses > 1) / (requests * DOCUMENTS)


def radix_tokens(made: Sequence[Prompt]) -> int:
    """Tokens of the radix tree of all prompts, and again the last one of a prompt for each time that it comes again."""
    total = sum(len(prompt) for prompt in made)
    for before, prompt in pairwise(sorted(made)):
        total -= min(_common(before, prompt), len(prompt) - 1)
    return total


class BlockHashing:
    """A cache of whole blocks, each found by the hash of all tokens up to its end, once it is written."""

    def __init__(self) -> None:
        self._written: set[int] = set()

    def cached(self, prompt: Prompt) -> int:
        """Tokens of a prompt that are found; the last one is always computed, for its logits."""
        for index, block in enumerate(_block_hashes(prompt)):
            if block not in self._written or (index + 1) * BLOCK_SIZE >= len(prompt):
                return index * BLOCK_SIZE
        return len(prompt) // BLOCK_SIZE * BLOCK_SIZE

    def write(self, prompt: Prompt, computed: int) -> None:
        self._written.update(_block_hashes(prompt)[: computed // BLOCK_SIZE])


def hashed_one_by_one(made: Sequence[Prompt]) -> int:
    """Tokens computed with a cache of whole blocks when each prompt comes after the one before is done."""
    cache, total = BlockHashing(), 0
    for prompt in made:
        total += len(prompt) - cache.cached(prompt)
        cache.write(prompt, len(prompt))
    return total


def hashed_together(made: Sequence[Prompt], max_num_tokens: int) -> int:
    """The same when all prompts arrive together; what a step writes is found from the next step on."""
    cache, total = BlockHashing(), 0
    waiting = list(reversed(made))
    running: list[tuple[Prompt, int]] = []  # (prompt, tokens computed) of those that are not complete
    while waiting or running:
        room, step = max_num_tokens, running
        while waiting and sum(len(prompt) - computed for prompt, computed in step) < room:
            prompt = waiting.pop()
            step.append((prompt, cache.cached(prompt)))
        running = []
        for prompt, computed in step:
            count = min(len(prompt) - computed, room)
            room -= count
            total += count
            cache.write(prompt, computed + count)
            if computed + count < len(prompt):
                running.append((prompt, computed + count))
    return total


def ingot(made: Sequence[Prompt], max_num_tokens: int) -> int:
    """The same with the scheduler and the KV cache of the runtime, until every answer is complete."""
    blocks = sum(-(-(len(prompt) + ANSWER_TOKENS) // BLOCK_SIZE) for prompt in made)
    kv = KvCache(blocks, BLOCK_SIZE, max_chunk=max_num_tokens)
    settings = SchedulerSettings(min(MAX_BATCH_SIZE, max_num_tokens), max_num_tokens)
    scheduler: Scheduler[Scheduled] = Scheduler(kv, settings, clock=lambda: 0.0)
    for index, prompt in enumerate(made):
        tokens = list(prompt)
        scheduler.add(Scheduled(str(index), tokens, len(prompt) + ANSWER_TOKENS, KvSequence(tokens, CacheKey())))
    total = 0
    while scheduler.num_running or scheduler.num_waiting:
        plan = scheduler.plan()
        kv.take_copies()
        for sequence, count, _ in plan.entries:
            total += max(min(count, sequence.kv.num_prompt - sequence.num_computed), 0)
        scheduler.advance(plan)
        for sequence, _, _ in plan.entries:
            if not sequence.num_pending:
                sequence.tokens.append(0)
                if len(sequence.tokens) == sequence.max_len:
                    scheduler.finish(sequence)
    return total


def count(requests: int = 100, prompt_tokens: int = 2250, max_num_tokens: int = 8192, seed: int = 0) -> Counts:
    made, shared = prompts(requests, prompt_tokens, seed)
    return Counts(requests, prompt_tokens, shared, sum(map(len, made)), hashed_together(made, max_num_tokens),
                  hashed_one_by_one(made), radix_tokens(made), ingot(made, max_num_tokens))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.prefix_workload", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=2250)
    parser.add_argument("--max-num-tokens", type=int, default=8192, help="tokens in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    counts = count(options.requests, options.prompt_tokens, options.max_num_tokens, options.seed)
    if options.json:
        print(json.dumps({**asdict(counts), "over_ideal": counts.over_ideal}, indent=2))
        return
    print(f"{counts.requests} requests of {counts.prompt_tokens} prompt tokens, arriving together; "
          f"{counts.shared_documents:.0%} of the documents are shared")
    for name, tokens in (("no reuse", counts.no_reuse), ("block hashing", counts.block_hashing),
                         ("block hashing, warm", counts.block_hashing_warm), ("ideal", counts.ideal),
                         ("Ingot", counts.ingot)):
        print(f"  {name:20} {tokens:9,} tokens computed   {tokens / counts.ideal:6.3f} x ideal")


def _common(a: Prompt, b: Prompt) -> int:
    """Tokens that both begin with."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _block_hashes(prompt: Prompt) -> list[int]:
    hashes, parent = [], 0
    for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE):
        parent = hash((parent, *prompt[end - BLOCK_SIZE : end]))
        hashes.append(parent)
    return hashes


if __name__ == "__main__":
    main()
