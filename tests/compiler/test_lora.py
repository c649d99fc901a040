"""Engines with room for LoRA adapters compute what models with merged weights compute."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.checkpoint.checkpoint import Checkpoint
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.importer.importer import import_model
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.ops_lora import ADAPTERS, SLOTS
from ingot.compiler.passes.add_lora import LoraRequest
from ingot.compiler.passes.pipeline import cpu_pipeline, gpu_pipeline, run_passes
from ingot.compiler.precision import find_precision
from ingot.compiler.targets import find_target
from ingot.runtime.devices import load_program
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import RequestError
from ingot.runtime.lora import LoraRoom
from ingot.runtime.program import Program, step_logits
from tools.small_models import save_random, small_config

from .adapters import RandomAdapter

FAMILIES = ("llama", "qwen3", "gemma3_text")
RANK, SLOTS_OF_ENGINE = 8, 3
TEXTS = [[5, 17, 99], [400, 81], [12, 9, 301]]
ADAPTERS_OF_TEXTS = [2, -1, 0]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> a folder with a random model of two layers."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def made(family: str) -> Path:
        save_random(small_config(family, hidden_size=128, head_dim=32), folder / family)
        return folder / family

    return made


def request(model: Path, output: Path | None, precision: str, target: str = "cpu", **changes: Any) -> BuildRequest:
    options: dict[str, Any] = {"lora_max_rank": RANK, "lora_max_adapters": SLOTS_OF_ENGINE, **changes}
    return BuildRequest(str(model), target, precision, output, max_batch_size=8, max_num_tokens=8, max_seq_len=64,
                        calibrate=False, **options)


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(family, precision, target) -> an engine with room, built once."""
    folder = tmp_path_factory.mktemp("engines")

    @cache
    def made(family: str, precision: str, target: str = "cpu") -> Path:
        output = folder / f"{family}.{target}.{precision}.engine"
        build(request(checkpoint(family), output, precision, target))
        return output

    return made


def room_of(path: Path) -> LoraRoom:
    with EngineFile.open(path) as file:
        room = LoraRoom.of(file.manifest)
    assert room is not None
    return room


def adapters_for(room: LoraRoom) -> dict[int, RandomAdapter]:
    """Slot -> what is in it: one of full rank, one of less."""
    return {0: RandomAdapter(room, 1, RANK), 2: RandomAdapter(room, 2, 3)}


def logits_of(program: Program, texts: Sequence[Sequence[int]], slots: Sequence[int], cuts: Sequence[int] = (),
              ) -> list[np.ndarray]:
    """[T, V] of each text, all texts in a step; cuts: where each ends before the last step, which then comes behind."""
    blocks = 1 + max(map(len, texts)) // program.block_size
    found: list[list[np.ndarray]] = [[] for _ in texts]
    begins = [0] * len(texts)
    for ends in ([list(cuts)] if cuts else []) + [list(map(len, texts))]:
        inputs = program.inputs[len(found[0]) % 2]
        inputs.clear()
        for number, (text, begin, end) in enumerate(zip(texts, begins, ends, strict=True)):
            tables = [[(number * len(program.kv_windows) + table) * blocks + block for block in range(blocks)]
                      for table in range(len(program.kv_windows))]
            used = -(-end // program.block_size)
            inputs.add(text[begin:end], begin, [table[:used] for table in tables], end - begin, adapter=slots[number])
        rows = iter(step_logits(program, inputs).copy())
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            found[number] += [next(rows) for _ in range(end - begin)]
        begins = ends
    return [np.array(rows) for rows in found]


def merged_logits(model: Path, text: Sequence[int], adapter: RandomAdapter | None) -> np.ndarray:
    """Of transformers in float32, the adapter added to its weights."""
    merged = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32).eval()
    if adapter is not None:
        for name, delta in adapter.deltas().items():
            merged.get_submodule(name).weight.data += torch.from_numpy(delta)
    with torch.no_grad():
        return np.asarray(merged(torch.tensor([list(text)])).logits[0].numpy())


def interpreted_logits(source: Checkpoint, graph: Any, text: Sequence[int], room: LoraRoom, slot: int) -> np.ndarray:
    """Of the final graph's meaning."""
    slots = np.zeros((room.max_adapters, room.bytes_per_adapter), np.uint8)
    for number, adapter in adapters_for(room).items():
        slots[number] = adapter.image()
    counted = np.arange(len(text), dtype=np.int32)
    inputs: dict[str, np.ndarray] = {"token_ids": np.array(text, np.int32), "positions": counted, "logit_rows": counted,
              ADAPTERS: np.full(len(text), slot, np.int32), SLOTS: slots}
    return run(graph, inputs, source)[graph.outputs[0]]


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Of the mean square."""
    return float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))


def fill(program: Program) -> None:
    assert program.lora is not None
    for slot, adapter in adapters_for(program.lora).items():
        program.write_adapter(slot, adapter.image())


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_engine_is_transformers_with_merged_weights(engine: Callable[..., Path], family: str,
                                                         checkpoint: Callable[[str], Path]) -> None:
    """Two adapters and none in one step, as a whole and in pieces."""
    with EngineFile.open(engine(family, "fp32")) as file:
        program = load_program(file, kv_cache_tokens=1024, num_workers=3)
        assert program.lora is not None
        adapters = adapters_for(program.lora)
        empty = logits_of(program, TEXTS, [-1, -1, -1])
        fill(program)
        for cuts in ((), (2, 1, 1), (1, 1, 2)):
            rows = logits_of(program, TEXTS, ADAPTERS_OF_TEXTS, cuts)
            for text, slot, got in zip(TEXTS, ADAPTERS_OF_TEXTS, rows, strict=True):
                want = merged_logits(checkpoint(family), text, adapters.get(slot))
                assert error(got, want) < 1e-4, (slot, cuts)
            np.testing.assert_array_equal(rows[1], empty[1])
            assert error(rows[0], empty[0]) > 0.05, "the adapter changes much more than roundings do"
        program.close()


@pytest.mark.parametrize("family", [FAMILIES[0], *(pytest.param(family, marks=SLOW) for family in FAMILIES[1:])])
def test_quantized_engine_computes_what_its_graph_means(engine: Callable[..., Path], family: str,
                                                        checkpoint: Callable[[str], Path]) -> None:
    path = engine(family, "w4a8")
    room, precision = room_of(path), find_precision("w4a8", None)
    source = open_checkpoint(str(checkpoint(family)))
    graph = run_passes(import_model(source).graph, cpu_pipeline(
        precision, precision.kv, lora=LoraRequest(RANK, SLOTS_OF_ENGINE)))
    with EngineFile.open(path) as file:
        program = load_program(file, kv_cache_tokens=1024, num_workers=2)
        empty = logits_of(program, TEXTS, [-1, -1, -1])
        fill(program)
        rows = logits_of(program, TEXTS, ADAPTERS_OF_TEXTS)
        for text, slot, got in zip(TEXTS, ADAPTERS_OF_TEXTS, rows, strict=True):
            assert error(got, interpreted_logits(source, graph, text, room, slot)) < 2e-2, slot
        np.testing.assert_array_equal(rows[1], empty[1])
        program.close()


def test_a_slot_is_written_between_two_steps(engine: Callable[..., Path]) -> None:
    """Not before the one in flight has ended; a zeroed slot is no adapter."""
    with EngineFile.open(engine("llama", "fp32")) as file:
        program = load_program(file, kv_cache_tokens=1024, num_workers=2)
        assert program.lora is not None
        without, zeroed = (logits_of(program, TEXTS[:1], [slot])[0] for slot in (-1, 1))
        np.testing.assert_array_equal(without, zeroed)
        image = RandomAdapter(program.lora, 5, RANK).image()
        inputs = program.inputs[0]
        inputs.clear()
        inputs.add(TEXTS[0], 0, [[0]], len(TEXTS[0]), adapter=1)
        program.launch(inputs)
        program.write_adapter(1, image)
        image[:] = 0
        program.wait()
        np.testing.assert_array_equal(program.logits(), without)
        assert error(logits_of(program, TEXTS[:1], [1])[0], without) > 0.05
        program.close()


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), ("fp8", 8e-2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_engine_computes_what_its_graph_means(engine: Callable[..., Path], family: str, precision: str,
                                                  tolerance: float, checkpoint: Callable[[str], Path]) -> None:
    path, target = engine(family, precision, "h200"), find_target("h200")
    room, rule = room_of(path), find_precision(precision, target.gpu)
    source = open_checkpoint(str(checkpoint(family)))
    graph = run_passes(import_model(source).graph, gpu_pipeline(rule, rule.kv, lora=LoraRequest(RANK, SLOTS_OF_ENGINE)))
    with EngineFile.open(path) as file:
        program = load_program(file, kv_cache_tokens=1024, device="emulator")
        empty = logits_of(program, TEXTS, [-1, -1, -1])
        fill(program)
        for cuts in ((), (2, 1, 1)):
            rows = logits_of(program, TEXTS, ADAPTERS_OF_TEXTS, cuts)
            for text, slot, got in zip(TEXTS, ADAPTERS_OF_TEXTS, rows, strict=True):
                assert error(got, interpreted_logits(source, graph, text, room, slot)) < tolerance, (slot, cuts)
            if not cuts:
                np.testing.assert_array_equal(rows[1], empty[1])
        program.close()


def test_only_the_modules_that_are_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    result = build(request(checkpoint("llama"), None, "fp32", dry_run=True,
                           lora_modules=["q_proj", "v_proj", "model.layers.1.mlp.down_proj"]))
    room = LoraRoom.of(result.manifest)
    assert room is not None and [module.name for module in room.modules] == [
        "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj"]
    assert [(module.in_features, module.out_features) for module in room.modules[:2]] == [(128, 128), (128, 128)]
    assert result.manifest["memory"]["lora_bytes"] == SLOTS_OF_ENGINE * room.bytes_per_adapter
    recipe = result.manifest["recipe"]
    assert recipe["lora_modules"] == ["q_proj", "v_proj", "model.layers.1.mlp.down_proj"]
    assert (recipe["lora_max_rank"], recipe["lora_max_adapters"]) == (RANK, SLOTS_OF_ENGINE)


@pytest.mark.parametrize("target", ["cpu", pytest.param("h200", marks=SLOW)])
def test_all_linear_layers_by_default(checkpoint: Callable[[str], Path], target: str) -> None:
    """Neither head, embedding, router nor experts."""
    result = build(request(checkpoint("mixtral"), None, "bf16", target, dry_run=True))
    room = LoraRoom.of(result.manifest)
    assert room is not None
    assert {module.name.rpartition(".")[2] for module in room.modules} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(("changes", "message"), [
    ({"lora_max_rank": 0}, "lora_max_rank is 0; expected 1 to 256"),
    ({"lora_max_rank": 257}, "lora_max_rank is 257; expected 1 to 256"),
    ({"lora_max_adapters": 0}, "lora_max_adapters is 0; expected 1 to 256"),
    ({"lora_max_rank": None}, "lora_max_adapters says more of the room for LoRA adapters, and none is asked for"),
    ({"lora_modules": []}, "lora_modules is empty"),
    ({"lora_modules": ["q_porj"]}, "no linear layer of the model is called so. Did you mean q_proj"),
    ({"lora_modules": ["lm_head"]}, "lm_head is the head of the model"),
    ({"lora_modules": ["embed_tokens"]}, "embed_tokens is an embedding of the model"),
])
def test_room_that_cannot_be(checkpoint: Callable[[str], Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(request(checkpoint("llama"), None, "fp32", dry_run=True, **changes))


def test_routers_experts_and_divided_engines_have_none(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(RequestError, match="is a router of the model"):
        build(request(checkpoint("mixtral"), None, "bf16", dry_run=True, lora_modules=["mlp.gate"]))
    with pytest.raises(RequestError, match="divided among 2 GPUs has no room for LoRA adapters yet"):
        build(request(checkpoint("llama"), None, "bf16", "h200", dry_run=True, tensor_parallel=2))


def test_without_room_nothing_changes(checkpoint: Callable[[str], Path]) -> None:
    result = build(request(checkpoint("llama"), None, "fp32", dry_run=True, lora_max_rank=None, lora_max_adapters=None))
    assert "lora" not in result.manifest and "lora_bytes" not in result.manifest["memory"]
    assert not any(name.startswith("lora") for name in result.manifest["recipe"])


def test_a_step_without_adapters_has_no_launch_more(checkpoint: Callable[[str], Path]) -> None:
    """On CPUs, whatever its number of tokens."""
    counts = []
    for rank in (None, RANK):
        manifest = build(request(checkpoint("llama"), None, "fp32", dry_run=True, lora_max_rank=rank,
                                 lora_max_adapters=None)).manifest
        kernels = [kernel for kernel in manifest["kernels"] if not kernel["name"].startswith("lora_")]
        assert len(kernels) < len(manifest["kernels"]) or rank is None
        counts.append({tokens: sum(kernel["launches"].get(tokens, 0) for kernel in kernels) for tokens in "1248"})
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_adapters_get_the_inputs_of_the_model_where_calibration_scaled_them(speaking_checkpoint: Path,
                                                                            tmp_path: Path) -> None:
    rows = {}
    for method in ("awq", "rtn"):
        output = tmp_path / f"{method}.engine"
        result = build(replace(request(speaking_checkpoint, output, "w4a8"), calibrate=method != "rtn",
                               quantization_method=method if method != "rtn" else "best"))
        assert (result.manifest["calibration"]["num_weights"] > 0) == (method == "awq")
        with EngineFile.open(output) as file:
            program = load_program(file, kv_cache_tokens=1024, num_workers=2)
            fill(program)
            texts = [[token % 200 for token in text] for text in TEXTS]
            rows[method] = logits_of(program, texts, ADAPTERS_OF_TEXTS), logits_of(program, texts, [-1] * 3)
            program.close()
    (scaled, without), (plain, _) = rows["awq"], rows["rtn"]
    for number, slot in enumerate(ADAPTERS_OF_TEXTS):
        effect = error(without[number], plain[number])
        assert slot < 0 or error(scaled[number], plain[number]) < effect / 3, slot
