"""ingot build, end to end, on a tiny random model: what it writes computes what the model computes."""
from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from ingot.compiler.build import BuildRequest, BuildResult, build
from ingot.compiler.checkpoint.checkpoint import Checkpoint
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.cpu.generate import CpuProgram
from ingot.compiler.cpu.isa import ISAS, host_isa
from ingot.compiler.cpu.toolchain import CompileError
from ingot.compiler.importer.importer import import_model
from ingot.compiler.ir.graph import Graph, through_reshapes
from ingot.compiler.ir.interpret import run, run_node
from ingot.compiler.passes.pipeline import cpu_pipeline, run_passes
from ingot.compiler.plan.buckets import token_buckets
from ingot.compiler.precision import PRECISIONS
from ingot.compiler.weights.evaluate import evaluate
from ingot.plugins.quantize.reference import dequantize_rows
from ingot.plugins.scheme import SCHEMES
from ingot.runtime.devices import load_program
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import IngotError, RequestError
from ingot.runtime.program import Program, step_logits

NUM_TOKENS = 24
IDS = np.random.default_rng(0).integers(0, 256, NUM_TOKENS).astype(np.int32)
STEPS = ([24], [1, 1, 1, 21], [17, 2, 5], [3] * 8)
"""Ways to divide the tokens over steps: context and generation, in every bucket."""


PAIRS = 2 ** -7
"""Error of attention where pairs of bfloat16 are multiplied: queries, and weights, are off by up to 2^-8. In bf16 all
matrices round their inputs like that."""


def multiplies_pairs(manifest: dict[str, Any]) -> bool:
    return ISAS[manifest["target"]["isa"]].multiplies_pairs and manifest["kv_precision"] == "bf16"


def request(checkpoint: Path, output: Path | None, precision: str = "fp32") -> BuildRequest:
    return BuildRequest(str(checkpoint), "cpu", precision, output, max_batch_size=NUM_TOKENS, max_num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def built(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], BuildResult]:
    """precision -> an engine, built once."""
    folder, done = tmp_path_factory.mktemp("engines"), {}

    def engine(precision: str) -> BuildResult:
        if precision not in done:
            done[precision] = build(request(tiny_checkpoint, folder / f"{precision}.engine", precision))
        return done[precision]
    return engine


def logits_of(program: Program, steps: list[int]) -> np.ndarray:
    """Of all tokens of one sequence whose KV blocks lie in reverse order."""
    blocks, position = list(reversed(range(program.num_blocks))), 0
    rows: list[np.ndarray] = []
    for count in steps:
        inputs = program.inputs[len(rows) % 2]
        inputs.clear()
        used = -(-(position + count) // program.block_size)
        inputs.add(IDS[position:position + count].tolist(), position, [blocks[:used]], count)
        rows.append(step_logits(program, inputs).copy())
        position += count
    return np.concatenate(rows)


def final_graph(checkpoint: Checkpoint, precision: str) -> Graph:
    rule = PRECISIONS[precision]
    passes = cpu_pipeline(rule, rule.kv, pairs=host_isa().multiplies_pairs)
    return run_passes(import_model(checkpoint).graph, passes)


def inputs_of(tokens: int) -> dict[str, np.ndarray]:
    counted = np.arange(tokens, dtype=np.int32)
    return {"token_ids": IDS[:tokens], "positions": counted, "logit_rows": counted}


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-3), ("int8", 2e-2), ("w4a8", 5e-2)])
def test_engine_computes_what_its_graph_means(built: Callable[[str], BuildResult], tiny_checkpoint: Path,
                                              precision: str, tolerance: float) -> None:
    """Where activations are quantized, a rounding that falls the other way shows in all that follows: the next test
    looks at each operator by itself."""
    checkpoint = open_checkpoint(tiny_checkpoint)
    graph = final_graph(checkpoint, precision)
    want = run(graph, inputs_of(NUM_TOKENS), checkpoint)[graph.outputs[0]]
    path = built(precision).path
    assert path is not None
    if multiplies_pairs(built(precision).manifest):
        tolerance = 3 * PAIRS if precision == "bf16" else max(2 * tolerance, PAIRS)
    with EngineFile.open(path) as file:
        for workers, steps in zip((1, 2, 3, 1), STEPS, strict=True):
            program = load_program(file, kv_cache_tokens=64, num_workers=workers)
            error = np.abs(logits_of(program, steps) - want).max() / np.abs(want).max()
            program.close()
            assert error <= tolerance, f"{workers} workers, steps {steps}: {error:.1e}"


@pytest.mark.parametrize("tokens", [1, NUM_TOKENS])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_operator_computes_its_reference(built: Callable[[str], BuildResult], tiny_checkpoint: Path,
                                              precision: str, tokens: int) -> None:
    """On what the engine itself computed before."""
    checkpoint, inputs, bindings = open_checkpoint(tiny_checkpoint), inputs_of(tokens), {"T": tokens, "L": tokens}
    graph, path = final_graph(checkpoint, precision), built(precision).path
    assert path is not None
    with EngineFile.open(path) as file:
        program = load_program(file, kv_cache_tokens=64, num_workers=2)
        program.inputs[0].add(IDS[:tokens].tolist(), 0, [[1, 0]], tokens)
        traced = program.trace(program.inputs[0], {name for node in graph.nodes for name in node.outputs})
        program.close()
    values = {**inputs, **{name: evaluate(expr, checkpoint) for name, expr in graph.constants.items()}}
    compared, producers = 0, graph.producers()
    for node in graph.nodes:
        results = run_node(node, [values[i] if isinstance(i, str) else i for i in node.inputs], bindings)
        for name, want in zip(node.outputs, results, strict=True):
            values[name] = traced.get(name, want)
            if name not in traced:
                continue
            compared += 1
            if node.op == "quantize":
                width = int(graph.types[node.values[0]].shape[-1])
                if through_reshapes(node.values[0], producers) not in traced:  # made row by row, and left nowhere
                    scheme = SCHEMES[node.attrs["scheme"]]
                    got, wanted = (dequantize_rows(rows.reshape(-1, rows.shape[-1]), width, scheme)
                                   for rows in (traced[name], want))
                    assert np.abs(got - wanted).max() <= np.abs(wanted).max() / 60, name  # a step
                    continue
                # to the bit; what pads a row to 64 bytes is not written
                used = 2 * width if SCHEMES[node.attrs["scheme"]].act_bits == 16 else width + 8 * width // 32
                assert np.array_equal(traced[name][..., :used], want[..., :used]), name
            else:
                error = np.abs(traced[name] - want).max() / max(np.abs(want).max(), 1e-6)
                attends = node.op == "attention" and multiplies_pairs(built(precision).manifest)
                assert error <= (PAIRS if attends else 5e-6), f"{node.op} {name} from {node.origin}: {error:.1e}"
    assert compared >= 20 and set(graph.probes.values()) <= set(traced)


def test_fp32_engine_is_transformers(built: Callable[[str], BuildResult], tiny_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.from_numpy(IDS).long()[None]).logits[0].numpy()
    path = built("fp32").path
    assert path is not None
    with EngineFile.open(path) as file:
        program = load_program(file, kv_cache_tokens=64, num_workers=2)
        got = logits_of(program, [7, 1, 16])
        program.close()
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_manifest_says_what_was_built(built: Callable[[str], BuildResult]) -> None:
    result = built("w4a8")
    manifest = result.manifest
    assert manifest["precision"] == "w4a8" and manifest["kv_precision"] == "bf16"
    assert manifest["model"]["architecture"] == "LlamaForCausalLM" and manifest["model"]["vocab_size"] == 256
    assert [manifest["model"][name] for name in ("hidden_size", "num_layers", "num_heads")] == [64, 2, 4]
    assert manifest["limits"] == {"max_batch_size": 24, "max_num_tokens": 24, "max_seq_len": 128}
    memory = manifest["memory"]
    assert memory["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2  # layers, k and v, heads, width, bytes
    assert memory["arena_bound_bytes"] <= memory["arena_bytes"] <= 1.05 * memory["arena_bound_bytes"]
    launches = {kernel["name"]: kernel["launches"] for kernel in manifest["kernels"]}
    assert sum(counts.get("24", 0) for name, counts in launches.items() if name.startswith("attention_q")) == 2
    assert "the checkpoint has no tokenizer: the engine takes token ids" in result.warnings
    assert set(result.seconds) >= {"import", "passes", "plan", "compile", "weights"}


def test_buckets_double_up_to_the_limit() -> None:
    assert token_buckets(1) == [1]
    assert token_buckets(24) == [1, 2, 4, 8, 16, 24]
    assert token_buckets(32) == [1, 2, 4, 8, 16, 32]


def test_same_request_same_bytes_wherever_it_is_built(built: Callable[[str], BuildResult], tiny_checkpoint: Path,
                                                      tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / tiny_checkpoint.name
    shutil.copytree(tiny_checkpoint, copy)
    again = build(request(copy, tmp_path / "other-name.engine", "int8"))
    first = built("int8")
    assert again.hash == first.hash and again.path is not None and first.path is not None
    assert again.path.read_bytes() == first.path.read_bytes()


def weights_of(result: BuildResult) -> list[str]:
    assert result.path is not None
    with EngineFile.open(result.path) as file:
        return [name for name in file.members if name.startswith("weights/")]


def test_calibration_can_be_left_out(built: Callable[[str], BuildResult], tiny_checkpoint: Path,
                                     tmp_path: Path) -> None:
    """Then the model is not run; other precisions have none."""
    plain = build(replace(request(tiny_checkpoint, tmp_path / "x.engine", "w4a8"), calibrate=False))
    assert "calibrate" not in plain.seconds
    assert plain.manifest["recipe"]["calibrate"] is False and plain.manifest["num_calibrated_weights"] == 0
    assert weights_of(plain) == weights_of(built("w4a8"))
    assert "calibrate" not in built("int8").seconds


def test_dry_run_plans_and_writes_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    result = build(replace(request(tiny_checkpoint, tmp_path / "x.engine"), dry_run=True),
                   lambda stage, detail: seen.append(stage))
    assert result.path is None and result.hash == "" and result.manifest["memory"]["arena_bytes"] > 0
    assert list(tmp_path.iterdir()) == [] and "compile" not in seen and seen[:2] == ["config", "recipe"]


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are not run need no compiler, which takes most of the time."""
    monkeypatch.setattr(CpuProgram, "compile", lambda program, compiler, cache: b"no code")


@pytest.mark.usefixtures("no_code")
def test_dumps_lie_in_the_folder_and_in_the_engine(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = build(replace(request(tiny_checkpoint, tmp_path / "x.engine"), dump=tmp_path / "dump"))
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names[0] == "00_import.txt" and "raise_rope" in names[4] and len(names) > 10
    assert result.path is not None
    with EngineFile.open(result.path) as file:
        assert bytes(file.read(f"debug/passes/{names[4]}")).decode() == (tmp_path / "dump" / names[4]).read_text()
        assert b"= attention(" in bytes(file.read("debug/graph.txt"))


@pytest.mark.parametrize(("change", "message"), [
    ({"target": "cpu:x86-64-v33"}, "Did you mean cpu:x86-64-v3"),
    ({"target": "h100"}, "unknown target 'h100'"),
    ({"precision": "int4"}, "has no precision 'int4'; it has: fp32, bf16, int8, w4a8"),
    ({"calibrate": False, "quantization_method": "gptq"}, "gptq rounds weights for the inputs that they meet"),
    ({"precision": "w4"}, "unknown precision 'w4'; known: fp32, bf16, int8, w4a8"),
    ({"kv_precision": "fp8"}, "has no KV cache in 'fp8'; it has: fp32, bf16, int8"),
    ({"max_batch_size": 0}, "max_batch_size must be at least 1, got 0"),
    ({"max_seq_len": -3}, "max_seq_len must be at least 1, got -3"),
    ({"group_size": 64}, "group_size and group_minimums are for GPUs; four bits have groups of 32 channels with a"),
    ({"target": "h200", "precision": "int4", "group_size": 48}, "group_size is 48; expected 32, 64, 128"),
    ({"target": "h200", "precision": "fp8", "group_minimums": True}, "are for four-bit integers; fp8 has none"),
    ({"target": "h200", "precision": "auto", "group_size": 32}, "precision auto finds for each layer; leave them out"),
    ({"max_seq_len": 129}, "max_seq_len 129 is beyond the 128 positions of tiny-llama"),
    ({"max_batch_size": 32}, "max_num_tokens 24 is below max_batch_size 32")])
def test_wrong_requests(tiny_checkpoint: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    asked = replace(request(tiny_checkpoint, tmp_path / "x.engine"), **change)  # type: ignore[arg-type]
    with pytest.raises(RequestError) as caught:
        build(asked)
    assert message in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_precision_that_the_target_lacks(tiny_checkpoint: Path, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRECISIONS, "fp8", replace(PRECISIONS["bf16"], name="fp8"))
    with pytest.raises(RequestError, match="has no precision 'fp8'; it has: fp32, bf16, int8, w4a8"):
        build(request(tiny_checkpoint, tmp_path / "x.engine", "fp8"))


@pytest.mark.usefixtures("no_code")
def test_an_engine_is_not_overwritten_unless_forced(tiny_checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.engine"
    output.write_text("kept")
    with pytest.raises(RequestError, match="exists; pass --force"):
        build(request(tiny_checkpoint, output))
    assert output.read_text() == "kept"
    result = build(replace(request(tiny_checkpoint, output), force=True))
    assert result.path == output and list(tmp_path.iterdir()) == [output]
    EngineFile.open(output).close()


def a_folder_that_is_missing(path: Path) -> BuildRequest:
    return request(path, path / "missing" / "x.engine")


def a_folder_in_place_of_a_file(path: Path) -> BuildRequest:
    return replace(request(path, path), force=True)


def a_dump_that_is_a_file(path: Path) -> BuildRequest:
    return replace(request(path, path / "x.engine"), dump=path / "config.json")


@pytest.mark.parametrize(("asked", "message"), [
    (a_folder_that_is_missing, "the folder .*missing does not exist"),
    (a_folder_in_place_of_a_file, "exists and is not a file"),
    (a_dump_that_is_a_file, "--dump .*config.json: no such folder can be made: File exists")])
def test_where_nothing_can_be_written_is_told_before_the_work(
        tiny_checkpoint: Path, asked: Callable[[Path], BuildRequest], message: str) -> None:
    stages: list[str] = []
    with pytest.raises(RequestError, match=message):
        build(asked(tiny_checkpoint), lambda stage, detail: stages.append(stage))
    assert stages == ["config"]


def nan_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = np.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def failing_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(program: CpuProgram, compiler: str, cache: object) -> bytes:
        raise CompileError("the C compiler failed")
    monkeypatch.setattr(CpuProgram, "compile", fail)


def truncated_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def missing_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("spoil", [nan_weights, failing_compiler, truncated_file, missing_file])
def test_nothing_is_left_behind_by_what_fails(spoil: Callable[[Path, pytest.MonkeyPatch], None], tiny_checkpoint: Path,
                                              tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    shutil.copytree(tiny_checkpoint, folder)
    out.mkdir()
    spoil(folder, monkeypatch)
    with pytest.raises(IngotError):
        build(request(folder, out / "x.engine"))
    assert list(out.iterdir()) == []
