"""Room of an engine for LoRA adapters: how many it serves at once, of what rank, and how one lies in its slot."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from .engine_format import EngineFormatError

MAX_RANK = 256
MAX_ADAPTERS = 256
ALIGNMENT = 64
ELEMENT_BYTES = 2
"""Of bfloat16, in which all matrices of a slot are."""


@dataclass(frozen=True)
class LoraModule:
    """A layer that adapters may change, and where their matrices for it lie in a slot.

    name   of the module in the Hugging Face model: "model.layers.0.self_attn.q_proj"
    a      byte of the slot at which bf16 [max_rank, in_features] begins: lora_A.weight of PEFT
    b      likewise bf16 [max_rank, out_features]: lora_B.weight, transposed, times the adapter's scaling
    """

    name: str
    in_features: int
    out_features: int
    a: int
    b: int


@dataclass(frozen=True)
class LoraRoom:
    """max_adapters slots of bytes_per_adapter each. Matrices of a smaller rank than max_rank, and modules that an
    adapter leaves alone, are filled up with zeros. What is added to a module's output for a token x of a sequence with
    that slot: (x aᵀ) b."""

    max_rank: int
    max_adapters: int
    bytes_per_adapter: int
    modules: tuple[LoraModule, ...]

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.max_adapters * self.bytes_per_adapter

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Self | None:
        """None without room. Raises EngineFormatError for what is no such member, and for matrices that leave the slot
        or overlap."""
        entry = manifest.get("lora")
        if entry is None:
            return None
        where = "manifest.json: lora"
        if not isinstance(entry, dict) or entry.get("dtype") != "bf16":
            raise EngineFormatError(f"{where}: expected an object with dtype bf16, got {entry!r:.80}")
        modules = entry.get("modules")
        if not isinstance(modules, list) or not modules:
            raise EngineFormatError(f"{where}: modules: expected a list, not empty, got {modules!r:.80}")
        found = cls(
            _count(entry, "max_rank", where, 1, MAX_RANK), _count(entry, "max_adapters", where, 1, MAX_ADAPTERS),
            _count(entry, "bytes_per_adapter", where, 1),
            tuple(_module(module, f"{where}: modules[{number}]") for number, module in enumerate(modules)))
        found._check(where)
        return found

    def to_json(self) -> dict[str, Any]:
        """The member `lora` of a manifest."""
        return {"max_rank": self.max_rank, "max_adapters": self.max_adapters, "dtype": "bf16",
                "bytes_per_adapter": self.bytes_per_adapter, "modules": [dict(vars(module)) for module in self.modules]}

    def check_slot(self, slot: int, size: int) -> None:
        """Of write_adapter: an AssertionError for a slot that is not there or an image of another size."""
        assert 0 <= slot < self.max_adapters and size == self.bytes_per_adapter, (slot, size, self.max_adapters,
                                                                                  self.bytes_per_adapter)

    def _check(self, where: str) -> None:
        if self.bytes_per_adapter % ALIGNMENT:
            raise EngineFormatError(f"{where}: bytes_per_adapter: {self.bytes_per_adapter} is no multiple of "
                                    f"{ALIGNMENT}")
        names = [module.name for module in self.modules]
        if len(set(names)) != len(names):
            raise EngineFormatError(f"{where}: modules: a name stands twice")
        row_bytes = self.max_rank * ELEMENT_BYTES
        taken = sorted((begin, begin + row_bytes * features, module.name) for module in self.modules
                       for begin, features in ((module.a, module.in_features), (module.b, module.out_features)))
        for begin, end, name in taken:
            if begin % ALIGNMENT or end > self.bytes_per_adapter:
                raise EngineFormatError(f"{where}: {name}: a matrix at bytes {begin} to {end} does not fit a slot of "
                                        f"{self.bytes_per_adapter}, or is not aligned to {ALIGNMENT}")
        for (_, end, one), (begin, _, other) in pairwise(taken):
            if begin < end:
                raise EngineFormatError(f"{where}: matrices of {one} and {other} overlap at byte {begin}")


def _module(entry: Any, where: str) -> LoraModule:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        raise EngineFormatError(f"{where}: name: expected a text, got {name!r:.80}")
    return LoraModule(name, _count(entry, "in_features", where, 1), _count(entry, "out_features", where, 1),
                      _count(entry, "a", where, 0), _count(entry, "b", where, 0))


def _count(entry: dict[str, Any], key: str, where: str, least: int, most: int = 1 << 48) -> int:
    value = entry.get(key)
    if type(value) is not int or not least <= value <= most:
        raise EngineFormatError(f"{where}: {key}: expected an integer of {least} to {most}, got {value!r:.80}")
    return value
