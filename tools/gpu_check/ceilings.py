"""Section "ceilings": what the device does at most, measured with PyTorch: copies, and large matrix products."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_COPY_BYTES = 4 << 30
_SIZE = 8192
_REPEATS = 10


def measure_ceilings(torch: Any, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """"copy_bytes_s": bytes read and written a second; "flops_s": type -> operations a second, or why there is none."""
    free, _ = torch.cuda.mem_get_info()
    count = min(_COPY_BYTES, free // 4) // 4
    source = torch.empty(count, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    copied = 2 * 4 * count / _seconds(torch, functools.partial(target.copy_, source))
    progress(f"copy: {copied / 1e9:.0f} GB/s")
    del source, target
    flops: dict[str, Any] = {}
    for name, make in {"bf16": _floats("bfloat16"), "fp16": _floats("float16"), "fp32": _floats("float32"),
                       "int8": _int8, "fp8": _fp8}.items():
        try:
            product = make(torch)
            flops[name] = 2 * _SIZE**3 / _seconds(torch, product)
            progress(f"{name} products: {flops[name] / 1e12:.0f} T/s")
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            flops[name] = f"not measured: {str(error).splitlines()[0][:100]}"
    torch.cuda.empty_cache()
    return {"copy_bytes_s": copied, "flops_s": flops}


def _floats(kind: str) -> Callable[[Any], Callable[[], Any]]:
    def make(torch: Any) -> Callable[[], Any]:
        torch.backends.cuda.matmul.allow_tf32 = False
        a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=getattr(torch, kind)) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.matmul(a, b, out=out)
    return make


def _int8(torch: Any) -> Callable[[], Any]:
    a, b = (torch.randint(-127, 128, (_SIZE, _SIZE), device="cuda", dtype=torch.int8) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())


def _fp8(torch: Any) -> Callable[[], Any]:
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _seconds(torch: Any, work: Callable[[], Any]) -> float:
    """The median of some runs, after two that warm up."""
    times = []
    for number in range(_REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(1e-3 * begin.elapsed_time(end))
    return float(sorted(times)[len(times) // 2])
