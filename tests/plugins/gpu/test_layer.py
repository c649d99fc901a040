"""A decoder layer of a generation step in five launches, in the interpreter, against its arithmetic in float64."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from ingot.compiler.gpu.interpret import Call, Interpreter
from ingot.plugins.attention import reference as attention_reference
from ingot.plugins.attention.tactics import Problem as Attention
from ingot.plugins.attention.tactics import Rope
from ingot.plugins.attention.tactics import candidates as attention_candidates
from ingot.plugins.gpu.device import Device
from ingot.plugins.gpu.floats import from_bf16
from ingot.plugins.gpu.kernel import Candidates, GpuLaunch
from ingot.plugins.linear.gpu_formats import FORMATS, Packed, pack, unpack
from ingot.plugins.linear.tactics import Problem as Linear
from ingot.plugins.linear.tactics import candidates as linear_candidates
from ingot.plugins.norm.reference import rms_norm
from ingot.plugins.rope.reference import rope

from .paged import BLOCK_SIZE, Paged
from .support import device, device_of, store, unwritten

HIDDEN, HEADS, KV_HEADS, DIM, INNER, EPS = 128, 4, 2, 32, 256, 1e-6
LENGTHS = [40, 17, 3]
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


def first(found: Callable[[Device], Candidates], where: Device) -> GpuLaunch:
    """A candidate that splits the sum where there is one, so that the last block to come is exercised. An architecture
    that has none is given an H200's, which its compiler refuses."""
    legal = found(where).legal or found(device("sm_90a")).legal
    split = [c.launches[0] for c in legal if c.launches[0].scratch_bytes]
    return (split or [legal[0].launches[0]])[0]


@pytest.mark.parametrize(("form", "activation", "kv_type", "error"), [
    ("bf16", "bf16", "bf16", 0.006), ("fp8", "fp8", "fp8", 0.05), ("int4", "bf16", "bf16", 0.006),
    ("int4", "fp8", "bf16", 0.05), ("int8", "int8", "int8", 0.02)])
def test_generation_in_five_launches(interpreter: Interpreter, form: str, activation: str, kv_type: str,
                                     error: float) -> None:
    """error: relative, of the rounding of activations to bf16 and to eight bits; weights are compared as stored."""
    rng, where = np.random.default_rng(0), device_of(interpreter)
    tokens = len(LENGTHS)
    paged = Paged(LENGTHS, [1] * tokens, KV_HEADS, DIM, DIM, kv_type)
    keys, values = ([rng.standard_normal((n - 1, KV_HEADS, DIM)) for n in LENGTHS] for _ in range(2))
    paged.fill(keys, values)
    old = [(paged.read(paged.pool, seq, True), paged.read(paged.pool, seq, False)) for seq in range(tokens)]

    def matrix(n: int, k: int) -> Packed:
        return pack((rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32), FORMATS[form])
    qkv, out, gate_up, down = (matrix(WIDTH, HIDDEN), matrix(HIDDEN, HEADS * DIM), matrix(2 * INNER, HIDDEN),
                               matrix(HIDDEN, INNER))
    x = store(rng.standard_normal((tokens, HIDDEN)), "bf16")
    norms = [rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32) for _ in range(2)]
    angles = rng.uniform(0, 6, (tokens, DIM))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def linear(n: int, k: int, *, norm: bool = False, residual: bool = False, gated: str = "") -> GpuLaunch:
        p = Linear(tokens, n, k, form, activation, quantizes=activation in ("fp8", "int8"), residual=residual,
                   norm_eps=EPS if norm else None, gated=gated)
        return first(partial(linear_candidates, p), where)
    attention = first(partial(attention_candidates, Attention(
        tokens, paged.max_batch, HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, "bf16", kv_type, BLOCK_SIZE, paged.block_bytes,
        paged.max_blocks, rope=Rope(WIDTH, WIDTH, WIDTH, DIM))), where)
    q_bytes, kv_bytes = 2 * HEADS * DIM, 2 * KV_HEADS * DIM
    launches: list[tuple[GpuLaunch, dict[str, str | tuple[str, int]]]] = [
        (linear(WIDTH, HIDDEN, norm=True), {"x": "x", "w": "qkv", "y": "merged", "norm_weight": "norm0"}),
        (attention, {"q": "merged", "k": ("merged", q_bytes), "v": ("merged", q_bytes + kv_bytes), "out": "attended",
                     "k_part": ("pool", paged.key_offset), "v_part": ("pool", paged.value_offset),
                     "k_scales": ("pool", paged.k_scale_offset), "v_scales": ("pool", paged.v_scale_offset)}),
        (linear(HIDDEN, HEADS * DIM, residual=True), {"x": "attended", "w": "out", "y": "middle", "residual": "x"}),
        (linear(INNER, HIDDEN, norm=True, gated="silu"),
         {"x": "middle", "w": "gate_up", "y": "inner", "norm_weight": "norm1"}),
        (linear(HIDDEN, INNER, residual=True), {"x": "inner", "w": "down", "y": "result", "residual": "middle"})]
    assert len(launches) == 5
    packed = {"qkv": qkv, "out": out, "gate_up": gate_up, "down": down}
    arrays: dict[str, np.ndarray] = {
        "x": x, "pool": paged.pool, "cos": cos, "sin": sin, "norm0": norms[0], "norm1": norms[1], **paged.step,
        "merged": unwritten((tokens, WIDTH), "bf16"), "attended": unwritten((tokens, HEADS * DIM), "bf16"),
        "middle": unwritten((tokens, HIDDEN), "bf16"), "inner": unwritten((tokens, INNER), "bf16"),
        "result": unwritten((tokens, HIDDEN), "bf16"), **{name: one.w for name, one in packed.items()}}
    # One scratch for all launches, as in a plan: arrivals are zero again after each.
    arrays["partial"] = np.full(max(one.scratch_bytes for one, _ in launches) // 4 + 4, np.nan, np.float32)
    arrays["arrived"] = np.zeros(max(one.zeroed_bytes for one, _ in launches) // 4 + 4, np.int32)
    calls: list[Call] = []
    for one, bound in launches:
        if isinstance(bound.get("w"), str):
            scale = packed[str(bound["w"])].w_scale
            if scale is not None:
                arrays[f"{bound['w']}_scale"] = scale
                bound = bound | {"w_scale": f"{bound['w']}_scale"}
        calls.append((one, bound))
    got = interpreter.run(calls, arrays)

    wide = from_bf16(x).astype(np.float64)
    merged = rms_norm(wide, norms[0], eps=EPS) @ unpack(qkv).T
    parts = np.split(merged, [HEADS * DIM, (HEADS + KV_HEADS) * DIM], axis=1)
    q, k, v = (part.reshape(tokens, -1, DIM) for part in parts)
    q, k = (rope(one, cos, sin, rotary=DIM) for one in (q, k))
    attended = np.concatenate([attention_reference.attention(
        q[i:i + 1], np.concatenate([old[i][0][:-1], k[i:i + 1]]), np.concatenate([old[i][1][:-1], v[i:i + 1]]),
        scale=DIM**-0.5) for i in range(tokens)]).reshape(tokens, -1)
    middle = attended @ unpack(out).T + wide
    inner = rms_norm(middle, norms[1], eps=EPS) @ unpack(gate_up).T
    inner = inner[:, :INNER] / (1 + np.exp(-inner[:, :INNER])) * inner[:, INNER:]
    wanted = inner @ unpack(down).T + middle
    result = from_bf16(got["result"])
    assert np.sqrt(np.mean((result - wanted) ** 2) / np.mean(wanted**2)) < error
    assert not got["arrived"].any()


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_90a"])
def test_gates_that_make_their_input_have_one_product_with_tcgen05(arch: str) -> None:
    """Of two, triton would write the next input while the second may still read the one before."""
    target = device(arch)
    for form, activation, norm in (("bf16", "bf16", EPS), ("fp8", "fp8", EPS), ("fp8", "fp8", None),
                                   ("int4", "bf16", EPS), ("int4", "fp8", EPS), ("bf16", "bf16", None)):
        p = Linear(8, 4096, 4096, form, activation, quantizes=activation == "fp8", norm_eps=norm, gated="silu")
        kernels = [c.launches[0].kernel for c in linear_candidates(p, target).legal]
        alone = arch != "sm_90a" and (form, activation) != ("int4", "fp8") and (norm is not None or form == "fp8")
        assert {dict(kernel.constants)["ONE_PRODUCT"] for kernel in kernels} == {alone}
        assert min(kernel.num_stages for kernel in kernels) >= 2
