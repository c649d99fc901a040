"""The numpy references against torch, and inference against what the references give."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ingot.compiler.ir.infer import InferError
from ingot.compiler.ir.op import as_tuple
from ingot.compiler.ir.registry import OPS
from ingot.compiler.ir.types import DType, TensorType


def f32(values: list[Any]) -> np.ndarray:
    return np.array(values, np.float32)


def i32(values: list[Any]) -> np.ndarray:
    return np.array(values, np.int32)


F = torch.nn.functional
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((3, 5, 4)).astype(np.float32)
POSITIVE = np.abs(X) + np.float32(0.1)
IDS = RANDOM.integers(0, 4, (3, 2)).astype(np.int32)


def run(op: str, *operands: Any, **attrs: Any) -> tuple[np.ndarray, ...]:
    """The reference's results, after their types were compared with those that inference gives."""
    types = [TensorType(np.shape(o), dtype_of(o)) for o in operands]
    results = as_tuple(OPS[op].reference(*operands, **attrs))
    inferred = OPS[op].infer(types, attrs)
    assert [TensorType(r.shape, dtype_of(r)) for r in results] == list(inferred)
    return results


def dtype_of(operand: Any) -> DType:
    kind = np.asarray(operand).dtype.kind
    return DType.F32 if kind == "f" else DType.BOOL if kind == "b" else DType.I32


def close(op: str, expected: torch.Tensor, *operands: Any, **attrs: Any) -> None:
    (result,) = run(op, *operands, **attrs)
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-6, atol=1e-6)


UNARY: Mapping[str, tuple[Callable[..., torch.Tensor], np.ndarray]] = {
    "neg": (torch.neg, X), "abs": (torch.abs, X), "exp": (torch.exp, X), "log": (torch.log, POSITIVE),
    "sqrt": (torch.sqrt, POSITIVE), "rsqrt": (torch.rsqrt, POSITIVE), "reciprocal": (torch.reciprocal, POSITIVE),
    "sin": (torch.sin, X), "cos": (torch.cos, X), "tanh": (torch.tanh, X), "sigmoid": (torch.sigmoid, X),
    "erf": (torch.erf, X), "floor": (torch.floor, X), "ceil": (torch.ceil, X), "round": (torch.round, X * 2),
    "trunc": (torch.trunc, X * 2), "sign": (torch.sign, X), "silu": (F.silu, X), "softplus": (F.softplus, X * 30),
    "log1p": (torch.log1p, POSITIVE), "expm1": (torch.expm1, X), "logical_not": (torch.logical_not, X > 0),
}


@pytest.mark.parametrize("op", list(UNARY))
def test_unary(op: str) -> None:
    function, x = UNARY[op]
    close(op, function(torch.from_numpy(x)), x)


def test_functions_at_their_edges() -> None:
    edges = f32([-np.inf, -200, -0.0, 0.0, 200, np.inf])
    for op in ("sigmoid", "softplus", "tanh", "exp"):
        close(op, UNARY[op][0](torch.from_numpy(edges)), edges)
    for op, approximate in (("gelu", "none"), ("gelu", "tanh")):
        close(op, F.gelu(torch.from_numpy(X), approximate=approximate), X, approximate=approximate)


@pytest.mark.parametrize(("op", "function"), [
    ("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div), ("maximum", torch.maximum),
    ("minimum", torch.minimum), ("eq", torch.eq), ("lt", torch.lt), ("ge", torch.ge), ("ne", torch.ne)])
def test_binary_broadcasts(op: str, function: Callable[..., torch.Tensor]) -> None:
    row = X[0, :1]
    close(op, function(torch.from_numpy(X), torch.from_numpy(row)), X, row)


def test_literals_take_the_type_of_the_other_operand() -> None:
    assert run("mul", X, 2)[0].dtype == np.float32 and run("mul", IDS, 2)[0].dtype == np.int32
    assert run("mul", IDS, 0.5)[0].dtype == np.float32 and run("pow", 2.0, X)[0].dtype == np.float32
    assert run("div", IDS, 2)[0].dtype == np.float32
    assert run("logical_and", X > 0, True)[0].dtype == np.bool_


def test_integers_round_as_torch_does() -> None:
    a, b = i32([-7, -7, 7, 7]), i32([2, -2, 2, -2])
    close("floor_div", torch.div(torch.from_numpy(a), torch.from_numpy(b), rounding_mode="floor"), a, b)
    close("mod", torch.remainder(torch.from_numpy(a), torch.from_numpy(b)), a, b)
    close("where", torch.tensor([1, -7, 1, 1]), np.array([True, False, True, True]), 1, a)


def test_casts() -> None:
    assert run("cast", f32([-1.7, 1.7]), dtype=DType.I32)[0].tolist() == [-1, 1]
    bits = OPS["cast"].reference(f32([1 + 2**-8, 1 + 3 * 2**-8]), dtype=DType.BF16)
    assert OPS["cast"].reference(bits, dtype=DType.F32).tolist() == [1.0, 1 + 2**-6]


@pytest.mark.parametrize(("op", "attrs", "expected"), [
    ("reshape", {"shape": (15, 4)}, X.reshape(15, 4)), ("permute", {"dims": (2, 0, 1)}, X.transpose(2, 0, 1)),
    ("slice", {"dim": 1, "start": 1, "stop": 5, "step": 2}, X[:, 1:5:2]),
    ("expand", {"shape": (2, 3, 5, 4)}, np.broadcast_to(X, (2, 3, 5, 4)))])
def test_views(op: str, attrs: dict[str, Any], expected: np.ndarray) -> None:
    assert (run(op, X, **attrs)[0] == expected).all()


def test_cat_arange_full() -> None:
    assert run("cat", X, X[:, :2], dim=1)[0].shape == (3, 7, 4)
    assert run("arange", start=3, step=2, length=3, dtype=DType.I32)[0].tolist() == [3, 5, 7]
    assert run("full", shape=(2,), value=1.5, dtype=DType.F32)[0].tolist() == [1.5, 1.5]


@pytest.mark.parametrize(("op", "function"), [
    ("reduce_sum", torch.sum), ("reduce_mean", torch.mean), ("reduce_max", torch.amax), ("reduce_min", torch.amin)])
@pytest.mark.parametrize("keepdim", [True, False])
def test_reductions(op: str, function: Callable[..., torch.Tensor], keepdim: bool) -> None:
    close(op, function(torch.from_numpy(X), dim=(0, 2), keepdim=keepdim), X, dims=(0, 2), keepdim=keepdim)


def test_along_a_dimension() -> None:
    x = torch.from_numpy(X)
    close("softmax", torch.softmax(x, 1), X, dim=1)
    close("cumsum", torch.cumsum(x, 1), X, dim=1)
    close("argmax", torch.argmax(x, 1), X, dim=1, keepdim=False)
    close("reduce_prod", torch.prod(x, 1), X, dims=(1,), keepdim=False)
    assert run("reduce_sum", X > 0, dims=(0, 1, 2), keepdim=False)[0] == (X > 0).sum()
    for op, attrs, expected in (("topk", {"k": 2}, torch.topk(x, 2, 1)), ("sort", {}, torch.sort(x, 1))):
        for got, want in zip(run(op, X, dim=1, **attrs), expected, strict=True):
            assert (got == want.numpy()).all()


def test_equal_values_keep_their_order() -> None:
    x = f32([[1, 2, 2, 1]])
    assert run("topk", x, k=3, dim=1)[1].tolist() == [[1, 2, 0]]
    assert run("sort", x, dim=1, descending=True)[1].tolist() == [[1, 2, 0, 3]]
    assert run("argmax", x, dim=1, keepdim=False)[0].tolist() == [1]


def test_indexing() -> None:
    x, ids = torch.from_numpy(X[:, :4, 0]), torch.from_numpy(IDS).long()
    close("gather", torch.gather(x, 1, ids), X[:, :4, 0], IDS, dim=1)
    unique = i32([[0, 2], [1, 3], [3, 0]])
    source = X[:, 0, :2].copy()
    close("scatter", torch.scatter(x, 1, torch.from_numpy(unique).long(), torch.from_numpy(source)), X[:, :4, 0],
          unique, source, dim=1)
    close("scatter", torch.scatter(x, 1, torch.from_numpy(unique).long(), 2.0), X[:, :4, 0], unique, 2.0, dim=1)
    close("take", torch.from_numpy(X)[:, ids], X, IDS, dim=1)
    close("embedding", F.embedding(ids, torch.from_numpy(X[0])), X[0], IDS)


def test_products_and_norms() -> None:
    x, w, bias = torch.from_numpy(X), torch.randn(6, 4), torch.randn(6)
    close("linear", F.linear(x, w, bias), X, w.numpy(), bias.numpy())
    close("matmul", x @ w.T, X, w.T.numpy())
    scale, shift = torch.randn(4), torch.randn(4)
    close("rms_norm", F.rms_norm(x, (4,), scale, 1e-5), X, scale.numpy(), eps=1e-5)
    close("layer_norm", F.layer_norm(x, (4,), scale, shift, 1e-5), X, scale.numpy(), shift.numpy(), eps=1e-5)
    close("layer_norm", F.layer_norm(x, (4,), None, None, 1e-5), X, eps=1e-5)


@pytest.mark.parametrize("x", [X[:, 0], X[:, :2]], ids=["a token", "parts of a token"])
def test_expert_linear(x: np.ndarray) -> None:
    w, bias = torch.randn(4, 6, 4), torch.randn(4, 6)
    parts = torch.from_numpy(x if x.ndim == 3 else np.repeat(x[:, None], 2, 1))
    ids = torch.from_numpy(IDS).long()
    expected = torch.einsum("tkc,tknc->tkn", parts, w[ids]) + bias[ids]
    close("expert_linear", expected, x, IDS, w.numpy(), bias.numpy())


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (3, 0), (0, 4), (3, 4)])
def test_attention_masks(window: int, chunk: int) -> None:
    q, k, v = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 6)
    at, key = torch.arange(9)[:, None], torch.arange(9)[None]
    seen = key <= at
    seen &= (key > at - window) if window else True
    seen &= (key // chunk == at // chunk) if chunk else True
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None].repeat_interleave(2, 1),
        v.transpose(0, 1)[None].repeat_interleave(2, 1), attn_mask=seen, scale=0.3)[0].transpose(0, 1)
    close("attention", expected, q.numpy(), k.numpy(), v.numpy(), slot=0, scale=0.3, window=window, chunk=chunk)


def test_attention_sinks_and_softcap() -> None:
    q, k, v, sinks = torch.randn(5, 2, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8), torch.randn(2)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.5
    scores = torch.tanh(scores / 2.0) * 2.0
    scores = scores.masked_fill(torch.arange(5)[None] > torch.arange(5)[:, None], -torch.inf)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(2, 5, 1)], -1).softmax(-1)[..., :-1]
    close("attention", torch.einsum("hqk,khd->qhd", with_sink, v), q.numpy(), k.numpy(), v.numpy(), sinks.numpy(),
          slot=0, scale=0.5, softcap=2.0)


T = TensorType
I32 = DType.I32


@pytest.mark.parametrize(("op", "types", "attrs", "message"), [
    ("add", [T(("T", 4)), T(("T", 5))], {}, "do not broadcast"),
    ("reshape", [T(("T", 4))], {"shape": ("T", 5)}, "elements"),
    ("permute", [T((2, 3))], {"dims": (0, 0)}, "permute"),
    ("slice", [T(("T", 4))], {"dim": 0, "start": 1, "stop": "T", "step": 1}, "symbolic"),
    ("slice", [T((4,))], {"dim": 0, "start": 1, "stop": 5, "step": 1}, "of an extent of 4"),
    ("cat", [T(("T", 4)), T(("T", 4), I32)], {"dim": 1}, "cat"),
    ("linear", [T(("T", 4)), T((6, 5))], {}, "linear"),
    ("linear", [T(("T", 4)), T((6, 4)), T((5,))], {}, "bias"),
    ("embedding", [T((6, 4)), T(("T",))], {}, "embedding"),
    ("rms_norm", [T(("T", 4)), T((5,))], {"eps": 1e-5}, "normalisation"),
    ("attention", [T(("T", 3, 8)), T(("T", 2, 8)), T(("T", 2, 8))], {"slot": 0, "scale": 1.0}, "attention"),
    ("topk", [T(("T", 4))], {"k": 5, "dim": 1}, "topk"),
    ("softmax", [T(("T", 4))], {"dim": -1}, "none is negative"),
    ("where", [T((4,)), T((4,)), T((4,))], {}, "bool"),
])
def test_inference_refuses(op: str, types: Sequence[TensorType], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferError, match=message):
        OPS[op].infer(types, attrs)


def test_inference_keeps_symbols() -> None:
    assert OPS["reshape"].infer([T(("T", 8))], {"shape": ("2*T", 4)}) == (T(("2*T", 4)),)
    assert OPS["slice"].infer([T(("2*T",))], {"dim": 0, "start": "T", "stop": "2*T", "step": 1}) == (T(("T",)),)
    assert OPS["matmul"].infer([T(("T", 4)), T((4, 6))], {}) == (T(("T", 6)),)
    assert OPS["take"].infer([T((9, 4)), T(("T", 2), I32)], {"dim": 0}) == (T(("T", 2, 4)),)
