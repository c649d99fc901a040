"""Statistics of the inputs of every matrix of a model, from one pass over a text."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .calibrate import Sink
from .statistics import SAMPLES, InputStatistics, block_spans
from .streamed import StreamedModel

MAX_EXPERT_BYTES = 1 << 29
"""Where the experts of a layer together would take more, they share the statistics of all their inputs."""

_SAMPLES_A_WINDOW = 16

_LARGEST_ENERGY = 10.0
"""A token whose inputs have more than this part of the usual energy (the median) counts as if it had no more: the first
tokens of many models' sequences have a thousand times that of all others in some layers, and mean little."""

_LINEAR = {"linear"}
_PRODUCTS = {"matmul", "__matmul__", "mm", "bmm"}


def gather(model: StreamedModel, windows: Sequence[Sequence[int]], prefix: int, sink: Sink,
           progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Statistics of the inputs of every matrix that a layer multiplies with, and of the head.

    windows   token ids, of equal length; the first `prefix` of each open it and do not count, where they can be told
    sink      gets them layer by layer: memory is that of one layer. A parameter [E, ..] of experts is told as
              "name[e]" for each expert, or as "name" where there are too many

    One thread, so that the sums have one order: the same model and tokens give the same bytes.
    """
    threads, done = torch.get_num_threads(), 0
    total = max(len(model.layers), 1)

    @contextmanager
    def around_layer(name: str, parameters: dict[str, torch.Tensor]) -> Iterator[None]:
        nonlocal done
        progress(done, total)
        watch.enter(parameters)
        with watch:
            yield
        watch.hand_over(sink)
        done += 1

    @contextmanager
    def around_window() -> Iterator[None]:
        watch.last = None
        yield

    watch = _Watch(prefix, len(windows[0]))
    torch.set_num_threads(1)
    try:
        hidden = model.run(windows, around_layer, around_window)
    finally:
        torch.set_num_threads(threads)
    if model.head:
        watch.enter({})
        for window in hidden:
            watch.add(model.head, window[None], None)
        watch.hand_over(sink)
    progress(total, total)


@dataclass
class _Sums:
    amax: torch.Tensor
    blocks: list[torch.Tensor]
    count: int = 0
    names: dict[str, None] = field(default_factory=dict)
    samples: list[torch.Tensor] = field(default_factory=list)

    @staticmethod
    def empty(width: int) -> _Sums:
        return _Sums(torch.zeros(width), [torch.zeros(end - begin, end - begin) for begin, end in block_spans(width)])

    def add(self, rows: torch.Tensor) -> None:
        """rows [T, K]."""
        if not len(rows):
            return
        torch.maximum(self.amax, rows.abs().amax(0), out=self.amax)
        energy = rows.square().sum(1)
        if (usual := energy.median()) > 0:
            rows = rows * (_LARGEST_ENERGY * usual / energy).clamp(max=1.0).sqrt()[:, None]
        for block, (begin, end) in zip(self.blocks, block_spans(rows.shape[1]), strict=True):
            part = rows[:, begin:end]
            block.addmm_(part.T, part)
        if (missing := SAMPLES - sum(map(len, self.samples))) > 0:
            step = -(-len(rows) // _SAMPLES_A_WINDOW)
            begin = step * (len(self.samples) % 4) // 4  # the first token of a sequence is unlike others: of few
            self.samples.append(rows[begin::step][:missing].clone())
        self.count += len(rows)

    def means(self) -> InputStatistics:
        return InputStatistics(self.amax.numpy(), tuple((block / self.count).numpy() for block in self.blocks),
                               self.count, torch.cat(self.samples).numpy())


class _Watch(TorchFunctionMode):
    """Sees every product of the layer that runs, and adds up what its parameters are multiplied with."""

    def __init__(self, prefix: int, length: int) -> None:
        """prefix: rows that do not count of what has `length` rows, one for each token of a window."""
        super().__init__()
        self.prefix, self.length = prefix, length
        self.last: Any = None  # what was read last, and under which name it was added up
        self.number = 0
        self.enter({})

    def enter(self, parameters: dict[str, torch.Tensor]) -> None:
        self.places = sorted((value.data_ptr(), value.data_ptr() + value.nbytes, name, value)
                             for name, value in parameters.items() if value.ndim in (2, 3))
        self.sums: dict[str, _Sums] = {}
        self.shared: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LINEAR:
            given = [*args, *(kwargs or {}).values()]
            self._see(given[0], (kwargs or {}).get("weight", given[1]))
        elif name in _PRODUCTS and len(args) > 1:
            self._see(args[0], args[1])
        elif name == "addmm" and len(args) > 2:
            self._see(args[1], args[2])
        return func(*args, **(kwargs or {}))

    def _see(self, x: Any, w: Any) -> None:
        if not isinstance(x, torch.Tensor) or not isinstance(w, torch.Tensor):
            return
        at = w.data_ptr()
        for begin, end, name, value in self.places:
            if not begin <= at < end:
                continue
            if value.ndim == 2:
                self.add(name, x, None)
            elif w.ndim == 2:
                self.add(name, x, ((at - begin) // (value.nbytes // len(value)), len(value)))
            elif x.ndim == 3 and len(x) == len(value):  # all experts at once
                for expert, rows in enumerate(x):
                    self.add(name, rows, (expert, len(value)))
            return

    def add(self, name: str, x: torch.Tensor, expert: tuple[int, int] | None) -> None:
        """expert: (its number, how many there are)."""
        if expert is not None and 4 * expert[1] * sum((b - a) ** 2 for a, b in block_spans(x.shape[-1])) \
                <= MAX_EXPERT_BYTES:
            name = f"{name}[{expert[0]}]"
        if self.last is not None and x is self.last[0] and self.shared.get(name, self.last[1]) == self.last[1]:
            self.shared[name] = self.last[1]
            self.sums[self.last[1]].names[name] = None
            return
        self.last = x, name
        self.shared.setdefault(name, name)
        sums = self.sums.setdefault(name, _Sums.empty(x.shape[-1]))
        sums.names[name] = None
        rows = x.reshape(-1, x.shape[-1])
        sums.add(rows[self.prefix:] if len(rows) == self.length else rows)

    def hand_over(self, sink: Sink) -> None:
        for sums in self.sums.values():
            if sums.count:
                sink(f"s{self.number}", sums.means(), list(sums.names))
                self.number += 1
        self.enter({})
