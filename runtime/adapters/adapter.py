"""A LoRA adapter as PEFT saves it, read into what the slots of an engine hold."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from ..bf16 import round_to_bf16
from .config import AdapterConfig, parse_config
from .errors import AdapterError
from .tensors import read_tensors

if TYPE_CHECKING:
    from ..lora import LoraModule, LoraRoom

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_MAX_CONFIG_BYTES = 1 << 20
# Beyond what a slot holds: float32 takes twice as much, and one of too high a rank shall get an error that names it.
_SPARE_FACTOR, _SPARE_BYTES = 16, 64 << 20
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# How many names an error lists.
_SHOWN = 5


class Factors(NamedTuple):
    """A module's two matrices: what is added to its output for x is (x aᵀ) b.

    a  bf16 [rank, in_features], as its bits
    b  bf16 [rank, out_features], likewise, times the adapter's scaling
    """

    a: np.ndarray
    b: np.ndarray


@dataclass(frozen=True, eq=False)
class Adapter:
    """source   where it was read from, as errors call it
    sha256   of its two files one behind the other: cat adapter_config.json adapter_model.safetensors | sha256sum
    modules  name in the Hugging Face model -> its matrices
    """

    source: str
    sha256: str
    modules: Mapping[str, Factors]

    @classmethod
    def read(cls, folder: str | os.PathLike[str], sha256: str | None = None, *, shown: str | None = None,
             room: LoraRoom | None = None) -> Self:
        """sha256  what its content must have
        shown   what errors call the folder
        room    of the engine that it is for: files that are far larger than what fits there are not read

        Raises AdapterError for files that are missing, malformed, too large, or more than a LoRA adapter.
        """
        path = Path(folder)
        source = os.fspath(folder) if shown is None else shown
        if not os.path.isdir(path):  # Path.is_dir raises for names that are too long
            raise AdapterError(f"{source}: no folder; expected one with {CONFIG} and {WEIGHTS}")
        if not os.path.exists(path / WEIGHTS) and os.path.exists(path / PICKLED):
            raise AdapterError(f"{source}: has {PICKLED}, a pickle, which can run code and is not read; expected "
                               f"{WEIGHTS}.\n  Save it again: model.save_pretrained(folder, safe_serialization=True)")
        most = None if room is None else _SPARE_BYTES + _SPARE_FACTOR * room.bytes_per_adapter
        config = _bytes(path / CONFIG, f"{source}/{CONFIG}", _MAX_CONFIG_BYTES)
        weights = _bytes(path / WEIGHTS, f"{source}/{WEIGHTS}", most)
        found = hashlib.sha256(config)
        found.update(weights)
        if sha256 is not None and found.hexdigest() != sha256:
            raise AdapterError(f"{source}: its content has SHA-256 {found.hexdigest()}, expected {sha256}")
        modules = _modules(parse_config(config, f"{source}/{CONFIG}"), read_tensors(weights, f"{source}/{WEIGHTS}"),
                           f"{source}/{WEIGHTS}")
        return cls(source, found.hexdigest(), modules)

    @property
    def rank(self) -> int:
        """The largest of its matrices."""
        return max(factors.a.shape[0] for factors in self.modules.values())

    def check(self, room: LoraRoom | None) -> None:
        """Raises AdapterError unless a slot of `room` can hold it."""
        room = require_room(room)
        if self.rank > room.max_rank:
            raise AdapterError(f"{self.source}: has rank {self.rank}; this engine has room for {room.max_rank}.\n"
                               f"  Build it with --lora-max-rank {self.rank}")
        places = {module.name: module for module in room.modules}
        if unknown := [name for name in self.modules if name not in places]:
            raise AdapterError(f"{self.source}: changes {len(unknown)} modules that this engine has no room for: "
                               f"{_listed(unknown)}; it has room for {_kinds(room)}.\n"
                               "  Another base model? Or build the engine with --lora-modules for these too.")
        for name, (a, b) in self.modules.items():
            module = places[name]
            if (a.shape[1], b.shape[1]) != (module.in_features, module.out_features):
                raise AdapterError(f"{self.source}: {name} goes from {a.shape[1]} to {b.shape[1]} features, in the "
                                   f"engine from {module.in_features} to {module.out_features}.\n"
                                   "  It was trained for another base model.")

    def image(self, room: LoraRoom) -> np.ndarray:
        """u8 [bytes_per_adapter]: the content of a slot. Raises AdapterError as `check`."""
        self.check(room)
        image = np.zeros(room.bytes_per_adapter, np.uint8)
        for module in room.modules:
            if module.name in self.modules:
                mine, there = self.modules[module.name], _in_slot(image, room, module)
                there.a[: mine.a.shape[0]], there.b[: mine.b.shape[0]] = mine
        return image

    def within(self, image: np.ndarray, room: LoraRoom) -> Self:
        """The same, its matrices being those of the image that `image` gave: they need no memory of their own."""
        places = {module.name: module for module in room.modules}
        modules = {}
        for name, factors in self.modules.items():
            rank, there = factors.a.shape[0], _in_slot(image, room, places[name])
            modules[name] = Factors(there.a[:rank], there.b[:rank])
        return replace(self, modules=modules)


def require_room(room: LoraRoom | None) -> LoraRoom:
    """Raises AdapterError for an engine without."""
    if room is None:
        raise AdapterError("this engine has no room for LoRA adapters.\n"
                           "  Build one that has: ingot build … --lora-max-rank R")
    return room


def _in_slot(image: np.ndarray, room: LoraRoom, module: LoraModule) -> Factors:
    """A module's matrices of max_rank rows, views of a slot's content."""
    elements = image.view(np.uint16)
    a, b = (elements[begin // 2 : begin // 2 + room.max_rank * width].reshape(room.max_rank, width)
            for begin, width in ((module.a, module.in_features), (module.b, module.out_features)))
    return Factors(a, b)


def _bytes(path: Path, shown: str, most: int | None) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # to read a pipe would take for ever
            raise AdapterError(f"{shown}: is no file")
        if most is not None and found.st_size > most:
            raise AdapterError(f"{shown}: has {found.st_size} bytes, at most {most} are read")
        return path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{shown}: {error.strerror}; an adapter is a folder with {CONFIG} and {WEIGHTS}") from None


def _modules(config: AdapterConfig, tensors: dict[str, np.ndarray], what: str) -> dict[str, Factors]:
    halves: dict[str, dict[str, np.ndarray]] = {}
    for name, values in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise AdapterError(f"{what}: {name[:200]} is not served: {_kind(name)}; expected names as "
                               "base_model.model.…q_proj.lora_A.weight")
        half = halves.setdefault(found[1], {})
        if found[2] in half:
            raise AdapterError(f"{what}: {found[1][:200]} has two matrices lora_{found[2]}")
        half[found[2]] = values
    if not halves:
        raise AdapterError(f"{what}: holds no matrices")
    return {module: _factors(config, module, half, what) for module, half in halves.items()}


def _factors(config: AdapterConfig, module: str, half: dict[str, np.ndarray], what: str) -> Factors:
    where = f"{what}: {module[:200]}"
    if missing := {"A", "B"} - set(half):
        raise AdapterError(f"{where}: has no lora_{missing.pop()}.weight, only the other half")
    if config.targets is not None and not any(f".{module}".endswith(f".{target}") for target in config.targets):
        raise AdapterError(f"{where}: is none of the target_modules of {CONFIG}: {_listed(config.targets)}.\n"
                           "  Do both files belong together?")
    a, b, rank = half["A"], half["B"], config.rank_of(module)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise AdapterError(f"{where}: expected lora_A [{rank}, in], lora_B [out, {rank}], of rank {rank} by {CONFIG}, "
                           f"got {list(a.shape)} and {list(b.shape)}")
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = b.T.astype(np.float32) * np.float32(config.scaling_of(module))
        made = Factors(round_to_bf16(a.astype(np.float32)), round_to_bf16(scaled))
    if not all(np.isfinite(values).all() for values in (a, scaled)) or any((bits & 0x7FFF).max(initial=0) >= 0x7F80
                                                                          for bits in made):
        raise AdapterError(f"{where}: holds values that are no numbers, or too large for bfloat16")
    return made


def _kind(name: str) -> str:
    if "lora_magnitude" in name:
        return "DoRA, which scales the rows of the whole matrix"
    if "lora_embedding" in name:
        return "a change of the embedding"
    if ".lora_" in name and name.endswith(".bias"):
        return "a bias"
    return "no matrix of a LoRA adapter"


def _listed(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:100] for name in names[:_SHOWN]) + more


def _kinds(room: LoraRoom) -> str:
    """What modules are called, without saying so for each layer."""
    return ", ".join(dict.fromkeys(module.name.rpartition(".")[2] for module in room.modules))
