"""The order of waiting, and its bound."""

from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.kv import KvSequence
from ingot.runtime.scheduler.queue import WaitingQueue
from ingot.runtime.scheduler.sequence import Sequence, SequenceState


def sequence(name: str, arrival: float = 0.0, priority: int = 0) -> Sequence:
    return Sequence(name, [1], 2, KvSequence([1]), priority=priority, arrival=arrival)


def names(queue: WaitingQueue[Sequence]) -> str:
    return "".join(sequence.request_id for sequence in queue)


def test_priority_first_then_arrival() -> None:
    queue: WaitingQueue[Sequence] = WaitingQueue(ageing_s=10)
    for each in (sequence("a", 0), sequence("b", 1), sequence("c", 2, priority=1), sequence("d", 2, priority=1)):
        queue.add(each)
    assert names(queue) == "cdab"


def test_a_level_of_priority_is_a_head_start() -> None:
    queue: WaitingQueue[Sequence] = WaitingQueue(ageing_s=10)
    for each in (sequence("a", 0), sequence("b", 9.5, priority=1), sequence("c", 10.5, priority=1),
                 sequence("d", 19, priority=2)):
        queue.add(each)
    assert names(queue) == "dbac"


def test_the_old_place_after_a_pause() -> None:
    queue: WaitingQueue[Sequence] = WaitingQueue(ageing_s=1)
    first, second, third = (sequence(name) for name in "abc")
    for each in (first, second, third):
        queue.add(each)
    queue.remove(second)
    assert (names(queue), queue.num_paused) == ("ac", 0)
    second.state = SequenceState.PAUSED
    queue.put_back(second)
    assert (names(queue), queue.num_paused, len(queue)) == ("abc", 1, 3)
    queue.remove(second)
    assert queue.num_paused == 0
    assert queue.first(1) == [first]


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 20)), max_size=30))
def test_who_overtakes_came_within_the_head_start(arrivals: list[tuple[int, int]]) -> None:
    queue: WaitingQueue[Sequence] = WaitingQueue(ageing_s=2.5)
    for index, (priority, arrival) in enumerate(sorted(arrivals, key=lambda each: each[1])):
        queue.add(sequence(str(index), arrival, priority))
    order = list(queue)
    for index, late in enumerate(order):
        for early in order[:index]:
            assert early.arrival <= late.arrival + (early.priority - late.priority) * 2.5
