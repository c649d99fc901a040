from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.kv import CacheKey
from ingot.runtime.kv.tree import PrefixTree, common_length

KEYS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=12)


@given(KEYS, KEYS, KEYS, st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple))
def test_best_child_is_the_best_of_the_usable_ones(first: list[tuple[int, ...]], later: list[tuple[int, ...]],
                                                   unusable: list[tuple[int, ...]], key: tuple[int, ...]) -> None:
    tree = PrefixTree(4, 1)
    root = tree.root(CacheKey())
    for child in first:
        tree.child(root, child)
    tree.best_child(root, key, lambda node: True)  # the order of children is made here, and then kept
    for child in later:
        tree.child(root, child)
    for child in first[::2]:
        node = root.children.get(child)
        if node is not None:
            tree.prune(node)
    usable = {child for child in root.children if child not in unusable}
    node, common = tree.best_child(root, key, lambda node: node.key in usable)
    assert common == max((common_length(child, key) for child in usable), default=0)
    assert node is None if not common else node is not None and common_length(node.key, key) == common
    assert root.num_tails == sum(len(child) < 4 for child in root.children)


def test_a_node_stays_while_it_is_needed() -> None:
    tree = PrefixTree(2, 1)
    root = tree.root(CacheKey())
    below = tree.child(tree.child(root, (1, 2)), (3, 4))
    assert below.parent is not None
    tree.prune(below.parent)  # has a child
    assert below.parent.children == {(3, 4): below}
    below.pins = 1
    tree.prune(below)
    assert tree.roots and tree.first_blocks
    below.pins = 0
    tree.prune(below)
    assert not tree.roots and not tree.first_blocks


def test_a_node_that_is_gone_does_not_take_its_successor_along() -> None:
    tree = PrefixTree(2, 1)
    root = tree.root(CacheKey())
    old = tree.child(root, (1, 2))
    tree.prune(old)
    root = tree.root(CacheKey())
    new = tree.child(root, (1, 2))
    new.pins = 1
    tree.prune(old)
    assert tree.root(CacheKey()).children == {(1, 2): new}
