# mypy: allow-untyped-defs, allow-incomplete-defs
"""What makes Triton's interpreter several times faster: it describes the same types and makes the same constants again
for every operation of every block, converts numbers bit by bit, and replaces the functions of triton.language for every
call of a function."""
from __future__ import annotations

import dataclasses
import math
import threading
from types import FunctionType
from typing import Any

_installed = False
_checks_overflow = False


def install(check_overflow: bool) -> None:
    """Before the first kernel runs; later calls do nothing. check_overflow: whether a sum, a difference or a product of
    integers that overflows is an error, of masked elements too, in kernels that were written by hand (check_next)."""
    import triton.language as tl
    from triton.runtime import interpreter

    global _installed, _checks_overflow
    if _installed:
        return
    _installed, _checks_overflow = True, check_overflow
    # The interpreter would put the original functions back after each launch, and look them all up again for the next.
    interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    _share_types(tl)
    _share_dtypes(tl, interpreter)
    _convert_at_once(tl, interpreter)
    _check_overflow_at_once(interpreter)
    _convert_operands_once(tl, interpreter)
    _rewrite_one_by_one(interpreter)


def check_next(generated: bool) -> None:
    """Before a launch. In a generated kernel integers wrap, as those of the model's own graph do, and masked elements
    may hold anything."""
    from triton.runtime.interpreter import interpreter_builder

    wanted = _checks_overflow and not generated
    if interpreter_builder.options.sanitize_overflow != wanted:
        interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=wanted)


def _share_types(tl) -> None:
    """Blocks of equal shape and element type have one description; so have the shapes of tensors of one type."""
    known: dict[Any, Any] = {}
    make = tl.core.block_type.__init__

    def init_type(self, element_ty, shape) -> None:
        try:
            found = known.get((element_ty, *shape))
        except TypeError:  # extents that are no plain numbers
            make(self, element_ty, shape)
            return
        if found is None:
            make(self, element_ty, shape)
            found = known[element_ty, *shape] = vars(self)
        self.__dict__ = found

    def init_tensor(self, handle, type) -> None:
        found = vars(type).get("of_tensors")
        if found is None:
            shape = type.shape if type.is_block() else ()
            found = (tl.core.constexpr(math.prod(shape)), type.scalar,
                     tl.core.tuple([tl.core.constexpr(extent) for extent in shape]))
            type.of_tensors = found
        self.handle, self.type = handle, type
        self.numel, self.dtype, self.shape = found

    tl.core.block_type.__init__ = init_type
    tl.core.tensor.__init__ = init_tensor


def _share_dtypes(tl, interpreter) -> None:
    known: dict[str, Any] = {}
    look_up = interpreter._get_np_dtype

    def numpy_type(kind):
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = look_up(kind)
        return found

    interpreter._get_np_dtype = numpy_type


def _convert_at_once(tl, interpreter) -> None:
    """The conversions that every matrix product needs. The interpreter's own get subnormal numbers wrong, and take NaN
    of e4m3 for 480; to bf16 they cut off, which is kept (`narrow` in math.py rounds beforehand)."""
    import numpy as np

    from .floats import from_e4m3

    e4m3 = from_e4m3(np.arange(256, dtype=np.uint8))
    halves = e4m3.astype(np.float16).view(np.uint16)
    singles = e4m3.view(np.uint32)
    quick = {("bf16", "fp32"): lambda data: data.astype(np.uint32) << 16,
             ("fp32", "bf16"): lambda data: (data.view(np.uint32) >> 16).astype(np.uint16),
             ("fp8e4nv", "fp32"): lambda data: singles[data],
             ("fp8e4nv", "fp16"): lambda data: halves[data]}
    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding_mode):
        found = quick.get((source.name, target.name)) if rounding_mode is None else None
        return convert(data, source, target, rounding_mode) if found is None else found(np.ascontiguousarray(data))

    interpreter._convert_float = convert_float


def _check_overflow_at_once(interpreter) -> None:
    """The interpreter's own check takes ten operations for each, and then tells nothing unless it is built to debug."""
    import numpy as np

    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self, lhs, rhs, binary_op) -> None:
        kind = lhs.type.scalar
        if not 1 < kind.int_bitwidth < 64 or not self.builder.options.sanitize_overflow:
            return
        wide = operations[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        if wide.size and (wide.max() > kind.get_int_max_value() or wide.min() < kind.get_int_min_value()):
            raise OverflowError(f"{binary_op.__name__} of {kind} gives numbers from {wide.min()} to {wide.max()}")

    type(interpreter.interpreter_semantic).binary_op_sanitize_overflow_impl = check


def _rewrite_one_by_one(interpreter) -> None:
    """Python 3.11 parses in one thread at a time: where garbage is collected within, and somebody watches that, another
    thread may go on, and if it parses too, both fail ("recursion depth mismatch")."""
    rewrite, lock = interpreter.InterpretedFunction.rewrite, threading.Lock()

    def alone(self):
        with lock:
            return rewrite(self)

    interpreter.InterpretedFunction.rewrite = alone


def _convert_operands_once(tl, interpreter) -> None:
    """Two operands of one shape and element type, which most are, need neither conversion nor broadcasting; a number
    beside a tensor becomes the same tensor every time."""
    semantic = type(interpreter.interpreter_semantic)
    check = semantic.binary_op_type_checking_impl
    kept = frozenset(("fp32", "fp64", *tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES))

    def beside(self, tensor, number, first: bool, rest) -> Any:
        known = vars(tensor.type).setdefault("numbers_beside", {})
        key = (type(number), number or str(number), first, rest)  # 0.0 and -0.0 are equal
        if (found := known.get(key)) is None:
            pair = check(self, number, tensor, *rest) if first else check(self, tensor, number, *rest)
            if pair[first] is not tensor:
                return pair
            found = known[key] = pair[not first]
        return (found, tensor) if first else (tensor, found)

    def checked(self, lhs, rhs, *rest, **named) -> Any:
        is_tensor = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if named or not any(is_tensor):
            return check(self, lhs, rhs, *rest, **named)
        if not all(is_tensor):
            return beside(self, lhs, rhs, False, rest) if is_tensor[0] else beside(self, rhs, lhs, True, rest)
        if lhs.dtype.name in kept and (lhs.type is rhs.type or vars(lhs.type) is vars(rhs.type)):
            return lhs, rhs
        return check(self, lhs, rhs, *rest)

    semantic.binary_op_type_checking_impl = checked


def is_interpreting() -> bool:
    """Whether triton, imported now or before, interprets in this process."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(tl.standard.cdiv, InterpretedFunction)
