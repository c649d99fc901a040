"""ingot build: one checkpoint, one target, one precision -> one engine file."""
from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.runtime.errors import RequestError
from ingot.runtime.manifest import canonical_json

from .cache.build_cache import BuildCache
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.quantized import quantization_report, read_quantized
from .clock import Clock, Progress
from .cpu.generate import CpuProgram, generate
from .engine_writer import EngineWriter
from .ir.dump import dump
from .ir.graph import Graph
from .model_facts import ModelFacts
from .model_source import CheckpointSource, ConfigSource, ModelSource, open_checkpoint_source
from .passes.pipeline import cpu_pipeline, run_passes
from .precision import Precision, find_precision
from .quality_gate import Gate, Quality, quality_of, require_measurable
from .refit_record import REFIT_MEMBER, refit_record
from .targets import Target, find_target
from .version import ingot_version, toolchain_versions
from .write_weights import write_weights

DEFAULT_MAX_BATCH_SIZE = 16
DEFAULT_MAX_NUM_TOKENS = 512
DEFAULT_MAX_SEQ_LEN = 4096
BLOCK_SIZE = 16
"""Tokens of a KV block."""
CODE_MEMBER = "code/model.so"


@dataclass(frozen=True)
class BuildRequest:
    """What the user asks for; None where the default decides.

    model            checkpoint folder, hub name, or GGUF file
    name             what the engine calls its model; default: the folder's name, or the hub name's last part
    config           for a dry run without the checkpoint: what its config.json holds
    max_batch_size   sequences in a step, and rows of logits
    max_num_tokens   tokens in a step
    max_seq_len      tokens of a sequence, prompt and answer together; default: what the model was made for
    calibrate        run the model on a short text, so that weights of 4 bits are rounded for the inputs they meet
    strip_weights    leave the weights out of the file; the engine's hash is what it is with them
    measure_quality  run the engine over a held-out text and record how far it is from the model; needs a machine that
                     can run it
    max_perplexity_increase, min_top1_agreement  measure, and fail if the engine is worse; see Gate
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
    strip_weights: bool = False
    measure_quality: bool = False
    max_perplexity_increase: float | None = None
    min_top1_agreement: float | None = None

    @property
    def gate(self) -> Gate:
        """Raises RequestError for figures that mean nothing."""
        return Gate(self.max_perplexity_increase, self.min_top1_agreement)

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
    target = find_target(request.target)
    target.require_engines(request.precision)
    precision = find_precision(request.precision)
    target.require_precision(precision.name)
    if request.measures and request.strip_weights:
        raise RequestError("the quality of an engine without weights cannot be measured; leave one of the two out")
    kv = _kv_precision(request, target, precision.kv)
    clock = Clock(progress)
    source = _source(request)
    with clock.stage("config", source.place):
        facts = source.facts(cache)
    limits = _limits(request, source.name, facts)
    output = request.output or Path(f"{source.name}.{target.name.replace(':', '-')}.{precision.name}.engine")
    if output.exists() and not request.force and not request.dry_run:
        raise RequestError(f"{output} exists.\n  Replace it with --force, or name another with -o.")

    shown = ", ".join(f"{name} {value}" for name, value in limits.items())
    progress("recipe", f"{source.place} -> {output}: target {target.name}, precision {precision.name}, "
                       f"KV cache {kv}, {shown}")
    with clock.stage("import", f"{source.name}: {facts.architecture}"):
        imported, found = source.graph(facts, limits["max_seq_len"], cache)
    warnings = (*found, *facts.warnings)
    with clock.stage("passes", f"{len(imported.nodes)} operations"):
        graph = run_passes(imported, cpu_pipeline(precision, kv), request.dump, lambda name: progress("passes", name))
    with clock.stage("plan", f"{len(graph.nodes)} operations after fusion"):
        program = generate(graph, target.isa, limits, BLOCK_SIZE)
    manifest = _manifest(request, source, facts, imported, target, precision, kv, limits, program)
    if isinstance(source, CheckpointSource):
        warnings = (*warnings, *_quantization(source.checkpoint, program, target, manifest))
    if isinstance(source, ConfigSource) or request.dry_run:
        return BuildResult(None, "", manifest, clock.seconds, warnings, _reused(cache))
    assert isinstance(source, CheckpointSource)
    if request.measures:
        require_measurable(program.machine, program.features, source.checkpoint, facts.tokenizer)
    with clock.stage("compile", f"{len(program.kernels)} kernels for {target.isa}"):
        code = program.compile(request.compiler, cache)
    size = len(code) + (0 if request.strip_weights else manifest["memory"]["weights_bytes"])
    quality = None
    with EngineWriter(output, request.force, size, request.strip_weights) as writer:
        written = write_weights(writer, program.weights, source.checkpoint, facts.tokenizer, request.calibrate, clock,
                                cache)
        manifest["model"]["checkpoint_sha256"] = written.checkpoint_sha256
        manifest["num_calibrated_weights"] = written.num_calibrated
        manifest["calibration"] = written.calibration
        with clock.stage("write", str(output)):
            writer.add("plan.json", canonical_json(program.plan(written.weights).to_json()))
            writer.add(CODE_MEMBER, code)
            writer.add(REFIT_MEMBER, refit_record(source.checkpoint, facts, program.weights))
            for name, data in facts.tokenizer.items():
                writer.add(f"tokenizer/{name}", data)
            _add_debug(writer, request, graph)
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
    source.graph(facts, _limits(request, source.name, facts)["max_seq_len"], cache)


def _source(request: BuildRequest) -> ModelSource:
    if request.config is not None and request.dry_run:
        return ConfigSource(request.config, request.name or Path(request.model).name)
    return open_checkpoint_source(request.model, request.name)


def _reused(cache: BuildCache | None) -> dict[str, tuple[int, int]]:
    return {} if cache is None else {kind: (uses.found, uses.found + uses.made) for kind, uses in cache.uses.items()}


def _kv_precision(request: BuildRequest, target: Target, default: str) -> str:
    kv = request.kv_precision or default
    if kv not in target.kv_precisions:
        raise RequestError(f"{target.name} has no KV cache in {kv!r}; it has: {', '.join(target.kv_precisions)}")
    return kv


def _limits(request: BuildRequest, model: str, facts: ModelFacts) -> dict[str, int]:
    longest = facts.max_positions or DEFAULT_MAX_SEQ_LEN
    asked = {"max_batch_size": request.max_batch_size, "max_num_tokens": request.max_num_tokens,
             "max_seq_len": request.max_seq_len}
    defaults = {"max_batch_size": DEFAULT_MAX_BATCH_SIZE, "max_num_tokens": DEFAULT_MAX_NUM_TOKENS,
                "max_seq_len": longest}
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


def _manifest(request: BuildRequest, source: ModelSource, facts: ModelFacts, imported: Graph, target: Target,
              precision: Precision, kv: str, limits: dict[str, int], program: CpuProgram) -> dict[str, Any]:
    """What is known before the weights are read. recipe: the fields of a BuildRequest that give this engine again."""
    return {
        "ingot_version": ingot_version(),
        "model": {"name": source.name, "architecture": facts.architecture, "config_sha256": facts.config_sha256,
                  "vocab_size": program.vocab_size},
        "target": {"name": target.name, "kind": target.kind, "isa": target.isa, "machine": program.machine,
                   "features": list(program.features)},
        "precision": precision.name,
        "kv_precision": kv,
        "limits": limits,
        "kernels": program.kernel_table(),
        "memory": program.memory(),
        "toolchain": toolchain_versions(request.compiler),
        "graph_sha256": hashlib.sha256(dump(imported).encode()).hexdigest(),
        "recipe": {"name": source.name, "target": target.name, "precision": precision.name, "kv_precision": kv,
                   **limits, "compiler": request.compiler, "calibrate": request.calibrate,
                   "dump": request.dump is not None, "measure_quality": request.measures},
    }


def _quantization(checkpoint: Checkpoint, program: CpuProgram, target: Target, manifest: dict[str, Any]) -> list[str]:
    """Adds to the manifest how the checkpoint is quantized, if it is; what the user should know of it."""
    quantized = read_quantized(checkpoint)
    if quantized is None:
        return []
    packed = [(weight.expr, weight.packing.scheme) for weight in program.weights]
    manifest["model"]["quantization"], lines = quantization_report(quantized, packed, target.name)
    return lines


def _add_debug(writer: EngineWriter, request: BuildRequest, graph: Graph) -> None:
    """The graph as it was lowered always; those after each pass when the user dumps them too."""
    writer.add("debug/graph.txt", dump(graph).encode())
    if request.dump is not None:
        for path in sorted(request.dump.glob("[0-9][0-9]_*.txt")):
            writer.add(f"debug/passes/{path.name}", path.read_bytes())
