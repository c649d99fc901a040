"""When a sequence is admitted, and who gives way when blocks run out."""

from ingot.runtime.scheduler import SchedulerPolicy, SequenceState

from .harness import Harness
from .test_scheduler import prompt

MAX_UTILIZATION, STATIC_BATCH = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.STATIC_BATCH


def test_guaranteed_admits_for_the_whole_answer_and_in_order() -> None:
    harness = Harness(4)
    # 2, 3 and 1 blocks: the third would fit beside the first but does not overtake the second.
    first, second, third = harness.add(prompt(0, 3), 6), harness.add(prompt(1, 3), 10), harness.add([1], 4)
    assert harness.step().admitted == [first]
    assert harness.kv.num_available == 2
    harness.finish(first)
    assert harness.step().admitted == [second, third]
    assert harness.kv.num_available == 0
    harness.run(20)


def test_guaranteed_counts_what_is_shared_once() -> None:
    harness = Harness(8)
    first = harness.add(prompt(0, 16), 5)
    harness.step()
    second = harness.add([*prompt(0, 16), 7, 7], 3)
    assert harness.step().admitted == [second]
    assert second.num_cached == 16
    assert first in harness.sequences
    harness.run(9)


def test_max_utilization_admits_by_the_next_step() -> None:
    harness = Harness(8, policy=MAX_UTILIZATION)
    sequences = [harness.add(prompt(index, 4), 13) for index in range(2)]  # 4 blocks each at the end, 1 now
    assert harness.step().admitted == sequences
    harness = Harness(4, policy=MAX_UTILIZATION)
    sequences = [harness.add(prompt(index, 4), 13) for index in range(2)]
    assert harness.step().admitted == sequences


def test_max_utilization_pauses_the_last_started_and_loses_nothing() -> None:
    harness = Harness(8, policy=MAX_UTILIZATION)
    sequences = [harness.add(prompt(index, 6), 20) for index in range(3)]  # 7 blocks each at the end
    plans = []
    while len(harness.sequences) == 3:
        plans.append(harness.step())
    paused = [sequence for plan in plans for sequence in plan.paused]
    assert paused[:1] == [sequences[2]]
    assert sequences[0] not in paused
    assert harness.scheduler.num_pauses == len(paused)
    assert harness.scheduler.num_paused == sum(each.state is SequenceState.PAUSED for each in harness.sequences)
    plans += harness.run(60)  # the harness compares the tokens, and what the blocks hold
    assert [len(sequence.tokens) for sequence in sequences] == [26] * 3
    # What a pause left in the cache was found again.
    resumed = [sequence for plan in plans for sequence in plan.admitted][3:]
    assert resumed and all(sequence.kv.num_cached for sequence in resumed)
    assert all(sequence.num_cached == 0 for sequence in sequences)


def test_max_utilization_leaves_the_running_a_block_each() -> None:
    """Else the newcomer would be paused as soon as they grow."""
    harness = Harness(6, policy=MAX_UTILIZATION)
    for index in range(2):
        harness.add(prompt(index, 7), 10)
    harness.step()
    late = harness.add(prompt(2, 4), 4)  # one block, one is left beyond the next of the two that run
    assert harness.step().admitted == []
    plans = harness.run(60)
    assert late in harness.finished
    assert harness.scheduler.num_pauses == sum(len(plan.paused) for plan in plans)


def test_an_end_makes_room_even_if_fewer_blocks_are_free_than_before() -> None:
    harness = Harness(8, max_batch_size=5, policy=MAX_UTILIZATION)
    running = [harness.add([index], 7) for index in range(4)]
    harness.step()
    late = harness.add(prompt(9, 5), 2)
    assert harness.step().admitted == [] and harness.kv.num_available == 4  # 2 for it, 4 for the others
    while harness.kv.num_available:
        harness.step()
    kv = harness.kv
    for sequence in running[:2]:
        harness.finish(sequence)
    assert kv.num_available == 4
    assert harness.step().admitted == [late]  # 2 for it, 2 for the others
    harness.run(30)


def test_scored_prompts_keep_their_rows_over_a_pause() -> None:
    harness = Harness(8, max_batch_size=3, policy=MAX_UTILIZATION)
    harness.add(prompt(0, 6), 20)
    harness.add(prompt(1, 6), 20)
    scored = harness.add(prompt(2, 9), 12, prompt_logits=True)
    plans = harness.run(200)  # the harness counts the rows
    assert any(scored in plan.paused for plan in plans)


def test_static_batch_admits_only_when_nothing_runs() -> None:
    harness = Harness(100, max_batch_size=2, policy=STATIC_BATCH)
    sequences = [harness.add(prompt(index, 3), answer) for index, answer in enumerate((2, 5, 2, 2))]
    assert harness.step().admitted == sequences[:2]
    plans = [harness.step() for _ in range(4)]
    assert sequences[0] in harness.finished and not any(plan.admitted for plan in plans)
    assert harness.step().admitted == sequences[2:]
    harness.run(9)


def test_static_batch_waits_for_prefixes_of_its_own() -> None:
    harness = Harness(100, max_batch_size=3, policy=STATIC_BATCH)
    shared = prompt(0, 12)
    sequences = [harness.add([*shared, index], 6) for index in range(3)]
    assert harness.step().admitted == sequences[:1]
    late = harness.add(prompt(5, 3))  # came after the batch was formed
    assert harness.step().admitted == sequences[1:]
    assert [sequence.num_cached for sequence in sequences] == [0, 12, 12]
    while len(harness.sequences) > 1:
        assert late not in harness.step().admitted
    assert harness.step().admitted == [late]


def test_static_batch_takes_what_fits() -> None:
    harness = Harness(5, max_batch_size=3, policy=STATIC_BATCH)
    sequences = [harness.add(prompt(index, 3), 6) for index in range(3)]  # 2 blocks each
    assert harness.step().admitted == sequences[:2]
    harness.finish(sequences[0])
    assert harness.step().admitted == []
    harness.finish(sequences[1])
    assert harness.step().admitted == sequences[2:]
