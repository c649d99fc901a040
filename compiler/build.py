"""ingot build: one checkpoint, one target, one precision -> one engine file."""
from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.runtime.errors import RequestError
from ingot.runtime.manifest import canonical_json
from ingot.runtime.store.store import Store

from .auto.auto import build_auto
from .build_manifest import add_quantization, manifest_of
from .build_request import BuildRequest, Settings, limits_of, ranks_suffix, require_groups_asked_of, settings_of
from .cache.build_cache import BuildCache, Uses
from .checkpoint.quantized import equal_tensors, stored_groups, stored_schemes, with_equal_tensors_shared
from .clock import Clock, Progress
from .cpu.generate import CpuProgram
from .cpu.generate import generate as generate_for_cpu
from .cpu.isa import ISAS
from .engine_writer import EngineWriter, check_output
from .gpu.generate import GpuProgram
from .gpu.generate import generate as generate_for_gpu
from .ir.dump import dump
from .ir.graph import Graph
from .model_facts import ModelFacts
from .model_source import CheckpointSource, ConfigSource, ModelSource, open_checkpoint_source
from .passes.pipeline import cpu_pipeline, gpu_pipeline, run_passes
from .precision import AUTO
from .quality_gate import Quality, quality_of, require_measurable
from .refit_record import REFIT_MEMBER, refit_record
from .self_test import record_self_test, require_recordable
from .targets import find_target
from .write_weights import write_weights

__all__ = ["BuildRequest", "BuildResult", "build", "import_into"]

BLOCK_SIZE = 16
"""Tokens of a KV block."""

Program = CpuProgram | GpuProgram


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


@dataclass
class _Planned:
    """All of an engine but its weights: from the request to what its manifest says of it."""

    source: ModelSource
    facts: ModelFacts
    output: Path
    graph: Graph
    program: Program
    manifest: dict[str, Any]
    warnings: tuple[str, ...]


def build(request: BuildRequest, progress: Progress = lambda stage, detail: None,
          cache: BuildCache | None = None) -> BuildResult:
    """Build the engine that the request describes; with a cache, from what it holds.

    Raises RequestError for what is asked wrongly (before any long work where possible), WorkFailed for what fails.
    Nothing is left behind by a build that fails, but for what it has put into the cache.
    """
    require_groups_asked_of(request)
    if request.precision == AUTO:
        return build_auto(request, build, progress, cache)
    settings, clock = settings_of(request), Clock(progress)
    planned = _plan(request, settings, clock, cache)
    if isinstance(planned.source, ConfigSource) or request.dry_run:
        return BuildResult(None, "", planned.manifest, clock.seconds, planned.warnings, _reused(cache))
    _require_runnable(request, settings, planned)
    with clock.stage("compile", f"{len(planned.program.kernels)} kernels for {settings.target.isa}"):
        code = planned.program.members(request.compiler, cache)
    result = _write(request, settings, planned, code, clock, cache)
    if cache is not None:
        cache.trim()
    return result


def _plan(request: BuildRequest, settings: Settings, clock: Clock, cache: BuildCache | None) -> _Planned:
    target, progress = settings.target, clock.progress
    source = _source(request)
    with clock.stage("config", source.place):
        facts = source.facts(cache)
    limits = limits_of(request, target, source.name, facts)
    place = f"{target.name.replace(':', '-')}{ranks_suffix(request.tensor_parallel)}"
    output = request.output or Path(f"{source.name}.{place}.{settings.precision.name}.engine")
    _require_room(output, request)
    shown = ", ".join(f"{name} {value}" for name, value in limits.items())
    progress("recipe", f"{source.place} -> {output}: target {target.name}, precision {settings.precision.name}, "
                       f"KV cache {settings.kv}, {shown}")
    with clock.stage("import", f"{source.name}: {facts.architecture}"):
        imported, found = source.graph(facts, limits["max_seq_len"], cache)
    with clock.stage("passes", f"{len(imported.nodes)} operations"):
        graph = _lowered(request, settings, source, imported, progress)
    with clock.stage("plan", f"{len(graph.nodes)} operations after fusion"):
        program = _program(graph, settings, limits, lambda symbol: progress("plan", f"compiling {symbol}"), cache)
    manifest = manifest_of(request, settings, source, facts, imported, limits, program)
    warnings = [*found, *facts.warnings, *program.warnings()]
    if isinstance(source, CheckpointSource):
        warnings += add_quantization(source.checkpoint, program, target, manifest)
    return _Planned(source, facts, output, graph, program, manifest, tuple(warnings))


def _lowered(request: BuildRequest, settings: Settings, source: ModelSource, imported: Graph, progress: Progress,
             ) -> Graph:
    """The graph after all passes: with the precision of each matrix, fused."""
    on_gpu, precision = settings.target.gpu is not None, settings.precision
    stored: dict[str, str] = {}
    equal: dict[str, str] = {}
    if isinstance(source, CheckpointSource):
        if not request.asks_groups:
            stored = (stored_groups if on_gpu else stored_schemes)(source.checkpoint)
        equal = equal_tensors(source.checkpoint)
    passes = gpu_pipeline(precision, settings.kv, stored, request.tensor_parallel, settings.lora) if on_gpu else \
        cpu_pipeline(precision, settings.kv, stored, settings.lora, ISAS[settings.target.isa].multiplies_pairs)
    shared = with_equal_tensors_shared(imported, equal)
    return run_passes(shared, passes, request.dump, lambda name: progress("passes", name))


def _require_runnable(request: BuildRequest, settings: Settings, planned: _Planned) -> None:
    """Raises RequestError if the engine is to be run by the build, and cannot be here."""
    target = planned.manifest["target"]
    if request.measures:
        assert isinstance(planned.source, CheckpointSource)
        require_measurable(target["machine"], target["features"], planned.source.checkpoint, planned.facts.tokenizer)
    if request.self_test:
        require_recordable(settings.target.kind, target["machine"], target["features"], request.strip_weights)


def _write(request: BuildRequest, settings: Settings, planned: _Planned, code: Mapping[str, bytes], clock: Clock,
           cache: BuildCache | None) -> BuildResult:
    """The file: weights, plan, code; then what the engine answers, where that is asked for."""
    assert isinstance(planned.source, CheckpointSource)
    checkpoint, manifest, output = planned.source.checkpoint, planned.manifest, planned.output
    size = sum(map(len, code.values())) + (0 if request.strip_weights else manifest["memory"]["weights_bytes"])
    quality = None
    store = None if request.store is None else Store(request.store)
    with EngineWriter(output, request.force, size, request.strip_weights, store) as writer:
        written = write_weights(writer, planned.program.weights, checkpoint, planned.facts.tokenizer,
                                settings.rounding, clock, cache)
        manifest["model"]["checkpoint_sha256"] = written.checkpoint_sha256
        manifest["num_calibrated_weights"] = written.num_calibrated
        manifest["calibration"] = written.calibration
        with clock.stage("write", str(output)):
            writer.add("plan.json", canonical_json(planned.program.plan(written.weights).to_json()))
            for name, data in code.items():
                writer.add(name, data)
            writer.add(REFIT_MEMBER, refit_record(checkpoint, planned.facts, planned.program.weights))
            for name, data in planned.facts.tokenizer.items():
                writer.add(f"tokenizer/{name}", data)
            _add_debug(writer, request, planned.graph)
        if request.self_test:
            with clock.stage("self-test", str(output)):
                record_self_test(writer, manifest)
        if request.measures:
            with clock.stage("quality", "against the checkpoint in float32"), writer.preview(manifest) as engine:
                quality = quality_of(engine, str(checkpoint.path), lambda done, total: clock.progress(
                    "quality", f"{done} of {total} tokens"))
            quality.require(request.gate, str(output))
            manifest["quality"] = quality.to_json()
        with clock.stage("finish", str(output)):
            engine_hash = writer.finish(manifest)
    return BuildResult(output, engine_hash, manifest, clock.seconds, (*planned.warnings, *written.warnings),
                       _reused(cache), quality)


def import_into(request: BuildRequest, cache: BuildCache) -> None:
    """Only what all builds of this model have in common: its configuration and its graph, for the cache."""
    source = _source(request)
    facts = source.facts(cache)
    limits = limits_of(request, find_target(request.target), source.name, facts)
    source.graph(facts, limits["max_seq_len"], cache)


def _source(request: BuildRequest) -> ModelSource:
    if request.config is not None and request.dry_run:
        return ConfigSource(request.config, request.name or Path(request.model).name)
    return open_checkpoint_source(request.model, request.name)


def _reused(cache: BuildCache | None) -> dict[str, tuple[int, int]]:
    return {} if cache is None else {kind: (uses.found, uses.found + uses.made) for kind, uses in cache.uses.items()}


def _program(graph: Graph, settings: Settings, limits: dict[str, int], compiling: Callable[[str], None],
             cache: BuildCache | None) -> Program:
    """Launches and kernels. Those of a GPU are compiled here: which ones are chosen depends on what comes out."""
    target, floats = settings.target, settings.precision.floats
    if target.gpu is None:
        return generate_for_cpu(graph, target.isa, limits, BLOCK_SIZE, settings.tuning)
    if cache is not None:
        compiled: list[str] = []

        def told(symbol: str) -> None:
            compiled.append(symbol)
            compiling(symbol)

        program = generate_for_gpu(graph, target.gpu, floats, limits, BLOCK_SIZE, told,
                                   cache.folder / "kernels")
        cache.uses["kernels"] = Uses(max(0, len(program.kernels) - len(compiled)), len(compiled))
        return program
    with tempfile.TemporaryDirectory(prefix="ingot-kernels-") as folder:
        return generate_for_gpu(graph, target.gpu, floats, limits, BLOCK_SIZE, compiling, Path(folder))


def _require_room(output: Path, request: BuildRequest) -> None:
    """Raises RequestError if engine or dump could not be written in the end."""
    if not request.dry_run:
        check_output(output, request.force)
    if request.dump is not None:
        try:
            request.dump.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"--dump {request.dump}: no such folder can be made: {error.strerror}") from None


def _add_debug(writer: EngineWriter, request: BuildRequest, graph: Graph) -> None:
    """The graph as it was lowered always; those after each pass when the user dumps them too."""
    writer.add("debug/graph.txt", dump(graph).encode())
    if request.dump is not None:
        for path in sorted(request.dump.glob("[0-9][0-9]_*.txt")):
            writer.add(f"debug/passes/{path.name}", path.read_bytes())
