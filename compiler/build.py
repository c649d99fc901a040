"""ingot build: one checkpoint, one target, one precision -> one engine file."""
from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.runtime.errors import RequestError
from ingot.runtime.manifest import canonical_json
from ingot.runtime.store.store import Store

from .auto.auto import build_auto
from .cache.build_cache import BuildCache, Uses
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.quantized import (
    equal_tensors,
    quantization_report,
    stored_groups,
    stored_schemes,
    stored_weights,
    with_equal_tensors_shared,
)
from .clock import Clock, Progress
from .cpu.generate import CpuProgram
from .cpu.generate import generate as generate_for_cpu
from .engine_writer import EngineWriter, check_output
from .gpu.generate import GpuProgram
from .gpu.generate import generate as generate_for_gpu
from .ir.dump import dump
from .ir.graph import Graph
from .model_facts import ModelFacts
from .model_shape import model_shape
from .model_source import CheckpointSource, ConfigSource, ModelSource, open_checkpoint_source
from .passes.pipeline import cpu_pipeline, gpu_pipeline, run_passes
from .precision import AUTO, GPU_PRECISIONS, PRECISIONS, Precision, find_precision, with_groups, with_layers
from .quality_gate import Gate, Quality, quality_of, require_measurable
from .refit_record import REFIT_MEMBER, refit_record
from .self_test import record_self_test, require_recordable
from .targets import Target, find_target
from .tune.records import Records
from .version import ingot_version, toolchain_versions
from .write_weights import Rounding, write_weights

DEFAULT_MAX_SEQ_LEN = 4096
RANKS = (1, 2, 4, 8)
"""Numbers of GPUs that an engine can be divided among."""

BLOCK_SIZE = 16
"""Tokens of a KV block."""

_LARGE_GPU_GIB = 64
"""From so much memory on a GPU serves many sequences at a time, and its arena may be large."""

Program = CpuProgram | GpuProgram


@dataclass(frozen=True)
class BuildRequest:
    """What the user asks for; None where the default decides.

    model            checkpoint folder, hub name, or GGUF file
    name             what the engine calls its model; default: the folder's name, or the hub name's last part
    config           for a dry run without the checkpoint: what its config.json holds
    max_batch_size   sequences in a step, and rows of logits
    max_num_tokens   tokens in a step
    max_seq_len      tokens of a sequence, prompt and answer together; default: what the model was made for
    calibrate        run the model on a text, so that weights of 4 bits are rounded for the inputs they meet
    calibration      that text, or JSONL with a "text" in each line; default: the one that ships with the compiler
    quantization_method  key of calibration.record.METHODS; what "best" chooses from is smaller errors of each layer
    strip_weights    leave the weights out of the file; the engine's hash is what it is with them
    store            engine store that gets the engine too, and, of one without weights, those alone
    self_test        run the engine and keep in it what it answers, for servers to ask again before they serve it; needs
                     a machine that can run it
    measure_quality  run the engine over a held-out text and record how far it is from the model; needs a machine that
                     can run it
    max_perplexity_increase, min_top1_agreement, max_kl_divergence  measure, and fail if the engine is worse; see Gate
    layers           pattern of names of layers -> precision of those that match; see with_layers
    group_size, group_minimums  of four-bit integers on GPUs; see with_groups. If neither is said, weights that the
                     checkpoint holds in such groups keep theirs
    tensor_parallel  GPUs that one engine is divided among
    tuning_records   what ingot tune has written, or its content: which kernels were measured to be the fastest
    """

    model: str
    target: str
    precision: str
    output: Path | None = None
    name: str | None = None
    config: Mapping[str, Any] | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_precision: str | None = None
    dump: Path | None = None
    dry_run: bool = False
    force: bool = False
    compiler: str = "zig"
    calibrate: bool = True
    calibration: Path | None = None
    quantization_method: str = "best"
    strip_weights: bool = False
    store: Path | None = None
    self_test: bool = False
    measure_quality: bool = False
    max_perplexity_increase: float | None = None
    min_top1_agreement: float | None = None
    max_kl_divergence: float | None = None
    layers: Mapping[str, str] | None = None
    group_size: int | None = None
    group_minimums: bool | None = None
    tuning_records: Path | Mapping[str, Any] | None = None
    tensor_parallel: int = 1

    @property
    def gate(self) -> Gate:
        """Raises RequestError for figures that mean nothing."""
        return Gate(self.max_perplexity_increase, self.min_top1_agreement, self.max_kl_divergence)

    @property
    def rounding(self) -> Rounding:
        """Raises RequestError for a method that is not known, or that needs no text if one is given, or needs one if
        there is to be none."""
        if not self.calibrate and self.quantization_method in ("awq", "gptq"):
            raise RequestError(f"{self.quantization_method} rounds weights for the inputs that they meet: leave out "
                               "either --no-calibration or --quantization-method")
        return Rounding(self.quantization_method if self.calibrate else "rtn", self.calibration)

    @property
    def asks_groups(self) -> bool:
        return self.group_size is not None or self.group_minimums is not None

    @property
    def measures(self) -> bool:
        return self.measure_quality or self.gate.is_set


@dataclass(frozen=True)
class BuildResult:
    """path is None after a dry run. seconds: stage -> time.

    reused: kind of the build cache's entries -> (how many were found there, how many were asked for)
    """

    path: Path | None
    hash: str
    manifest: dict[str, Any]
    seconds: dict[str, float]
    warnings: tuple[str, ...] = ()
    reused: dict[str, tuple[int, int]] = field(default_factory=dict)
    quality: Quality | None = None


def build(request: BuildRequest, progress: Progress = lambda stage, detail: None,
          cache: BuildCache | None = None) -> BuildResult:
    """Build the engine that the request describes; with a cache, from what it holds.

    Raises RequestError for what is asked wrongly (before any long work where possible), WorkFailed for what fails.
    Nothing is left behind by a build that fails, but for what it has put into the cache.
    """
    _require_groups_asked_of(request)
    if request.precision == AUTO:
        return build_auto(request, build, progress, cache)
    target, rounding = find_target(request.target), request.rounding
    if request.precision in {**PRECISIONS, **GPU_PRECISIONS}:
        target.require_precision(request.precision)
    precision = find_precision(request.precision, target.gpu)
    for name in (precision.name, *(request.layers or {}).values()):
        target.require_precision(name)
    precision = with_layers(precision, request.layers or {}, target.gpu)
    precision = with_groups(precision, request.group_size, request.group_minimums)
    if request.measures and request.strip_weights:
        raise RequestError("the quality of an engine without weights cannot be measured; leave one of the two out")
    if request.measures and target.gpu is not None:
        raise RequestError(f"the quality of an engine for {target.name} is not measured while it is built; build it "
                           "without, and compare it with its checkpoint: ingot compare")
    _require_ranks(request, target)
    kv = _kv_precision(request, target, precision)
    tuning = _tuning(request, target)
    clock = Clock(progress)
    source = _source(request)
    with clock.stage("config", source.place):
        facts = source.facts(cache)
    limits = _limits(request, target, source.name, facts)
    place = f"{target.name.replace(':', '-')}{ranks_suffix(request.tensor_parallel)}"
    output = request.output or Path(f"{source.name}.{place}.{precision.name}.engine")
    _require_room(output, request)

    shown = ", ".join(f"{name} {value}" for name, value in limits.items())
    progress("recipe", f"{source.place} -> {output}: target {target.name}, precision {precision.name}, "
                       f"KV cache {kv}, {shown}")
    with clock.stage("import", f"{source.name}: {facts.architecture}"):
        imported, found = source.graph(facts, limits["max_seq_len"], cache)
    warnings = (*found, *facts.warnings)
    with clock.stage("passes", f"{len(imported.nodes)} operations"):
        stored: dict[str, str] = {}
        equal: dict[str, str] = {}
        if isinstance(source, CheckpointSource):
            if not request.asks_groups:
                stored = (stored_schemes if target.gpu is None else stored_groups)(source.checkpoint)
            equal = equal_tensors(source.checkpoint)
        passes = cpu_pipeline(precision, kv, stored) if target.gpu is None else gpu_pipeline(
            precision, kv, stored, request.tensor_parallel)
        shared = with_equal_tensors_shared(imported, equal)
        graph = run_passes(shared, passes, request.dump, lambda name: progress("passes", name))
    with clock.stage("plan", f"{len(graph.nodes)} operations after fusion"):
        program = _program(graph, target, precision, limits, tuning,
                           lambda symbol: progress("plan", f"compiling {symbol}"), cache)
    warnings = (*warnings, *program.warnings())
    manifest = _manifest(request, source, facts, imported, target, precision, kv, limits, program)
    if isinstance(source, CheckpointSource):
        warnings = (*warnings, *_quantization(source.checkpoint, program, target, manifest))
    if isinstance(source, ConfigSource) or request.dry_run:
        return BuildResult(None, "", manifest, clock.seconds, warnings, _reused(cache))
    assert isinstance(source, CheckpointSource)
    if request.measures:
        require_measurable(manifest["target"]["machine"], manifest["target"]["features"], source.checkpoint,
                           facts.tokenizer)
    if request.self_test:
        require_recordable(target.kind, manifest["target"]["machine"], manifest["target"]["features"],
                           request.strip_weights)
    with clock.stage("compile", f"{len(program.kernels)} kernels for {target.isa}"):
        code = program.members(request.compiler, cache)
    size = sum(map(len, code.values())) + (0 if request.strip_weights else manifest["memory"]["weights_bytes"])
    quality = None
    store = None if request.store is None else Store(request.store)
    with EngineWriter(output, request.force, size, request.strip_weights, store) as writer:
        written = write_weights(writer, program.weights, source.checkpoint, facts.tokenizer, rounding, clock,
                                cache)
        manifest["model"]["checkpoint_sha256"] = written.checkpoint_sha256
        manifest["num_calibrated_weights"] = written.num_calibrated
        manifest["calibration"] = written.calibration
        with clock.stage("write", str(output)):
            writer.add("plan.json", canonical_json(program.plan(written.weights).to_json()))
            for name, data in code.items():
                writer.add(name, data)
            writer.add(REFIT_MEMBER, refit_record(source.checkpoint, facts, program.weights))
            for name, data in facts.tokenizer.items():
                writer.add(f"tokenizer/{name}", data)
            _add_debug(writer, request, graph)
        if request.self_test:
            with clock.stage("self-test", str(output)):
                record_self_test(writer, manifest)
        if request.measures:
            with clock.stage("quality", "against the checkpoint in float32"), writer.preview(manifest) as engine:
                quality = quality_of(engine, str(source.checkpoint.path), lambda done, total: progress(
                    "quality", f"{done} of {total} tokens"))
            quality.require(request.gate, str(output))
            manifest["quality"] = quality.to_json()
        with clock.stage("finish", str(output)):
            engine_hash = writer.finish(manifest)
    if cache is not None:
        cache.trim()
    return BuildResult(output, engine_hash, manifest, clock.seconds, (*warnings, *written.warnings), _reused(cache),
                       quality)


def import_into(request: BuildRequest, cache: BuildCache) -> None:
    """Only what all builds of this model have in common: its configuration and its graph, for the cache."""
    source = _source(request)
    facts = source.facts(cache)
    limits = _limits(request, find_target(request.target), source.name, facts)
    source.graph(facts, limits["max_seq_len"], cache)


def _source(request: BuildRequest) -> ModelSource:
    if request.config is not None and request.dry_run:
        return ConfigSource(request.config, request.name or Path(request.model).name)
    return open_checkpoint_source(request.model, request.name)


def _reused(cache: BuildCache | None) -> dict[str, tuple[int, int]]:
    return {} if cache is None else {kind: (uses.found, uses.found + uses.made) for kind, uses in cache.uses.items()}


def ranks_suffix(num_ranks: int) -> str:
    """Of a target in the name of an engine's file."""
    return f"-tp{num_ranks}" if num_ranks > 1 else ""


def _require_groups_asked_of(request: BuildRequest) -> None:
    """Raises RequestError where groups are asked for that nobody can choose."""
    if not request.asks_groups:
        return
    if request.precision == AUTO:
        raise RequestError("group_size and group_minimums say what precision auto finds for each layer; leave them out")
    target = find_target(request.target)
    if target.gpu is None:
        raise RequestError(f"group_size and group_minimums are for GPUs; four bits have groups of 32 channels with a "
                           f"minimum each on {target.name}")


def _require_ranks(request: BuildRequest, target: Target) -> None:
    ranks = request.tensor_parallel
    if ranks not in RANKS:
        raise RequestError(f"tensor_parallel is {ranks}; expected {', '.join(map(str, RANKS))}")
    if ranks > 1 and target.gpu is None:
        raise RequestError(f"tensor_parallel is {ranks}: only engines for GPUs are divided; {target.name} runs all of "
                           "a model on its cores")


def _tuning(request: BuildRequest, target: Target) -> Records | None:
    """Raises RequestError for records of another target or of other kernels, and for a file that holds none."""
    given = request.tuning_records
    if given is None:
        return None
    where = str(given) if isinstance(given, Path) else "tuning_records"
    if target.gpu is not None:
        raise RequestError(f"{where}: kernels for {target.name} are chosen by a model; records are for CPU targets")
    records = Records.read(given) if isinstance(given, Path) else Records.of(given, where)
    records.require(target.name, where)
    return records


def _program(graph: Graph, target: Target, precision: Precision, limits: dict[str, int], tuning: Records | None,
             compiling: Callable[[str], None], cache: BuildCache | None) -> Program:
    """Launches and kernels. Those of a GPU are compiled here: which ones are chosen depends on what comes out."""
    if target.gpu is None:
        return generate_for_cpu(graph, target.isa, limits, BLOCK_SIZE, tuning)
    if cache is not None:
        compiled: list[str] = []

        def told(symbol: str) -> None:
            compiled.append(symbol)
            compiling(symbol)

        program = generate_for_gpu(graph, target.gpu, precision.floats, limits, BLOCK_SIZE, told,
                                   cache.folder / "kernels")
        cache.uses["kernels"] = Uses(max(0, len(program.kernels) - len(compiled)), len(compiled))
        return program
    with tempfile.TemporaryDirectory(prefix="ingot-kernels-") as folder:
        return generate_for_gpu(graph, target.gpu, precision.floats, limits, BLOCK_SIZE, compiling, Path(folder))


def _kv_precision(request: BuildRequest, target: Target, precision: Precision) -> str:
    kv = request.kv_precision or precision.kv
    if kv not in target.kv_precisions:
        raise RequestError(f"{target.name} has no KV cache in {kv!r}; it has: {', '.join(target.kv_precisions)}")
    if target.gpu is not None and kv not in (precision.floats, "fp8", "int8"):
        raise RequestError(f"an engine in {precision.name} for {target.name} computes in {precision.floats}; its KV "
                           f"cache may be {precision.floats}, fp8 or int8, not {kv}")
    return kv


def _limits(request: BuildRequest, target: Target, model: str, facts: ModelFacts) -> dict[str, int]:
    longest = facts.max_positions or DEFAULT_MAX_SEQ_LEN
    batch, tokens = _default_step(target)
    asked = {"max_batch_size": request.max_batch_size, "max_num_tokens": request.max_num_tokens,
             "max_seq_len": request.max_seq_len}
    defaults = {"max_batch_size": batch, "max_num_tokens": tokens, "max_seq_len": longest}
    limits = {name: defaults[name] if value is None else value for name, value in asked.items()}
    for name, value in limits.items():
        if value < 1:
            raise RequestError(f"{name} must be at least 1, got {value}")
    if limits["max_seq_len"] > longest:
        raise RequestError(f"max_seq_len {limits['max_seq_len']} is beyond the {longest} positions of {model}")
    if limits["max_num_tokens"] < limits["max_batch_size"]:
        raise RequestError(f"max_num_tokens {limits['max_num_tokens']} is below max_batch_size "
                           f"{limits['max_batch_size']}: a step holds at least one token of every sequence")
    return limits


def _require_room(output: Path, request: BuildRequest) -> None:
    """Raises RequestError if engine or dump could not be written in the end."""
    if not request.dry_run:
        check_output(output, request.force)
    if request.dump is not None:
        try:
            request.dump.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"--dump {request.dump}: no such folder can be made: {error.strerror}") from None


def _default_step(target: Target) -> tuple[int, int]:
    """Sequences and tokens of a step, where the user does not say."""
    if target.gpu is None:
        return 16, 512
    return (128, 8192) if target.gpu.memory_gib >= _LARGE_GPU_GIB else (32, 2048)


def _manifest(request: BuildRequest, source: ModelSource, facts: ModelFacts, imported: Graph, target: Target,
              precision: Precision, kv: str, limits: dict[str, int], program: Program) -> dict[str, Any]:
    """What is known before the weights are read. recipe: the fields of a BuildRequest that give this engine again."""
    return {
        "ingot_version": ingot_version(),
        "model": {"name": source.name, "architecture": facts.architecture, "config_sha256": facts.config_sha256,
                  "vocab_size": program.vocab_size, **model_shape(imported)},
        "target": {"name": target.name, "kind": target.kind, "isa": target.isa,
                   **program.target_facts()},
        "precision": "mixed" if request.layers else precision.name,
        "kv_precision": kv,
        **({"tensor_parallel": request.tensor_parallel} if request.tensor_parallel > 1 else {}),
        "limits": limits,
        "kernels": program.kernel_table(),
        "memory": program.memory(),
        "toolchain": toolchain_versions(request.compiler, target.kind),
        "graph_sha256": hashlib.sha256(dump(imported).encode()).hexdigest(),
        "recipe": {"name": source.name, "target": target.name, "precision": precision.name, "kv_precision": kv,
                   **limits, **({"layers": dict(request.layers)} if request.layers else {}),
                   **{name: value for name in ("group_size", "group_minimums")
                      if (value := getattr(request, name)) is not None},
                   "compiler": request.compiler, "calibrate": request.calibrate,
                   **({"tensor_parallel": request.tensor_parallel} if request.tensor_parallel > 1 else {}),
                   "quantization_method": request.quantization_method,
                   "calibration": request.calibration.name if request.calibration else None,
                   "dump": request.dump is not None, "measure_quality": request.measures,
                   **({"self_test": True} if request.self_test else {}),
                   **({"tuning_records": program.tuning.to_json()}
                      if isinstance(program, CpuProgram) and program.tuning is not None else {})},
    } | program.facts()


def _quantization(checkpoint: Checkpoint, program: Program, target: Target, manifest: dict[str, Any]) -> list[str]:
    """Adds to the manifest how the checkpoint is quantized, if it is; what the user should know of it."""
    quantized = stored_weights(checkpoint)
    if quantized is None:
        return []
    manifest["model"]["quantization"], lines = quantization_report(quantized, program.weights, target.name,
                                                                   target.gpu is not None)
    return lines


def _add_debug(writer: EngineWriter, request: BuildRequest, graph: Graph) -> None:
    """The graph as it was lowered always; those after each pass when the user dumps them too."""
    writer.add("debug/graph.txt", dump(graph).encode())
    if request.dump is not None:
        for path in sorted(request.dump.glob("[0-9][0-9]_*.txt")):
            writer.add(f"debug/passes/{path.name}", path.read_bytes())
