"""Loads, stores, atomic operations and cp.async."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .floating import narrow, widen
from .instruction import Address, Code, Instruction, Operand, PtxError, Register, Run, Symbol, Vector, instruction
from .memory import POISON
from .rows import FLOATS, INTEGERS, register_width
from .warp import Warps

_CACHING = {"ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc", "relaxed", "acquire", "release", "volatile", "weak", "cta",
            "gpu", "sys", "cluster", "evict_first", "evict_last", "evict_normal", "no_allocate", "evict_unchanged",
            "L1::evict_last", "L1::evict_first", "L1::evict_normal", "L1::no_allocate", "L1::evict_unchanged",
            "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", "unified"}
"""What changes speed or the order that others see things in: here all see everything at once."""
_SPACES = {"global": "global", "shared": "shared", "shared::cta": "shared", "param": "param",
           "local": "local"}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def _parse(op: Instruction) -> tuple[str, str, int]:
    """(space, type, elements). Raises PtxError for what is not known."""
    space, count = "", 1
    for part in op.parts[1:-1]:
        if part in _SPACES:
            space = _SPACES[part]
        elif part in _VECTORS:
            count = _VECTORS[part]
        elif part not in _CACHING:
            raise PtxError(f"{op.opcode}: .{part} is not supported")
    kind = op.parts[-1]
    if not space or (kind not in INTEGERS and kind not in FLOATS):
        raise PtxError(f"unknown instruction {op.opcode}")
    return space, kind, count


def address_reader(operand: Operand | None, code: Code) -> Callable[[Warps], np.ndarray]:
    """u64 [lanes]: base + offset. Shared addresses may be of 32 bits."""
    assert isinstance(operand, Address), operand
    width = register_width(operand.base) or (32 if isinstance(operand.base, Symbol) else 64)
    row, offset = code.row(operand.base, width), np.uint64(operand.offset & ((1 << 64) - 1))

    def read(warps: Warps) -> np.ndarray:
        base = warps.bits[width][row]
        wide = base if width == 64 else base.astype(np.uint64)
        return wide + offset if offset else wide
    return read


def _items(operand: Operand | None) -> tuple[Operand | None, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


@instruction("ld")
def load(op: Instruction, code: Code) -> Run:
    space, kind, count = _parse(op)
    if space == "param":
        return _load_param(op, code, kind)
    element = INTEGERS.get(kind) or FLOATS[kind].replace("f", "u")
    targets = [_target(item, element, code) for item in _items(op.operands[0])]
    if len(targets) != count:
        raise PtxError(f"{op.opcode} loads {count} elements to {len(targets)} registers")
    address = address_reader(op.operands[1], code)
    size = count * int(element[1])

    def run(warps: Warps) -> None:
        launch = warps.launch
        if space == "shared":
            at = launch.shared_access.offsets(warps, address(warps), size)
            launch.shared_access.note_read(warps, at, size)
            found = launch.shared_access.view(element, count)[at // size]
        elif space == "local":
            found = warps.local.view(element, count)[warps.local.offsets(warps, address(warps), size) // size]
        else:
            at = launch.memory.offsets(address(warps), size, warps.mask).astype(np.int64)
            launch.memory.note_read(warps, at, size)
            found = launch.memory.view(element, count)[at // size]
        for i, (view, row) in enumerate(targets):
            np.copyto(warps.views[view][row], found[:, i], where=warps.mask)
    return run


def _target(item: Operand | None, element: str, code: Code) -> tuple[str, int]:
    """The register, as a type to which the element is extended."""
    width = register_width(item) or 8 * int(element[1])
    if width < 8 * int(element[1]):
        raise PtxError("the register is too narrow for what is loaded")
    return f"{element[0]}{width // 8}", code.target(item, width)


def _load_param(op: Instruction, code: Code, kind: str) -> Run:
    to, source = op.operands
    assert isinstance(source, Address)
    if not isinstance(source.base, Symbol) or source.offset:
        raise PtxError(f"{op.opcode}: only whole parameters are supported")
    width = register_width(to)
    if width < 8 * int((INTEGERS.get(kind) or FLOATS[kind])[1]):
        raise PtxError("the register is too narrow for what is loaded")
    d, a = code.target(to, width), code.special(f"param:{source.base.name}", width)

    def run(warps: Warps) -> None:
        rows = warps.bits[width]
        np.copyto(rows[d], rows[a], where=warps.mask)
    return run


@instruction("st")
def store(op: Instruction, code: Code) -> Run:
    space, kind, count = _parse(op)
    element = f"u{(INTEGERS.get(kind) or FLOATS[kind])[1]}"
    sources = []
    for item in _items(op.operands[1]):
        width = register_width(item) or 8 * int(element[1])
        sources.append((width, code.row(item, width)))
    if len(sources) != count or space == "param":
        raise PtxError(f"{op.opcode} stores {count} elements of {len(sources)} registers")
    address = address_reader(op.operands[0], code)
    size = count * int(element[1])

    def run(warps: Warps) -> None:
        values = np.empty((warps.lanes, count), element)
        for i, (width, row) in enumerate(sources):
            values[:, i] = warps.bits[width][row]
        launch = warps.launch
        if space == "shared":
            at = launch.shared_access.offsets(warps, address(warps), size)
            launch.shared_access.note_write(warps, at, values.view(np.uint8))
            view = launch.shared_access.view(element, count)
        elif space == "local":
            at, view = warps.local.offsets(warps, address(warps), size), warps.local.view(element, count)
        else:
            at = launch.memory.offsets(address(warps), size, warps.mask).astype(np.int64)
            launch.memory.note_write(warps, at, values.view(np.uint8))
            view = launch.memory.view(element, count)
        if warps.mask is True:
            view[at // size] = values
        else:
            view[at[warps.mask] // size] = values[warps.mask]
    return run


# Atomic operations

_ATOMIC: dict[str, Callable[..., Any]] = {
    "add": lambda old, new: old + new, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda old, new: new,
    "inc": lambda old, new: np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - old.dtype.type(1)),
    "cas": lambda old, compare, new: np.where(old == compare, new, old)}


@instruction("atom", "red")
def atomic(op: Instruction, code: Code) -> Run:
    """Lane after lane, in an order that the seed chooses."""
    name = next((part for part in op.parts if part in _ATOMIC), "")
    kind = op.parts[-1]
    space = next((_SPACES[part] for part in op.parts if part in _SPACES), "")
    known = _CACHING | set(_SPACES) | {name, "acq_rel", "noftz", "rn", kind}
    unknown = set(op.parts[1:]) - known
    if not name or unknown or space not in ("global", "shared") or (kind not in INTEGERS and kind not in _FLOAT_WORDS):
        raise PtxError(f"unknown instruction {op.opcode}")
    element = INTEGERS.get(kind) or _FLOAT_WORDS[kind]
    width, floats = 8 * int(element[1]), kind in _FLOAT_WORDS
    returns = op.opcode.startswith("atom")
    acquires, releases = op.has("acquire") or op.has("acq_rel"), op.has("release") or op.has("acq_rel")
    d = code.target(op.operands[0], width) if returns else None
    place, *values = op.operands[1:] if returns else op.operands
    address = address_reader(place, code)
    sources = [code.row(value, width) for value in values]
    function = _on_floats(name, kind) if floats else _ATOMIC[name]

    def run(warps: Warps) -> None:
        launch, size = warps.launch, width // 8
        if space == "shared":
            at = launch.shared_access.offsets(warps, address(warps), size)
            view = launch.shared_access.view(element, 1)
        else:
            at = launch.memory.offsets(address(warps), size, warps.mask).astype(np.int64)
            view = launch.memory.view(element, 1)
        given = [warps.views[element][row] for row in sources]
        old = np.zeros(warps.lanes, element)
        races = launch.global_races if space == "global" else None
        for lane in launch.random.permutation(np.flatnonzero(warps.active)):
            if races is not None:
                races.atomic(int(warps.warp_of_launch[lane]), int(at[lane]), acquires, releases)
            cell = int(at[lane]) // size
            old[lane] = view[cell, 0]
            view[cell, 0] = function(view[cell, 0], *[value[lane] for value in given])
        if d is not None:
            np.copyto(warps.views[element][d], old, where=warps.mask)
    return run


_FLOAT_WORDS = {"f32": "u4", "f64": "u8", "f16": "u2", "bf16": "u2", "f16x2": "u4", "bf16x2": "u4"}


def _on_floats(name: str, kind: str) -> Callable[..., Any]:
    if name not in ("add", "min", "max"):
        raise PtxError(f"atomic {name} of {kind} is not supported")

    def change(old: Any, new: Any) -> Any:
        word = _FLOAT_WORDS[kind]
        a, b = (widen(np.array([value], word), kind) for value in (old, new))
        return narrow(_ATOMIC[name](a, b), kind)[0]
    return change


# Asynchronous copies

@instruction("cp.async.ca", "cp.async.cg")
def copy(op: Instruction, code: Code) -> Run:
    """[to], [from], size[, how much of it; the rest becomes zero]."""
    if not op.has("shared") and not op.has("shared::cta"):
        raise PtxError(f"unknown instruction {op.opcode}")
    to, source = address_reader(op.operands[0], code), address_reader(op.operands[1], code)
    size = int(op.operands[2].value)  # type: ignore[union-attr]
    if len(op.operands) > 4 or size not in (4, 8, 16):
        raise PtxError(f"{op.opcode}: {len(op.operands)} operands, {size} bytes")
    given = op.operands[3] if len(op.operands) == 4 else None
    if isinstance(given, Register) and given.width == 1:
        raise PtxError(f"{op.opcode}: a predicate as last operand is not supported")
    count = None if given is None else code.row(given, 32)

    def run(warps: Warps) -> None:
        launch, mask = warps.launch, warps.mask
        shared = launch.shared_access
        at = shared.offsets(warps, to(warps), size)
        wanted = None if count is None else warps.bits[32][count].astype(np.int64)
        read = mask if wanted is None else (wanted > 0) & warps.active
        if wanted is not None and (wanted[warps.active] > size).any():
            raise PtxError(f"{op.opcode}: more bytes than {size}")
        if wanted is not None and ((wanted != 0) & (wanted != size) & warps.active).any():
            raise PtxError(f"{op.opcode}: parts of {size} bytes are not supported")
        places = launch.memory.offsets(source(warps), size, read).astype(np.int64)
        if wanted is None:
            launch.memory.note_read(warps, places, size)
        data = launch.memory.view("u1", size)[places // size]
        if wanted is not None:
            data[wanted == 0] = 0
        shared.note_write(warps, at, data)
        active = warps.active
        shared.view("u1", size)[at[active] // size] = POISON
        warps.copies.begin(at, data, active)
    return run


@instruction("cp.async.commit_group")
def commit(op: Instruction, code: Code) -> Run:
    return lambda warps: warps.copies.commit(warps.active)


@instruction("cp.async.wait_group", "cp.async.wait_all")
def wait(op: Instruction, code: Code) -> Run:
    but = int(op.operands[0].value) if op.operands else None  # type: ignore[union-attr]
    return lambda warps: warps.copies.wait(warps.launch.shared_access.bytes, warps.active, but)


@instruction("membar", "prefetch", "prefetchu", "discard", "nanosleep")
def nothing(op: Instruction, code: Code) -> Run:
    """What has no effect on what is computed here."""
    return lambda warps: None
