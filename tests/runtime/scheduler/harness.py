"""A scheduler over a KV cache, and a device that computes nothing but remembers what each block would hold.

The KV of a token depends on all tokens before it; here it is a hash of them, of the salt and of the adapter. A step
writes it into the blocks that the tables name, and checks what attention would read there: copies and reused blocks are
right only if every token that a query can see has the very hash that the sequence's own tokens give.

With speculation each sequence is given drafts of which some first tokens are right, as many as `guess` says.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from zlib import crc32

from ingot.runtime.kv import CacheKey, KvCache, KvSequence, RetentionRange
from ingot.runtime.scheduler import Scheduler, SchedulerPolicy, SchedulerSettings, Sequence, SequenceState, StepPlan

NO_KEY = CacheKey()
Plan = StepPlan[Sequence]


def mix(state: int, token: int) -> int:
    """A hash that is the same in every process."""
    return (state * 6364136223846793005 + token + 1442695040888963407) % (1 << 61)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Answer:
    """What the device knows of a sequence: the hash of each prefix, and what was asked of it."""

    hashes: list[int]
    num_rows: int = 0  # rows of logits given
    tokens: list[int] = field(default_factory=list)  # all that it ever had, to tell whether one was lost

    def extend(self, tokens: Listing[int]) -> None:
        assert tokens[: len(self.tokens)] == self.tokens, "a token was lost"
        for token in tokens[len(self.tokens) :]:
            self.hashes.append(mix(self.hashes[-1], token))
            self.tokens.append(token)


class Harness:
    def __init__(self, num_blocks: int, block_size: int = 4, max_batch_size: int = 4, max_num_tokens: int = 16,
                 windows: tuple[int | None, ...] = (None,), num_host_blocks: int = 0, **options: object) -> None:
        """options: of SchedulerSettings."""
        self.clock = Clock()
        max_draft = options.get("speculative_tokens", 0)
        # Of a sequence and the most tokens that its draft may have: how many it has, how many of these are right.
        self.guess: Callable[[Sequence, int], tuple[int, int]] = lambda sequence, limit: (limit, limit)
        self.num_drafted = self.num_accepted = 0
        self.kv = KvCache(num_blocks, block_size, windows, num_host_blocks=num_host_blocks,
                          max_chunk=max_num_tokens, max_draft=max_draft, clock=self.clock)  # type: ignore[arg-type]
        settings = SchedulerSettings(max_batch_size, max_num_tokens, **options)  # type: ignore[arg-type]
        self.scheduler: Scheduler[Sequence] = Scheduler(self.kv, settings, self.clock)
        self.sequences: list[Sequence] = []  # those that have not finished
        self.finished: list[Sequence] = []
        self.num_steps = 0
        self._answers: dict[Sequence, Answer] = {}
        self._memory: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks + num_host_blocks)]
        self._started: list[Sequence] = []  # the running ones, as they were started

    # What a client does.

    def add(self, tokens: Listing[int], answer: int = 4, key: CacheKey = NO_KEY,
            retention: tuple[RetentionRange, ...] = (), **options: object) -> Sequence:
        """A sequence of these tokens and `answer` more; options: of Sequence."""
        shared = list(tokens)
        options = {"arrival": self.clock.now, **options}
        sequence = Sequence(str(len(self._answers)), shared, len(shared) + answer, KvSequence(shared, key, retention),
                            **options)  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        answer_ = self._answers[sequence] = Answer([crc32(repr(key).encode())])
        answer_.extend(shared)
        return sequence

    def finish(self, sequence: Sequence, publish: bool = True) -> None:
        self.scheduler.finish(sequence, publish)
        self._forget(sequence)

    # What the executor does.

    def step(self) -> Plan:
        plan = self.plan()
        self.draft(plan)
        self.launch(plan)
        self.wait(plan)
        return plan

    def run(self, limit: int) -> list[Plan]:
        """Steps until all sequences have finished; fails if `limit` steps are not enough."""
        plans: list[Plan] = []
        while self.sequences:
            assert len(plans) < limit, f"{len(self.sequences)} sequences have not finished after {limit} steps"
            plans.append(self.step())
        return plans

    def plan(self) -> Plan:
        before = list(self._started)
        plan = self.scheduler.plan()
        for sequence in plan.expired:
            assert sequence.deadline is not None and sequence.deadline <= self.clock.now
            self._forget(sequence)
        assert all(sequence.deadline is None or sequence.deadline > self.clock.now for sequence in self.sequences)
        before = [sequence for sequence in before if sequence.state is not SequenceState.FINISHED]
        if plan.paused:
            assert self.scheduler.settings.policy is SchedulerPolicy.MAX_UTILIZATION
            assert before[: -len(plan.paused) - 1 : -1] == plan.paused, "not the last started were paused"
            assert not plan.admitted
            self._started = before[: -len(plan.paused)]
        self._started += plan.admitted
        self._check_plan(plan)
        return plan

    def draft(self, plan: Plan) -> bool:
        """Of a plan that is about to be launched."""
        if not self.scheduler.settings.speculative_tokens:
            return False
        blocks = {sequence: sequence.kv.capacity for sequence in self._started}
        found = self.scheduler.draft(plan, self._drafts)
        self._check_plan(plan)
        if self.scheduler.settings.policy is SchedulerPolicy.MAX_UTILIZATION and any(
                sequence.kv.capacity > capacity for sequence, capacity in blocks.items()):
            assert self.kv.num_available >= len(self._started) * len(self.kv.windows), "a draft takes others' blocks"
        return found

    def _drafts(self, sequences: list[Sequence], limits: list[int], room: int, num_tokens: int,
                ) -> dict[Sequence, list[int]]:
        """As many as there is room for, the oldest first."""
        found = {}
        for sequence, limit in zip(sequences, limits, strict=True):
            count, num_right = self.guess(sequence, max(min(limit, room), 0))
            if count:
                found[sequence] = self._foreseen(sequence, num_right) + [7] * (count - num_right)  # 7 never comes
                room -= count
        return found

    def _foreseen(self, sequence: Sequence, count: int) -> list[int]:
        state, tokens = self._answers[sequence].hashes[-1], list[int]()
        for _ in range(count):
            tokens.append((state >> 30) % 7)
            state = mix(state, tokens[-1])
        return tokens

    def launch(self, plan: Plan) -> None:
        self.num_steps += 1
        for source, destination in self.kv.take_copies():
            self._memory[destination] = list(self._memory[source])
        # Where each sequence writes and reads is fixed from here on, whatever becomes of it while the step runs.
        self._step = [(sequence, sequence.num_computed, count, [list(table) for table in sequence.kv.tables])
                      for sequence, count, _ in plan.entries]

    def wait(self, plan: Plan) -> None:
        """The step's writes and reads, then what the executor makes of its tokens."""
        for sequence, begin, count, tables in self._step:
            self._compute(sequence, begin, begin + count, tables)
        self.scheduler.advance(plan)
        for sequence, _, num_logits in plan.entries:
            if sequence.state is SequenceState.FINISHED:
                continue
            answer = self._answers[sequence]
            if sequence.draft:
                self._take_run(sequence, answer)
                continue
            answer.num_rows += num_logits
            if not sequence.num_pending:
                assert num_logits >= 1, "no logits for the next token"
                sequence.tokens.append((answer.hashes[-1] >> 30) % 7)
                answer.extend(sequence.tokens)
                if len(sequence.tokens) == sequence.max_len:
                    self._check_rows(sequence)
                    self.finish(sequence)
            else:
                assert sequence.prompt_logits or num_logits == 0

    def _take_run(self, sequence: Sequence, answer: Answer) -> None:
        draft = list(sequence.draft)
        for drafted in [*draft, None]:
            token = (answer.hashes[-1] >> 30) % 7
            sequence.tokens.append(token)
            answer.extend(sequence.tokens)
            answer.num_rows += 1
            assert len(sequence.tokens) <= sequence.max_len
            if token != drafted:
                break
            self.num_accepted += 1
        self.num_drafted += len(draft)
        self.scheduler.accept(sequence)
        assert sequence.num_pending == 1 and not sequence.draft
        if len(sequence.tokens) == sequence.max_len:
            self._check_rows(sequence)
            self.finish(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.finished.append(sequence)
        if sequence in self._started:
            self._started.remove(sequence)

    def _compute(self, sequence: Sequence, begin: int, end: int, tables: list[list[int]]) -> None:
        hashes, size = list(self._answers[sequence].hashes), self.kv.block_size
        for token in sequence.draft:
            hashes.append(mix(hashes[-1], token))
        for window, table in zip(self.kv.windows, tables, strict=True):
            for position in range(begin, end):
                block = table[position // size]
                assert 0 <= block < self.kv.num_blocks, f"position {position} has no device block"
                self._memory[block][position % size] = hashes[position + 1]
            first = 0 if window is None else max(begin - window + 1, 0)
            for position in range(first, end):
                block = table[position // size]
                assert 0 <= block < self.kv.num_blocks, f"position {position} is read and has no device block"
                assert self._memory[block][position % size] == hashes[position + 1], (
                    f"stale KV: {sequence.request_id} reads position {position} in block {block}")

    def _check_plan(self, plan: Plan) -> None:
        settings = self.scheduler.settings
        assert sum(count for _, count, _ in plan.entries) <= settings.max_num_tokens
        assert sum(rows for _, _, rows in plan.entries) <= settings.max_batch_size
        assert len(self._started) <= settings.max_batch_size
        assert {sequence for sequence, _, _ in plan.entries} <= set(self._started)
        assert plan.entries or not self.sequences, "sequences wait and nothing runs"
        for sequence, count, rows in plan.entries:
            assert sequence.state is SequenceState.RUNNING and rows <= count
            assert 0 < count <= sequence.num_pending + len(sequence.draft)
            assert sequence.num_computed + count <= max(sequence.max_computed, len(sequence.tokens))

    def _check_rows(self, sequence: Sequence) -> None:
        """Each row that was asked for was given once, however often the sequence was paused."""
        generated = len(sequence.tokens) - sequence.kv.num_prompt
        scored = sequence.kv.num_prompt - 1 if sequence.prompt_logits else 0
        assert self._answers[sequence].num_rows == generated + scored
