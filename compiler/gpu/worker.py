"""Compiles kernels in a process of its own: python -m ingot.compiler.gpu.worker

Reads requests from stdin, one JSON document a line, and answers each with one line on stdout:
{"kernel": GpuKernel.to_json(), "source": its source_digest, "capability": 90, "ptx": whether to tell the PTX too}
-> {"cubin": base64, "metadata": {...}, "ptx": "..."} or {"error": "..."}.
Triton prints what it likes on stdout; answers go to the descriptor that stdout was at the start.
"""
from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any

from ingot.plugins.gpu.generated import module_of
from ingot.plugins.gpu.sources import source_digest

from .programmatic_launch import FIRST_CAPABILITY, overlap_launches

_METADATA = ("name", "shared", "num_warps", "num_ctas", "tmem_size", "global_scratch_size", "global_scratch_align",
             "profile_scratch_size", "profile_scratch_align", "tensordesc_meta")
_ALIGNED = [["tt.divisibility", 16]]


def compile_one(request: dict[str, Any]) -> dict[str, Any]:
    """Raises whatever triton raises."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = request["kernel"]
    text = kernel.get("text", "")
    function = getattr(module_of(kernel["module"], text), kernel["function"])
    # What was imported must be what the result is filed under.
    if source_digest(kernel["module"], text) != request["source"]:
        raise RuntimeError(f"the source of {kernel['module']} changed while its kernels were compiled; build again")
    given = kernel["signature"] | dict.fromkeys(kernel["constants"], "constexpr")
    if set(given) != set(function.arg_names):
        raise TypeError(f"{kernel['function']} takes {function.arg_names}, the kernel gives {list(given)}")
    told = list(kernel["signature"])
    if told != [name for name in function.arg_names if name in kernel["signature"]]:  # launches pass them as told
        raise TypeError(f"{kernel['function']} takes its parameters as {function.arg_names}, the kernel tells {told}")
    signature = {name: given[name] for name in function.arg_names}
    aligned = {(i,): _ALIGNED for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(function, signature=signature, constexprs=kernel["constants"], attrs=aligned)
    options = {"num_warps": kernel["num_warps"], "num_stages": kernel["num_stages"], "enable_fp_fusion": True}
    if kernel["max_registers"]:
        options["maxnreg"] = kernel["max_registers"]
    knobs.runtime.add_stages_inspection_hook = _stages
    compiled = triton.compile(source, target=GPUTarget("cuda", request["capability"], 32), options=options)
    metadata = compiled.metadata._asdict()
    answer = {"cubin": base64.b64encode(compiled.asm["cubin"]).decode(),
              "metadata": {name: metadata.get(name) for name in _METADATA}}
    return answer | ({"ptx": compiled.asm["ptx"]} if request.get("ptx") else {})


def _stages(backend: Any = None, stages: Any = None, options: Any = None, language: Any = None,
            capability: int = 0) -> tuple[str, str] | None:
    """Triton asks without arguments what to add to its cache's key, and with them before it compiles."""
    if stages is None:
        return "programmatic_launch", "programmatic_launch"
    if capability >= FIRST_CAPABILITY:
        make = stages["ptx"]
        stages["ptx"] = lambda source, metadata: overlap_launches(make(source, metadata))
    return None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = compile_one(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
