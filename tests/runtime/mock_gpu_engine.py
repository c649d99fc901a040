"""A real GPU engine of a model that is small enough to be written by hand: kernels of plugins/, compiled for sm_90a.

The model has no attention: logits = head(h), h = x + W x, x = the token's embedding; all in bf16, logits in float32.
Steps of at most 4 tokens split the sum of W among blocks, which needs the workspace; longer ones copy by descriptors.
Every token's logits must be asked for: nothing gathers rows.

Divided among ranks, each has some columns of the table, the others zero, and some rows of the head: embeddings are
summed, logits joined, and all numbers are those of the whole engine.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ingot.compiler.engine_writer import EngineWriter
from ingot.compiler.gpu.triton_compile import CompiledKernel, compile_kernels
from ingot.compiler.targets import architectures, list_targets
from ingot.plugins.all_reduce.tactics import Problem as Exchange
from ingot.plugins.all_reduce.tactics import candidates as exchange
from ingot.plugins.embedding.tactics import Problem as Embedding
from ingot.plugins.embedding.tactics import candidates as embedding
from ingot.plugins.gpu.floats import from_bf16, to_bf16
from ingot.plugins.gpu.kernel import GpuKernel, GpuLaunch, TensorMap
from ingot.plugins.gpu.sources import source_digest
from ingot.plugins.linear.tactics import Problem as Linear
from ingot.plugins.linear.tactics import Tile
from ingot.plugins.linear.tactics import launch as linear
from ingot.plugins.sampling.tactics import SCRATCH
from ingot.plugins.sampling.tactics import Problem as Sampling
from ingot.plugins.sampling.tactics import candidates as sampling
from ingot.runtime.lora import LoraModule, LoraRoom
from ingot.runtime.manifest import canonical_json
from ingot.runtime.program import PLAN_VERSION
from ingot.runtime.sampling_inputs import MAX_BIASES

DIM, VOCAB_SIZE, BLOCK_SIZE = 128, 160, 16
BLOCK_BYTES = 2048
LIMITS = {"max_batch_size": 16, "max_num_tokens": 16, "max_seq_len": 64}
BUCKETS = (4, 16)
ARCH = "sm_90a"

_rng = np.random.default_rng(3)
TABLE = to_bf16(_rng.standard_normal((VOCAB_SIZE, DIM)).astype(np.float32))
MATRIX = to_bf16((_rng.standard_normal((DIM, DIM)) / 8).astype(np.float32))
HEAD = to_bf16(_rng.standard_normal((VOCAB_SIZE, DIM)).astype(np.float32))
ROOM = LoraRoom(64, 2, MATRIX.nbytes, (LoraModule("block.linear", DIM, DIM, 0, MATRIX.nbytes // 2),))
"""Room of the engine that `with_room` makes: a slot has as many bytes as the matrix."""

WEIGHTS = {"table": TABLE, "matrix": MATRIX, "head": HEAD}


def reference_logits(tokens: list[int]) -> np.ndarray:
    """[T, VOCAB_SIZE], but for the order of sums."""
    x = from_bf16(TABLE[tokens])
    h = from_bf16(to_bf16(x + x @ from_bf16(MATRIX).T))
    return np.asarray(h @ from_bf16(HEAD).T)


def weight_of(name: str, rank: int, ranks: int) -> np.ndarray:
    """What a rank holds."""
    whole = WEIGHTS[name]
    if name == "head":
        return np.split(whole, ranks)[rank]
    if name == "table" and ranks > 1:
        return np.where(np.arange(DIM) * ranks // DIM == rank, whole, 0).astype(whole.dtype)
    return whole


def launches(tokens: int, ranks: int = 1) -> list[tuple[GpuLaunch, dict[str, list[Any]], dict[str, Any]]]:
    """Of a bucket: (launch, parameter -> argument, fields of the plan's entry)."""
    (device,) = (target.gpu.device for target in list_targets() if target.name == "h200" and target.gpu)
    rows = min(tokens, LIMITS["max_batch_size"])
    at = offsets(tokens)
    tile = Tile(32, 16, 64, splits=2) if tokens <= 4 else Tile(64, 64, 64, tma=True)
    hidden = linear(Linear(tokens, DIM, DIM, "bf16", "bf16", residual=True), tile)
    head = linear(Linear(tokens, VOCAB_SIZE // ranks, DIM, "bf16", "bf16", "fp32"), Tile(64, 16, 64))
    embed = embedding(Embedding(tokens, DIM, "bf16", "bf16"), device).legal[0].launches[0]
    sample = sampling(Sampling(rows, VOCAB_SIZE, LIMITS["max_seq_len"], MAX_BIASES, -(-VOCAB_SIZE // 32)),
                      device).legal[0].launches[0]
    sizes = ["input", "sizes"]

    def meeting(op: str, width: int, kind: str, source: str, to: str) -> list[Any]:
        if ranks == 1:
            return []
        found = exchange(Exchange(op, tokens, width, kind, "T", ranks), device).legal[0].launches[0]
        places = {"source": ["arena", at[source]], "destination": ["arena", at[to]], "peers": ["peers"], "sizes": sizes}
        return [(found, places, {"op": op})]

    return [
        (embed, {"ids": ["input", "token_ids"], "w": ["weight", "table"], "y": ["arena", at["x"]], "sizes": sizes},
         {"op": "embedding", "writes": {"x": {"arg": 2, "shape": ["T", DIM], "dtype": "bf16"}}}),
        *meeting("all_reduce", DIM, "bf16", "x", "x"),
        (hidden, {"x": ["arena", at["x"]], "w": ["weight", "matrix"], "y": ["arena", at["h"]], "sizes": sizes,
                  "residual": ["arena", at["x"]], "arrived": ["workspace", 0], "partial": ["workspace", 256]},
         {"op": "linear", "writes": {"h": {"arg": 2, "shape": ["T", DIM], "dtype": "bf16"}}}),
        (head, {"x": ["arena", at["h"]], "w": ["weight", "head"], "sizes": sizes,
                "y": ["arena", at["logits" if ranks == 1 else "part"]]},
         {"op": "linear", "writes": {"logits": {"arg": 2, "shape": ["T", VOCAB_SIZE // ranks], "dtype": "f32"}}}),
        *meeting("all_gather", VOCAB_SIZE // ranks, "fp32", "part", "logits"),
        (sample, {name: ["input", f"sampling.{name}"] for name in (
            "counts", "rows", "history_ids", "history_counts", "bias_ids", "bias_values", "masks", "tokens",
            "logprobs", "ranks", "top_ids", "top_logprobs")} | {
                name: ["arena", at[name]] for name in SCRATCH} | {
                    "logits": ["arena", at["logits"]], "positions": ["input", "positions"],
                    "logit_rows": ["input", "logit_rows"]}, {"op": "sample"})]


def with_room(plan: dict[str, Any]) -> None:
    """Changes a plan: the matrix lies in slot 0 for adapters, and steps without adapter leave its launch out."""
    for bucket in plan["buckets"]:
        launch = bucket["launches"][1]
        launch["adapters"] = True
        for arg in launch["args"]:
            place = arg[1] if arg[0] == "tensormap" else arg
            if place == ["weight", "matrix"]:
                place[:] = ["lora", 0]


def offsets(tokens: int) -> dict[str, int]:
    sizes = {"x": 2 * tokens * DIM, "h": 2 * tokens * DIM, "logits": 4 * tokens * VOCAB_SIZE,
             "part": 4 * tokens * VOCAB_SIZE,
             **{name: size * tokens * VOCAB_SIZE for name, size in SCRATCH.items()}, "end": 0}
    found, end = {}, 0
    for name, size in sizes.items():
        found[name] = end
        end += -(-size // 256) * 256
    return found


def kernel_entry(kernel: GpuKernel, compiled: CompiledKernel) -> dict[str, Any]:
    """As it stands in plan.kernels."""
    parameters = [[name, {"tensormap": kind.dtype, "block": list(kind.block)} if isinstance(kind, TensorMap) else kind]
                  for name, kind in kernel.parameters]
    return {"code": f"code/{kernel.symbol}.cubin", "entry": compiled.entry, "threads": 32 * compiled.num_warps,
            "shared_bytes": compiled.shared_bytes, "cluster": compiled.cluster, "scratch_bytes": compiled.scratch_bytes,
            "programmatic_launch": compiled.programmatic_launch,
            "parameters": parameters, "tensor_maps": list(compiled.tensor_maps), "module": kernel.module,
            "function": kernel.function, "constants": dict(kernel.constants), "num_warps": kernel.num_warps,
            "num_stages": kernel.num_stages, "source_sha256": source_digest(kernel.module)}


def launch_entry(launch: GpuLaunch, arguments: dict[str, list[Any]], fields: dict[str, Any]) -> dict[str, Any]:
    args: list[Any] = []
    for name, kind in launch.kernel.parameters:
        arg = arguments[name]
        args.append(["tensormap", arg, list(kind.shape), kind.stride] if isinstance(kind, TensorMap) else arg)
    return {"kernel": launch.kernel.symbol, "grid": list(launch.grid), "args": args, "origin": "mock", **fields}


def plan(blobs: dict[str, list[str]], compiled: dict[GpuKernel, CompiledKernel], ranks: int = 1) -> dict[str, Any]:
    """blobs: weight -> what each rank has, or one for all."""
    found = {tokens: launches(tokens, ranks) for tokens in BUCKETS}
    used = {one.kernel.symbol: one.kernel for bucket in found.values() for one, _, _ in bucket}
    scratch = max(one.scratch_bytes for bucket in found.values() for one, _, _ in bucket)
    return {
        "version": PLAN_VERSION,
        "kernels": {symbol: kernel_entry(kernel, compiled[kernel]) for symbol, kernel in used.items()},
        "kv": {"block_size": BLOCK_SIZE, "block_bytes": BLOCK_BYTES, "windows": [None], "slots": [
            {"slot": 0, "table": 0, "heads": 1, "key_dim": 32, "value_dim": 32, "dtype": "bf16", "key_offset": 0,
             "value_offset": 1024}]},
        "weights": {name: {"blob": held[0], "size": weight_of(name, 0, ranks).nbytes, "label": name,
                           "shape": list(WEIGHTS[name].shape), "scheme": "bf16",
                           **({"blobs": held} if len(held) > 1 else {})} for name, held in blobs.items()},
        "workspace": {"bytes": 256 + scratch, "zeroed_bytes": 256, "signal_bytes": max(
            one.signal_bytes for bucket in found.values() for one, _, _ in bucket)},
        "buckets": [{"tokens": tokens, "arena_bytes": offsets(tokens)["end"],
                     "outputs": {"logits": {"offset": offsets(tokens)["logits"], "width": VOCAB_SIZE, "dtype": "f32"}},
                     "launches": [launch_entry(*one) for one in bucket]} for tokens, bucket in found.items()],
    }


def write_engine(path: Path, *, edit_plan: Callable[[dict[str, Any]], None] | None = None,
                 edit_code: Callable[[bytes], bytes] = bytes, ranks: int = 1, **changes: Any) -> Path:
    """edit_plan changes the plan in place, edit_code the first cubin; `changes` replace fields of the manifest."""
    kernels = {one.kernel: None for tokens in BUCKETS for one, _, _ in launches(tokens, ranks)}
    compiled = compile_kernels(kernels, architectures()[ARCH])
    with EngineWriter(path) as writer:
        blobs = {name: list(dict.fromkeys(
            writer.add_weight(weight_of(name, rank, ranks)).removeprefix("weights/").removesuffix(".bin")
            for rank in range(ranks))) for name in WEIGHTS}
        the_plan = plan(blobs, compiled, ranks)
        changes = {**({"tensor_parallel": ranks} if ranks > 1 else {}), **changes}
        for number, (symbol, entry) in enumerate(the_plan["kernels"].items()):
            (cubin,) = {one.cubin for kernel, one in compiled.items() if kernel.symbol == symbol}
            writer.add(entry["code"], edit_code(cubin) if number == 0 else cubin)
        if edit_plan is not None:
            edit_plan(the_plan)
        writer.add("plan.json", canonical_json(the_plan))
        writer.finish({
            "ingot_version": "0.1.0",
            "model": {"name": "mock", "architecture": "MockForCausalLM",
                      "config_sha256": hashlib.sha256(b"mock").hexdigest()},
            "target": {"name": "h200", "kind": "cuda", "isa": ARCH}, "precision": "bf16", "limits": LIMITS,
            "kernels": [], "memory": {"weights_bytes": sum(data.nbytes for data in WEIGHTS.values())},
            "toolchain": {}, **changes})
    return path
