"""What a checkpoint holds in a format of GPUs lies in the engine's blobs as it is: the same codes, the same scales."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ingot.compiler.checkpoint.checkpoint import Checkpoint
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.checkpoint.quantized import read_quantized
from ingot.compiler.weights.carried import carried
from ingot.compiler.weights.evaluate import evaluate
from ingot.compiler.weights.expr import WeightExpr, concat, elementwise, permute, reshape, slice_, stack
from ingot.compiler.weights.packed import ROWS, PackedWeight, Packing
from ingot.compiler.weights.sharding import Segment, at_rank, shard
from ingot.plugins.linear.gpu_formats import Packed, unpack
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from tests.compiler.checkpoint.quantized.layouts import LAYOUTS, Layout, write_checkpoint
from tests.compiler.checkpoint.quantized.test_read import small_model

Q, K, V = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
GATE, UP, DOWN = (f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down"))


def written(layout: Layout, folder: Path, **sizes: int) -> tuple[
        Checkpoint, dict[str, torch.Tensor], dict[str, WeightExpr]]:
    """(the checkpoint, its tensors, the recipes of its weights)"""
    write_checkpoint(folder, small_model("llama", **sizes), layout)
    checkpoint = open_checkpoint(folder)
    found = read_quantized(checkpoint)
    assert found is not None
    return checkpoint, load_file(folder / "model.safetensors"), {
        name.removesuffix(".weight"): weight.expr for name, weight in found.weights.items()}


def blob(expr: WeightExpr, scheme: str, checkpoint: Checkpoint) -> dict[str, bytes]:
    """Array of the kernel -> its bytes."""
    weight = PackedWeight("w0", expr, Packing(scheme, ROWS), "")
    assert weight.is_carried and not weight.group
    data = weight.make(checkpoint)
    return {part: data[offset:offset + size].tobytes() for part, (offset, size) in weight.parts.items()}


def stored(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("name", "scheme"), [
    ("modelopt fp8", "fp8"), ("modelopt fp8 rows", "fp8"), ("compressed fp8", "fp8"), ("compressed int8", "int8_token"),
    ("modelopt fp8 blocks", "fp8_block"), ("compressed fp8 blocks", "fp8_block"), ("deepseek", "fp8_block")])
def test_eight_bits_are_kept_to_the_bit(name: str, scheme: str, tmp_path: Path) -> None:
    """Also of matrices that are merged, where one scale a tensor becomes one for each of its rows."""
    checkpoint, tensors, exprs = written(LAYOUTS[name], tmp_path)
    for parts in ([DOWN], [GATE, UP], [Q, K, V]):
        got = blob(concat([exprs[part] for part in parts], 0), scheme, checkpoint)
        assert got["w"] == b"".join(stored(tensors[f"{part}.weight"]) for part in parts)
        scales = [tensors[f"{part}.weight_scale{'_inv' if name == 'deepseek' else ''}"] for part in parts]
        if name == "modelopt fp8":
            scales = [scale.expand(len(tensors[f"{part}.weight"])) for part, scale in zip(parts, scales, strict=True)]
        assert got["w_scale"] == b"".join(map(stored, scales))


@pytest.mark.parametrize("name", ["modelopt nvfp4", "compressed nvfp4"])
def test_nvfp4_is_kept_to_the_bit(name: str, tmp_path: Path) -> None:
    checkpoint, tensors, exprs = written(LAYOUTS[name], tmp_path)
    packed, outer = (("weight", "weight_scale_2") if name == "modelopt nvfp4" else
                     ("weight_packed", "weight_global_scale"))
    got = blob(exprs[UP], "nvfp4", checkpoint)
    assert got["w"] == stored(tensors[f"{UP}.{packed}"]) and got["w_scale"] == stored(tensors[f"{UP}.weight_scale"])
    factor = tensors[f"{UP}.{outer}"].float().reshape(1)
    assert got["scale"] == stored(factor if name == "modelopt nvfp4" else 1 / factor)
    assert carried(concat([exprs[GATE], exprs[UP]], 0), "nvfp4") is None, "each has a factor of its own"


def test_mxfp4_lies_in_nvfp4(tmp_path: Path) -> None:
    """Its powers of two are e4m3 too, by a factor that is one: every weight is what it was."""
    checkpoint, tensors, exprs = written(LAYOUTS["compressed mxfp4"], tmp_path)
    got = blob(exprs[UP], "nvfp4", checkpoint)
    assert got["w"] == stored(tensors[f"{UP}.weight_packed"])
    n, k = exprs[UP].shape
    arrays = Packed(GPU_SCHEMES["nvfp4"].weights, k, np.frombuffer(got["w"], np.uint8).reshape(n, -1),
                    np.frombuffer(got["w_scale"], np.uint8).reshape(n, -1),
                    factor=float(np.frombuffer(got["scale"], np.float32)[0]))
    np.testing.assert_array_equal(unpack(arrays), evaluate(exprs[UP], checkpoint))


def test_experts_ranks_and_swapped_halves_keep_their_numbers(tmp_path: Path) -> None:
    checkpoint, tensors, exprs = written(LAYOUTS["deepseek"], tmp_path)
    experts = concat([stack([exprs[GATE], exprs[UP]], 0), stack([exprs[UP], exprs[GATE]], 0)], 1)
    got = blob(experts, "fp8_block", checkpoint)
    gate, up = (stored(tensors[f"{name}.weight"]) for name in (GATE, UP))
    assert got["w"] == gate + up + up + gate
    both = concat([exprs[GATE], exprs[UP]], 0)
    swapped = concat([slice_(both, 0, 384, 768), slice_(both, 0, 0, 384)], 0)
    assert blob(swapped, "fp8_block", checkpoint)["w"] == up + gate
    halves = shard(exprs[DOWN], 1, [Segment(384, 3)], 3)
    assert carried(halves, "fp8_block") is not None
    scale = tensors[f"{DOWN}.weight_scale_inv"]
    assert [blob(at_rank(halves, rank), "fp8_block", checkpoint)["w_scale"] for rank in range(3)] == [
        stored(scale[:, rank:rank + 1]) for rank in range(3)]


def test_what_would_need_other_scales_is_rounded(tmp_path: Path) -> None:
    _, _, exprs = written(LAYOUTS["deepseek"], tmp_path / "blocks", intermediate_size=320)
    row = written(LAYOUTS["compressed fp8"], tmp_path / "rows")[2]
    gate, down = exprs[GATE], row[DOWN]
    assert carried(gate, "fp8_block") is not None  # 320 rows: the last block is smaller
    for expr, form in [
        (gate, "fp8"), (gate, "int8"), (gate, "bf16"),
        (concat([gate, gate], 0), "fp8_block"),  # the second would begin within a block
        (slice_(gate, 0, 64, 192), "fp8_block"),
        (exprs[DOWN], "fp8_block"),  # rows of 320 channels
        (stack([gate, gate], 0), "fp8_block"),
        (shard(gate, 0, [Segment(320, 2)], 2), "fp8_block"),
        (concat([down, down], 1), "fp8"),  # a row would have two scales
        (permute(down, (1, 0)), "fp8"),
        (elementwise("mul", down, 2.0), "fp8"),
        (reshape(down, (128, 768)), "fp8"),
    ]:
        assert carried(expr, form) is None, (expr, form)
    assert carried(slice_(down, 1, 64, 128), "fp8") is not None  # a rank's part of the channels: the same scale
