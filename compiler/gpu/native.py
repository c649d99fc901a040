"""Proof that an engine computes in the precision it is named for: read from the disassembly of its kernels."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.runtime.errors import WorkFailed

from .choose import Choice
from .disassemble import operand_bits
from .lower import Request
from .triton_compile import CompiledKernel

NATIVE_BITS = {"bf16": 16, "fp16": 16, "int4": 16, "fp8": 8, "int8": 8, "w4a8": 8, "nvfp4": 4}
"""Precision of a linear layer -> bits of the operands of its matrix instructions. fp32 has none: TF32 would round."""


class NotNative(WorkFailed):
    """A linear layer would not run on the matrix instruction of its precision."""


def require_native(asked: Sequence[tuple[int, Request, Choice]], code: Mapping[str, CompiledKernel]) -> None:
    """asked: (tokens of the bucket, request, choice). Raises NotNative for the first linear layer whose kernel has no
    matrix instruction with operands of its precision's width, or any other one. Only the minimums of groups are
    multiplied in 16 bits beside eight."""
    for tokens, request, choice in asked:
        if not request.native or request.precision not in NATIVE_BITS:
            continue
        wanted = NATIVE_BITS[request.precision]
        for launch in choice.candidate.launches:
            symbol = launch.kernel.symbol
            found = code[symbol].matrix
            bits = {operand_bits(name) for name in found}
            beside = {16} if any(name == "x_sum" for name, _ in launch.kernel.parameters) else set()
            if wanted not in bits or not bits <= {wanted} | beside:
                shown = ", ".join(found) or "none"
                raise NotNative(
                    f"{request.origin}: its kernel for {tokens} tokens, {symbol}, has to multiply operands of {wanted} "
                    f"bits; its matrix instructions on {code[symbol].arch} are: {shown}")
