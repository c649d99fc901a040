"""ingot build: one checkpoint, one target, one precision -> one engine file."""
from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ingot.runtime.errors import RequestError
from ingot.runtime.manifest import canonical_json, weight_name

from .calibration.calibrate import calibrate
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.open import open_checkpoint
from .cpu.generate import CpuProgram, generate
from .engine_writer import EngineWriter
from .importer.importer import ImportedModel, import_model
from .ir.dump import dump
from .ir.graph import Graph
from .passes.pipeline import cpu_pipeline, run_passes
from .plan.plan import Plan, Weight
from .precision import find_precision
from .targets import Target, find_target
from .tokenizer import tokenizer_members
from .version import ingot_version, toolchain_versions

Progress = Callable[[str, str], None]

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
    max_batch_size   sequences in a step, and rows of logits
    max_num_tokens   tokens in a step
    max_seq_len      tokens of a sequence, prompt and answer together; default: what the model was made for
    calibrate        run the model on a short text, so that weights of 4 bits are rounded for the inputs they meet
    """

    model: str
    target: str
    precision: str
    output: Path | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_precision: str | None = None
    dump: Path | None = None
    dry_run: bool = False
    force: bool = False
    compiler: str = "zig"
    calibrate: bool = True


@dataclass(frozen=True)
class BuildResult:
    """path is None after a dry run. seconds: stage -> time."""

    path: Path | None
    hash: str
    manifest: dict[str, Any]
    seconds: dict[str, float]
    warnings: tuple[str, ...] = ()


@dataclass
class _Clock:
    """Stages of the build: told to the user as they begin, timed as they end."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, detail: str) -> Iterator[None]:
        self.progress(name, detail)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def build(request: BuildRequest, progress: Progress = lambda stage, detail: None) -> BuildResult:
    """Build the engine that the request describes.

    Raises RequestError for what is asked wrongly (before any long work where possible), WorkFailed for what fails.
    Nothing is left behind by a build that fails.
    """
    target = find_target(request.target)
    target.require_engines(request.precision)
    precision = find_precision(request.precision)
    target.require_precision(precision.name)
    kv = _kv_precision(request, target, precision.kv)
    clock = _Clock(progress)
    checkpoint = open_checkpoint(request.model)
    limits = _limits(request, checkpoint)
    output = request.output or Path(f"{checkpoint.name}.{target.name.replace(':', '-')}.{precision.name}.engine")
    if output.exists() and not request.force and not request.dry_run:
        raise RequestError(f"{output} exists.\n  Replace it with --force, or name another with -o.")

    shown = ", ".join(f"{name} {value}" for name, value in limits.items())
    progress("recipe", f"{checkpoint.path} -> {output}: target {target.name}, precision {precision.name}, "
                       f"KV cache {kv}, {shown}")
    with clock.stage("import", f"{checkpoint.name}: {_architecture(checkpoint)}"):
        imported = import_model(checkpoint, limits["max_seq_len"])
        tokenizer, missing = tokenizer_members(checkpoint)
    warnings = (*imported.warnings, *missing)
    with clock.stage("passes", f"{len(imported.graph.nodes)} operations"):
        graph = run_passes(imported.graph, cpu_pipeline(precision, kv), request.dump,
                           lambda name: progress("passes", name))
    with clock.stage("plan", f"{len(graph.nodes)} operations after fusion"):
        program = generate(graph, target.isa, limits, BLOCK_SIZE)
    manifest = _manifest(request, checkpoint, imported, target, kv, limits, program)
    if request.dry_run:
        return BuildResult(None, "", manifest, clock.seconds, warnings)
    with clock.stage("compile", f"{len(program.kernels)} kernels for {target.isa}"):
        code = program.compile(request.compiler)
    moments: dict[str, np.ndarray] = {}
    if request.calibrate and any(weight.packing.scheme == "w4a8" for weight in program.weights):
        with clock.stage("calibrate", "rounding errors of the weights"):
            moments, missed = calibrate(checkpoint, program.weights, tokenizer,
                                        lambda detail: progress("calibrate", detail))
        warnings = (*warnings, *missed)
    size = manifest["memory"]["weights_bytes"]
    with clock.stage("weights", f"{len(program.weights)} tensors, {size / 1e6:.0f} MB"), \
            EngineWriter(output, request.force, size + len(code)) as writer:
        plan = _write_weights(writer, program, checkpoint, moments, progress)
        writer.add("plan.json", canonical_json(plan.to_json()))
        writer.add(CODE_MEMBER, code)
        for name, data in tokenizer.items():
            writer.add(f"tokenizer/{name}", data)
        _add_debug(writer, request, graph)
        engine_hash = writer.finish(manifest)
    return BuildResult(output, engine_hash, manifest, clock.seconds, warnings)


def _kv_precision(request: BuildRequest, target: Target, default: str) -> str:
    kv = request.kv_precision or default
    if kv not in target.kv_precisions:
        raise RequestError(f"{target.name} has no KV cache in {kv!r}; it has: {', '.join(target.kv_precisions)}")
    return kv


def _limits(request: BuildRequest, checkpoint: Checkpoint) -> dict[str, int]:
    longest = _max_positions(checkpoint)
    asked = {"max_batch_size": request.max_batch_size, "max_num_tokens": request.max_num_tokens,
             "max_seq_len": request.max_seq_len}
    defaults = {"max_batch_size": DEFAULT_MAX_BATCH_SIZE, "max_num_tokens": DEFAULT_MAX_NUM_TOKENS,
                "max_seq_len": longest}
    limits = {name: defaults[name] if value is None else value for name, value in asked.items()}
    for name, value in limits.items():
        if value < 1:
            raise RequestError(f"{name} must be at least 1, got {value}")
    if limits["max_seq_len"] > longest:
        raise RequestError(f"max_seq_len {limits['max_seq_len']} is beyond the {longest} positions of "
                           f"{checkpoint.name}")
    if limits["max_num_tokens"] < limits["max_batch_size"]:
        raise RequestError(f"max_num_tokens {limits['max_num_tokens']} is below max_batch_size "
                           f"{limits['max_batch_size']}: a step holds at least one token of every sequence")
    return limits


def _architecture(checkpoint: Checkpoint) -> str:
    return (checkpoint.config.architectures or [checkpoint.config.model_type])[0]


def _max_positions(checkpoint: Checkpoint) -> int:
    """The longest sequence that the model was made for, as its configuration says; some models name no limit."""
    config = checkpoint.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
    found = [value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0]
    return found[0] if found else DEFAULT_MAX_SEQ_LEN


def _write_weights(writer: EngineWriter, program: CpuProgram, checkpoint: Checkpoint,
                   moments: dict[str, np.ndarray], progress: Progress) -> Plan:
    from threadpoolctl import threadpool_limits

    written = {}
    # Sums of a matrix product that threads share come out differently by their number: the same bytes need one.
    with threadpool_limits(1, "blas"):
        for number, weight in enumerate(program.weights, 1):
            progress("weights", f"{number}/{len(program.weights)} {weight.label}")
            data = weight.make(checkpoint, moments.get(weight.name))
            member = writer.add_weight(data)
            blob = member.removeprefix("weights/").removesuffix(".bin")
            assert member == weight_name(blob)
            written[weight.name] = Weight(blob, data.nbytes, weight.label)
    return program.plan(written)


def _manifest(request: BuildRequest, checkpoint: Checkpoint, imported: ImportedModel, target: Target, kv: str,
              limits: dict[str, int], program: CpuProgram) -> dict[str, Any]:
    return {
        "ingot_version": ingot_version(),
        "model": {"name": checkpoint.name, "architecture": _architecture(checkpoint),
                  "config_sha256": checkpoint.config_digest, "vocab_size": program.vocab_size},
        "target": {"name": target.name, "kind": target.kind, "isa": target.isa, "machine": program.machine,
                   "features": list(program.features)},
        "precision": request.precision,
        "kv_precision": kv,
        "limits": limits,
        "kernels": program.kernel_table(),
        "memory": program.memory(),
        "toolchain": toolchain_versions(request.compiler),
        "graph_sha256": hashlib.sha256(dump(imported.graph).encode()).hexdigest(),
    }


def _add_debug(writer: EngineWriter, request: BuildRequest, graph: Graph) -> None:
    """The graph as it was lowered always; those after each pass when the user dumps them too."""
    writer.add("debug/graph.txt", dump(graph).encode())
    if request.dump is not None:
        for path in sorted(request.dump.glob("[0-9][0-9]_*.txt")):
            writer.add(f"debug/passes/{path.name}", path.read_bytes())
