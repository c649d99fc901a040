"""What is drafted for whom: by chances and by times."""

import pytest

from ingot.runtime.kv import KvSequence
from ingot.runtime.scheduler import Sequence
from ingot.runtime.speculation import Speculator
from ingot.runtime.speculation.acceptance import AcceptanceRates, WatchedDraft
from ingot.runtime.speculation.step_times import StepTimes, bucket_of, estimate


def sequence(tokens: list[int]) -> Sequence:
    return Sequence("a", tokens, 1000, KvSequence(tokens))


def repeating(begin: int = 1) -> Sequence:
    return sequence([begin, begin + 1, begin + 2, begin + 3] * 5)


def speculator(times: dict[int, float]) -> Speculator[Sequence]:
    found: Speculator[Sequence] = Speculator(lambda sequence, draft: len(draft))
    for tokens, seconds in times.items():
        for _ in range(9):
            found.times.add(tokens, seconds)
    return found


def lengths(found: Speculator[Sequence], sequences: list[Sequence], limit: int = 8, room: int = 64,
            others: int = 0) -> list[int]:
    drafts = found.choose(sequences, [limit] * len(sequences), room, len(sequences) + others)
    return [len(drafts.get(sequence, [])) for sequence in sequences]


def follow(found: Speculator[Sequence], sequence: Sequence, count: int) -> None:
    """The sequence goes on as it repeats itself, in so many steps."""
    for _ in range(count):
        draft = found.choose([sequence], [8], 64, 1).get(sequence, [])
        sequence.tokens.extend(sequence.tokens[-4:][place % 4] for place in range(len(draft) + 1))


def test_nothing_before_the_step_without_drafts_is_measured() -> None:
    assert lengths(speculator({}), [repeating()]) == [0]


def test_free_tokens_are_all_taken() -> None:
    assert lengths(speculator({1: 1.0, 9: 1.0}), [repeating()]) == [8]


def test_tokens_that_cost_as_much_as_a_step_are_not() -> None:
    assert lengths(speculator({1: 1.0, 9: 9.0}), [repeating()]) == [0]


def test_in_between_it_depends_on_the_chance() -> None:
    found, one = speculator({1: 1.0, 9: 3.0}), repeating()
    at_first = lengths(found, [one])[0]
    follow(found, one, 60)
    assert 0 < at_first < lengths(found, [one])[0]


def test_counts_that_were_never_tried_are_tried_by_and_by() -> None:
    tried = []
    for times in ({1: 1.0}, {1: 1.0, 2: 1.1}, {1: 1.0, 4: 1.0}, {1: 1.0, 8: 1.0}):
        tried += lengths(speculator(times), [repeating()])
    assert tried == [1, 3, 7, 8]


def test_what_is_not_worth_it_is_compared_with_what_comes() -> None:
    """A sequence that begins to repeat itself is found out without verifying a draft."""
    found, one = speculator({1: 1.0, 9: 7.0}), repeating()
    assert lengths(found, [one]) == [0]
    follow(found, one, 80)
    assert lengths(found, [one])[0] > 0


def test_drafts_that_fail_stop() -> None:
    found, one = speculator({1: 1.0, 9: 2.0}), repeating()
    assert lengths(found, [one])[0] > 0
    for index in range(40):
        one.tokens.extend([1, 2])
        found.choose([one], [8], 64, 1)
        one.tokens.append(100 + index)  # never what came behind 1, 2 before
    one.tokens.extend([1, 2])
    assert lengths(found, [one]) == [0]


def test_the_likelier_drafts_come_first() -> None:
    found, good, bad = speculator({2: 1.0, 6: 1.2, 18: 6.0}), repeating(), repeating(50)
    follow(found, good, 80)
    for _ in range(30):
        found.choose([good, bad], [8, 8], 0, 2)
        good.tokens.append(good.tokens[-4])
        bad.tokens.extend([len(bad.tokens) + 100, 50, 51])
    first, second = lengths(found, [good, bad])
    assert first > second


def test_those_without_a_draft_are_not_slowed_down_for_one() -> None:
    """The sum of all tokens a second would grow by a tenth; three sequences would lose four tenths of theirs."""
    found, good = speculator({4: 1.0, 8: 1.3}), repeating()
    follow(found, good, 60)
    others = [sequence(list(range(begin, begin + 9))) for begin in (100, 200, 300)]
    first, *rest = lengths(found, [good, *others], limit=4)
    assert first > 0 and rest == [0, 0, 0]
    found = speculator({4: 1.0, 8: 1.75})
    follow(found, good, 60)
    assert lengths(found, [good, *others], limit=4) == [0, 0, 0, 0]
    more = [repeating(begin) for begin in (50, 60, 70)]
    for each in more:
        follow(found, each, 60)
    assert lengths(found, [good, *more], limit=1) == [1, 1, 1, 1]


def test_all_share_the_room() -> None:
    found = speculator({3: 1.0, 64: 1.0})
    assert sum(lengths(found, [repeating(), repeating(20), repeating(40)], room=7)) == 7


def test_beside_prompts_no_larger_bucket_is_entered() -> None:
    assert lengths(speculator({1: 1.0, 9: 1.0}), [repeating()], others=29) == [2]
    assert lengths(speculator({1: 1.0, 9: 1.0}), [repeating()], others=31) == [0]


def test_many_sequences_without_gain_are_left_alone_for_some_steps() -> None:
    looks = 0

    def usable(_: Sequence, draft: list[int]) -> int:
        nonlocal looks
        looks += 1
        return len(draft)

    found: Speculator[Sequence] = Speculator(usable)
    for tokens, seconds in ((16, 1.0), (17, 9.0), (144, 99.0)):
        found.times.add(tokens, seconds)
    sequences = [repeating(10 * index) for index in range(16)]
    for _ in range(100):
        assert lengths(found, sequences) == [0] * 16
    assert 16 * 36 <= looks <= 16 * 44


@pytest.mark.parametrize(("comes", "right"), [([4, 5, 6], 3), ([4, 9], 1), ([9], 0)])
def test_acceptance_counts_what_is_right(comes: list[int], right: int) -> None:
    everybody = AcceptanceRates()
    rates, other = AcceptanceRates(everybody), AcceptanceRates(everybody)
    tokens, before = [1, 2, 3], rates.chance(4)
    watched = WatchedDraft(3, [4, 5, 6], 4)
    for token in comes[:-1]:
        tokens.append(token)
        assert watched.compare(tokens, rates) is None
    tokens.append(comes[-1])
    assert watched.compare(tokens, rates) == right
    assert (rates.chance(4) > before) == (right == 3) or right == 1
    # What one sequence has shown counts for others too, and nothing for drafts of another certainty.
    assert abs(other.chance(4) - before) <= abs(rates.chance(4) - before)
    assert (other.chance(4) > before) == (rates.chance(4) > before) and other.chance(2) == before


def test_buckets() -> None:
    assert [bucket_of(count) for count in (1, 2, 15, 16, 17, 18, 32, 33, 36, 37, 64, 65)] == [
        1, 2, 15, 16, 18, 18, 32, 36, 36, 40, 64, 72]


def test_times_between_and_beyond_those_measured() -> None:
    times = StepTimes()
    assert estimate(times.known(), 1) is None
    times.add(2, 1.0)
    times.add(6, 3.0)
    assert [estimate(times.known(), count) for count in (1, 2, 4, 6, 12, 13)] == [None, 1.0, 2.0, 3.0, 3.0, None]


def test_fewer_tokens_never_take_longer() -> None:
    times = StepTimes()
    times.add(2, 2.0)
    times.add(3, 1.0)
    assert times.known() == [(2, 1.0), (3, 1.0)]


def test_a_count_that_was_slow_once_is_tried_again() -> None:
    times = StepTimes()
    times.add(9, 50.0)
    for count in (60, 10):
        before = times.known()
        for _ in range(count):
            times.add(1, 1.0)
    assert before == [(1, 1.0), (9, 50.0)] and times.known() == [(1, 1.0)]
    times.add(9, 60.0)  # the first is not forgotten
    for _ in range(100):
        times.add(1, 1.0)
    assert times.known() == [(1, 1.0), (9, 50.0)]


def test_a_step_that_was_held_up_once_decides_nothing() -> None:
    times = StepTimes()
    for seconds in (50.0, 1.0):
        times.add(4, seconds)
    assert times.known() == [(4, 1.0)]
    for _ in range(16):  # contexts grow
        times.add(4, 2.0)
    assert times.known() == [(4, 2.0)]


def test_old_times_are_forgotten() -> None:
    times = StepTimes()
    times.add(9, 50.0)
    for _ in range(600):
        times.add(1, 1.0)
    assert times.known() == [(1, 1.0)]
