"""The memory planner against its own rules, on random lives and on the shape of a transformer."""
from hypothesis import given
from hypothesis import strategies as st

from ingot.compiler.plan.memory import ALIGNMENT, Arena, Life, aligned, lower_bound, plan_arena

_LIVES = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 8)), min_size=1, max_size=40)


def _check(lives: list[Life], arena: Arena) -> None:
    assert set(arena.offsets) == {life.name for life in lives}
    for life in lives:
        start = arena.offsets[life.name]
        assert start % ALIGNMENT == 0
        assert start + life.size <= arena.size
        for other in lives:
            if other.name < life.name and life.overlaps(other):
                begin = arena.offsets[other.name]
                assert start + life.size <= begin or begin + other.size <= start, f"{life} overlaps {other}"


@given(_LIVES)
def test_buffers_that_live_together_never_share_memory(entries: list[tuple[int, int, int]]) -> None:
    lives = [Life(f"b{i}", size, first, first + length) for i, (size, first, length) in enumerate(entries)]
    arena = plan_arena(lives)
    _check(lives, arena)
    assert arena.bound <= arena.size <= arena.unshared
    assert arena.unshared == sum(aligned(life.size) for life in lives)


def test_the_bound_is_the_largest_live_set() -> None:
    lives = [Life("a", 64, 0, 1), Life("b", 128, 1, 2), Life("c", 64, 2, 3)]
    assert lower_bound(lives) == 192


def test_memory_is_reused_after_the_last_reader() -> None:
    lives = [Life("a", 640, 0, 1), Life("b", 64, 1, 2), Life("c", 640, 2, 3)]
    arena = plan_arena(lives)
    assert arena.offsets["a"] == arena.offsets["c"]
    assert arena.size == arena.bound == 704


def test_transformer_layers_take_no_more_than_one_layer() -> None:
    """Residual, norm, qkv, attention, output, gate_up, activation: the chain of every decoder layer."""
    lives, step = [Life("h0", 576 * 4, 0, 5)], 1
    for layer in range(12):
        for name, size, length in (("norm", 576, 1), ("qkv", 960, 1), ("attn", 576, 1), ("out", 576, 1),
                                   ("res", 576, 5), ("norm2", 576, 1), ("gate_up", 3072, 1), ("act", 1536, 1),
                                   ("down", 576, 1)):
            lives.append(Life(f"{layer}.{name}", size * 4, step, step + length))
            step += 1
    arena = plan_arena(lives)
    _check(lives, arena)
    assert arena.size <= 1.05 * arena.bound
    assert arena.size < arena.unshared / 10


def test_no_buffers_need_no_memory() -> None:
    assert plan_arena([]).size == 0


def test_what_sticks_out_is_placed_first_in_the_next_attempt() -> None:
    """Of a GPT-2: the residuals of two layers and what is widest between them. First-fit in any of the simple orders
    takes a ninth more than the bound."""
    widths = ((1, 11, 22), (4, 19, 20), (4, 20, 21), (1, 21, 32), (4, 29, 30), (4, 30, 31))
    lives = [Life(f"b{i}", 3072 * width, first, last) for i, (width, first, last) in enumerate(widths)]
    arena = plan_arena(lives)
    _check(lives, arena)
    assert arena.size == arena.bound
