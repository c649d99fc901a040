"""What an attention mask means: causal, with a window, in chunks. Found by asking it, not by knowing who made it.

The mask of an attention call is a value of the traced program. Its part of the program is run with real positions,
and the answers are compared with what `attention(window, chunk)` means. Anything else is refused.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from .errors import ImportRefused
from .program_part import NOT_A_LEAF, part_of, run_part
from .torch_ops import NUM_PROBES

_FAR = 1 << 24
"""A position beyond every window: a window that is wider than this is none."""

_NEAR = 1 << 20

_MATRIX_TOKENS = 640
_LARGEST_MATRIX_TOKENS = 4096
"""Sides of a mask that the model itself computes as a matrix, when it must be looked at as a whole."""

Visible = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(query positions, key positions) -> which keys are seen; three vectors of one length."""


@dataclass(frozen=True)
class MaskMeaning:
    """Keys at p <= pos, of which only those with p > pos - window (0: no window), and p >= pos // chunk * chunk."""

    window: int = 0
    chunk: int = 0

    def visible(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen = k <= q
        if self.window:
            seen &= k > q - self.window
        if self.chunk:
            seen &= k >= q // self.chunk * self.chunk
        return seen


@dataclass(frozen=True)
class MaskTerm:
    """One mask of an attention call: boolean (seen where true, or where false if inverted), or added to the scores."""

    node: torch.fx.Node
    inverted: bool = False


class UnknownMask(Exception):
    """The mask is none that attention can express; the message says what was found."""


class MaskReader:
    """Reads the masks of one traced program. buffers: placeholder name -> value. max_tokens: it holds up to there."""

    def __init__(self, buffers: dict[str, torch.Tensor], positions: str, max_tokens: int) -> None:
        self._buffers = buffers
        self._positions = positions
        self._max_tokens = max_tokens
        self._meanings: dict[tuple[MaskTerm, ...], MaskMeaning] = {}

    def meaning(self, masks: tuple[MaskTerm, ...]) -> MaskMeaning:
        """Of all masks of a call together: seen is what each lets be seen. Raises UnknownMask."""
        masks = tuple(MaskTerm(_skip_views(mask.node), mask.inverted) for mask in masks)
        if masks not in self._meanings:
            if len(masks) == 1 and _is(masks[0].node, "ingot.mask") and not masks[0].inverted:
                self._meanings[masks] = self._meaning_of_function(masks[0].node.all_input_nodes[0])
            else:
                limit, visible = self._matrix(masks)
                self._meanings[masks] = read_meaning(visible, limit)
        return self._meanings[masks]

    def _meaning_of_function(self, visible: torch.fx.Node) -> MaskMeaning:
        """A function of positions is asked about positions beyond every window; one that looks things up in a tensor
        of the tokens, only as far as that is affordable."""
        try:
            return read_meaning(self._probing(visible, 2), _FAR)
        except IndexError:
            tokens = min(self._max_tokens, _NEAR)
            return read_meaning(self._probing(visible, tokens), tokens - 1)

    def _probing(self, visible: torch.fx.Node, tokens: int) -> Visible:
        """Runs the mask function's part of the program on pairs of positions, NUM_PROBES at a time."""
        def ask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            answers = []
            for begin in range(0, len(q), NUM_PROBES):
                pair = [_padded(t[begin:begin + NUM_PROBES]) for t in (q, k)]
                answers.append(self._run(visible, tokens, pair)[:len(q) - begin])
            return torch.cat(answers)[:len(q)].to(torch.bool)
        return ask

    def _matrix(self, masks: tuple[MaskTerm, ...]) -> tuple[int, Visible]:
        """Masks that the model made itself, [.., T, T], looked at for more tokens than any number in its program."""
        numbers = [abs(a) for mask in masks for node in _part(mask.node) for a in _scalars(node.args)
                   if isinstance(a, int) and abs(a) < 2**31]
        tokens = min(max([_MATRIX_TOKENS, *(2 * n + 3 for n in numbers)]), self._max_tokens)
        if tokens > _LARGEST_MATRIX_TOKENS:
            raise UnknownMask(f"a number of {max(numbers)} in a mask that the model computes as a matrix")
        seen = torch.ones(tokens, tokens, dtype=torch.bool)
        for mask in masks:
            value = _as_bool(self._run(mask.node, tokens, None), mask.inverted)
            try:
                planes = value.expand(*value.shape[:-2], tokens, tokens).reshape(-1, tokens, tokens)
            except RuntimeError as error:
                raise UnknownMask(f"a mask of shape {list(value.shape)} for {tokens} tokens") from error
            if not (planes == planes[0]).all():
                raise UnknownMask("a mask that differs between heads")
            seen &= planes[0]
        return tokens - 1, lambda q, k: seen[q, k]

    def _run(self, node: torch.fx.Node, tokens: int, pair: list[torch.Tensor] | None) -> torch.Tensor:
        """A value for `tokens` tokens at positions 0, 1, ..; pair: the positions at which mask functions are asked."""
        def leaf(step: torch.fx.Node) -> Any:
            if step.op == "placeholder":
                if step.name == self._positions:
                    return torch.arange(tokens)[None]
                if step.name not in self._buffers:
                    raise UnknownMask(f"a mask that depends on more than positions (on {step.name})")
                return self._buffers[step.name]
            if _is(step, "ingot.probe_indices"):
                assert pair is not None
                return tuple(pair)
            if _is(step, "ingot.mask"):
                q, k = torch.meshgrid(torch.arange(tokens), torch.arange(tokens), indexing="ij")
                ask = self._probing(step.all_input_nodes[0], tokens)
                return ask(q.reshape(-1), k.reshape(-1)).reshape(1, 1, tokens, tokens)
            if "ingot." in str(step.target):
                raise UnknownMask("a mask that depends on the model's activations")
            return NOT_A_LEAF

        result = run_part(_part(node), leaf)
        assert isinstance(result, torch.Tensor)
        return result


def read_meaning(visible: Visible, limit: int) -> MaskMeaning:
    """The meaning of a mask that answers for positions up to `limit`. Raises UnknownMask.

    A candidate is measured at a few positions and then compared at many pairs, most of them near its edges.
    """
    first = [_first_visible(visible, q) for q in (limit, limit - 1, limit - 2)]
    if first[0] == 0 == first[1]:
        candidate = MaskMeaning()
    elif first[0] - first[1] == first[1] - first[2] == 1:
        candidate = MaskMeaning(window=limit - first[0] + 1)
    else:
        start = _first_visible(visible, limit)
        candidate = MaskMeaning(chunk=start - _first_visible(visible, start - 1)) if start else MaskMeaning()
    q, k = _pairs(candidate, limit)
    wrong = (visible(q, k) != candidate.visible(q, k)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        does = "sees" if bool(visible(q[i:i + 1], k[i:i + 1])[0]) else "does not see"
        raise UnknownMask(f"a mask that is not causal, nor causal within a window or a chunk: the token at "
                          f"{int(q[i])} {does} the one at {int(k[i])}")
    return candidate


def _first_visible(visible: Visible, q: int) -> int:
    """The first key that the query sees, if what it sees is one run that ends with itself."""
    low, high = 0, q
    while low < high:
        middle = (low + high) // 2
        if bool(visible(torch.tensor([q]), torch.tensor([middle]))[0]):
            high = middle
        else:
            low = middle + 1
    return low


def _pairs(candidate: MaskMeaning, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key positions within [0, limit]: random ones, and those near the edges of the candidate."""
    random = torch.Generator().manual_seed(0)
    queries = torch.cat([torch.arange(min(80, limit)), torch.tensor([limit]),
                         (torch.rand(200, generator=random, dtype=torch.float64) ** 4 * limit).long()])
    if candidate.chunk:
        edges = torch.arange(1, 5) * candidate.chunk
        queries = torch.cat([queries, edges - 1, edges])
    queries = queries[queries <= limit]
    offsets = torch.tensor([-2, -1, 0, 1, 2])
    keys = [queries[:, None] + offsets, (queries[:, None] * torch.rand(1, 6, generator=random)).long(),
            (queries[:, None] + (limit - queries[:, None]) * torch.rand(1, 3, generator=random)).long(),
            torch.zeros_like(queries)[:, None]]
    if candidate.window:
        keys.append(queries[:, None] - candidate.window + offsets)
    if candidate.chunk:
        keys.append(queries[:, None] // candidate.chunk * candidate.chunk + offsets)
    k = torch.cat(keys, dim=1)
    q = queries[:, None].expand_as(k)
    inside = (k >= 0) & (k <= limit)
    return q[inside], k[inside]


def _is(node: torch.fx.Node, name: str) -> bool:
    return str(node.target).removesuffix(".default") == name


_VIEWS = ("aten.alias", "aten.clone", "aten.detach", "aten.slice.Tensor", "aten.expand", "aten._to_copy",
          "aten.contiguous", "aten.view", "aten.unsqueeze", "aten.squeeze")


def _skip_views(mask: torch.fx.Node) -> torch.fx.Node:
    """The mask below operators that change neither its shape nor its type."""
    while any(_is(mask, view) for view in _VIEWS):
        source = mask.all_input_nodes[0]
        old, new = source.meta["val"], mask.meta["val"]
        if tuple(map(str, old.shape)) != tuple(map(str, new.shape)) or old.dtype != new.dtype:
            break
        mask = source
    return mask


def _part(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a mask depends on; a marker's own program is run apart."""
    return part_of(node, lambda n: _is(n, "ingot.mask"))


def _scalars(args: Any) -> list[Any]:
    if isinstance(args, list | tuple):
        return [s for a in args for s in _scalars(a)]
    return [args]


def _padded(positions: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(positions, (0, NUM_PROBES - len(positions)))


def _as_bool(mask: torch.Tensor, inverted: bool) -> torch.Tensor:
    """A boolean mask as it is; of one that is added to the scores, 0 means seen and hugely negative unseen."""
    if mask.dtype == torch.bool:
        return ~mask if inverted else mask
    seen, unseen = mask == 0, mask < -1e4
    if not (seen | unseen).all():
        raise UnknownMask("a mask that adds values to the scores (a position bias)")
    return seen


def refusal(error: UnknownMask, origin: str) -> ImportRefused:
    return ImportRefused(f"attention with {error} is not supported\n  in {origin}")
