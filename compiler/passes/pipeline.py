"""The order of the passes, and the walk through them: verify after each, dump each when asked."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ..fusion.fuse import fuse_loops
from ..ir.dump import dump
from ..ir.graph import Graph
from ..ir.types import DType
from ..ir.verify import verify
from ..precision import Precision
from .add_experts_last import add_experts_last
from .add_lora import LoraRequest, add_lora
from .assign_precision import assign_precision
from .fold_constants import fold_constants
from .fuse_add_norm import fuse_add_norm
from .fuse_gate import fuse_gate
from .fuse_norm_add import fuse_norm_add
from .fuse_residual import fuse_residual
from .fuse_rope import fuse_rope_kv_write
from .gather_logits import gather_logits
from .insert_quantize import insert_quantize
from .join_shared_experts import join_shared_experts
from .last_dim import bring_last
from .match import eliminate_dead_code
from .merge_duplicates import merge_duplicates
from .merge_linears import merge_linears
from .merge_lora import add_residuals_first, merge_lora
from .part_heads import part_heads
from .place_kv import place_kv
from .raise_linear import raise_linear
from .raise_moe import raise_moe
from .raise_norms import raise_norms
from .raise_rope import raise_rope
from .scale_embedding import scale_embedding
from .shard import shard_graph
from .smooth_inputs import smooth_inputs
from .spell_out_matrices import spell_out_matrices
from .split_input_scales import split_input_scales
from .strided import ALIGNED_ELEMENTS, accepts_strided, gpu_accepts_strided

Pass = tuple[str, Callable[[Graph], Graph]]

KV_DTYPES = {"fp32": DType.F32, "bf16": DType.BF16, "fp16": DType.F16, "fp8": DType.FP8, "int8": DType.I8}
"""Precision of the KV cache, as users name it -> element type."""


def _raised(precision: Precision, stored: Mapping[str, str] | None, lora: LoraRequest | None) -> list[Pass]:
    """From the imported graph to operators of the field, with a scheme for every matrix; for all targets."""
    # Before inputs are scaled: adapters were trained on the model's own.
    room: list[Pass] = [("add_lora", partial(add_lora, request=lora))] if lora else []
    return [
        ("fold_constants", fold_constants),
        ("raise_linear", raise_linear),
        ("raise_norms", raise_norms),
        ("raise_rope", raise_rope),
        ("bring_last", bring_last),
        ("fold_constants", fold_constants),
        ("merge_duplicates", merge_duplicates),
        ("gather_logits", gather_logits),
        ("assign_precision", partial(assign_precision, precision=precision, stored=stored)),
        *room,
        ("split_input_scales", split_input_scales),
        ("smooth_inputs", smooth_inputs),
    ]


def cpu_pipeline(precision: Precision, kv: str, stored: Mapping[str, str] | None = None,
                 lora: LoraRequest | None = None, pairs: bool = False) -> list[Pass]:
    """From the imported graph to the one that is lowered, for CPU targets. stored: see assign_precision. lora: room for
    adapters. pairs: see insert_quantize."""
    merge: list[Pass] = [("merge_lora", merge_lora)] if lora else []
    return [
        *_raised(precision, stored, lora),
        ("merge_linears", merge_linears),
        *merge,
        ("place_kv", partial(place_kv, kv_dtype=KV_DTYPES[kv])),
        ("fuse_rope_kv_write", fuse_rope_kv_write),
        ("fuse_add_norm", fuse_add_norm),
        ("insert_quantize", partial(insert_quantize, pairs=pairs)),
        ("fuse_loops", partial(fuse_loops, accepts_strided=accepts_strided)),
        ("dead_code", eliminate_dead_code),
    ]


def gpu_pipeline(precision: Precision, kv: str, stored: Mapping[str, str] | None = None, num_ranks: int = 1,
                 lora: LoraRequest | None = None) -> list[Pass]:
    """Likewise for GPU targets: matrices quantize their own inputs there, and take in what surrounds them.

    num_ranks: GPUs that share the work; the graph is then that of each of them.
    """
    divide: list[Pass] = [("shard", partial(shard_graph, num_ranks=num_ranks))] if num_ranks > 1 else []
    merge: list[Pass] = [("merge_lora", merge_lora), ("add_residuals_first", add_residuals_first)] if lora else []
    return [
        *_raised(precision, stored, lora),
        *divide,
        ("spell_out_matrices", spell_out_matrices),
        ("merge_linears", partial(merge_linears, routers_apart=True)),
        *merge,
        ("fuse_gate", fuse_gate),
        ("scale_embedding", scale_embedding),
        ("place_kv", partial(place_kv, kv_dtype=KV_DTYPES[kv])),
        ("part_heads", part_heads),
        ("fuse_rope_kv_write", fuse_rope_kv_write),
        ("fuse_norm_add", fuse_norm_add),
        ("add_experts_last", add_experts_last),
        ("raise_moe", raise_moe),
        ("join_shared_experts", join_shared_experts),
        ("fuse_residual", fuse_residual),
        ("fuse_add_norm", fuse_add_norm),
        ("fuse_loops", partial(fuse_loops, accepts_strided=gpu_accepts_strided, multiple=ALIGNED_ELEMENTS)),
        ("dead_code", eliminate_dead_code),
    ]


def run_passes(graph: Graph, passes: list[Pass], dump_dir: Path | None = None,
               progress: Callable[[str], None] = lambda name: None) -> Graph:
    """Apply the passes in order. The graph is verified after each; with dump_dir, 00_import.txt, 01_….txt appear."""
    verify(graph)
    if dump_dir is not None:
        dump_dir.mkdir(parents=True, exist_ok=True)
        (dump_dir / "00_import.txt").write_text(dump(graph))
    for number, (name, apply) in enumerate(passes, 1):
        progress(name)
        graph = apply(graph)
        verify(graph)
        if dump_dir is not None:
            (dump_dir / f"{number:02d}_{name}.txt").write_text(dump(graph))
    return graph
