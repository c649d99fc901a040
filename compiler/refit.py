"""ingot refit: the weights of another checkpoint of the same architecture in an engine, without compiling.

What comes out is, byte for byte, the engine that a build of that checkpoint by the same recipe would write, and so it
has the same hash: code and plan depend on the configuration and the layout of the tensors alone, weights on recipes
that the engine carries (refit.json). Neither torch nor a C compiler takes part, unless weights are calibrated or the
files of the tokenizer differ.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import PLAN
from ingot.runtime.errors import RequestError
from ingot.runtime.manifest import canonical_json

from .cache.build_cache import BuildCache
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.quantized import equal_tensors
from .clock import Clock, Progress
from .engine_writer import EngineWriter
from .model_facts import ModelFacts, model_facts
from .model_source import open_checkpoint_source
from .refit_record import (
    REFIT_MEMBER,
    RefitRecord,
    layout,
    packing_digest,
    parse_refit_record,
    refit_record,
    sides_digest,
)
from .version import ingot_version
from .write_weights import Rounding, write_weights

if TYPE_CHECKING:
    from ingot.runtime.store.store import Store


class CannotRefit(RequestError):
    """The checkpoint is of another architecture than the engine, or the engine of another Ingot; names the first
    difference."""


@dataclass(frozen=True)
class RefitRequest:
    """weights  checkpoint folder, hub name, or GGUF file
    name     what the engine will call its model; default: as in BuildRequest
    calibration  the text that the engine was calibrated with, if it was the user's own
    calibrate  False: round to nearest whatever the engine's build did, so that the model is not run
    store, self_test  as in BuildRequest; an engine's self-test is of its old weights, and not carried over
    """

    engine: Path
    weights: str
    output: Path
    name: str | None = None
    force: bool = False
    strip_weights: bool = False
    calibration: Path | None = None
    calibrate: bool = True
    store: Path | None = None
    self_test: bool = False


@dataclass(frozen=True)
class RefitResult:
    path: Path
    hash: str
    manifest: dict[str, Any]
    seconds: dict[str, float]
    warnings: tuple[str, ...]


def refit(request: RefitRequest, progress: Progress = lambda stage, detail: None,
          cache: BuildCache | None = None) -> RefitResult:
    """Write the engine with the checkpoint's weights.

    Raises CannotRefit, RequestError, WorkFailed; nothing is left behind then.
    """
    clock = Clock(progress)
    source = open_checkpoint_source(request.weights, request.name)
    checkpoint = source.checkpoint
    with EngineFile.open(request.engine) as engine:
        with clock.stage("check", f"{checkpoint.path} against {request.engine}"):
            record = _record(engine)
            _require_same_layout(engine, record, checkpoint)
            facts = _facts(engine, record, checkpoint, cache)
            _require_same(engine, "config.json", record.config, facts.config)
        # What was measured on the old weights says nothing of the new ones.
        manifest = {name: value for name, value in engine.manifest.items()
                    if name not in ("format_version", "members", "quality")}
        manifest["model"] = manifest["model"] | {"name": source.name}
        recipe = {name: value for name, value in manifest["recipe"].items() if name != "self_test"}
        manifest["recipe"] = recipe | {"name": source.name, "measure_quality": False}
        if not request.calibrate:
            manifest["recipe"] |= {"calibrate": False, "calibration": None}
        if request.self_test:
            from .self_test import record_self_test, require_recordable

            require_recordable(manifest["target"]["kind"], manifest["target"]["machine"],
                               manifest["target"]["features"], request.strip_weights)
            manifest["recipe"]["self_test"] = True
        size = 0 if request.strip_weights else manifest["memory"]["weights_bytes"]
        store = None if request.store is None else _store(request.store)
        with EngineWriter(request.output, request.force, size, request.strip_weights, store) as writer:
            written = write_weights(writer, record.weights, checkpoint, facts.tokenizer,
                                    _rounding(manifest, request), clock, cache)
            manifest["model"]["checkpoint_sha256"] = written.checkpoint_sha256
            manifest["num_calibrated_weights"] = written.num_calibrated
            manifest["calibration"] = written.calibration
            with clock.stage("write", str(request.output)):
                plan = engine.plan | {"weights": {name: weight.to_json() for name, weight in written.weights.items()}}
                writer.add(PLAN, canonical_json(plan))
                writer.add(REFIT_MEMBER, refit_record(checkpoint, facts, record.weights))
                for name, data in facts.tokenizer.items():
                    writer.add(f"tokenizer/{name}", data)
                for name in engine.members:
                    if name.startswith(("code/", "debug/")):
                        writer.add(name, engine.read(name))
            if request.self_test:
                with clock.stage("self-test", str(request.output)):
                    record_self_test(writer, manifest)
            with clock.stage("finish", str(request.output)):
                engine_hash = writer.finish(manifest)
    if cache is not None:
        cache.trim()
    return RefitResult(request.output, engine_hash, manifest, clock.seconds, (*facts.warnings, *written.warnings))


def _store(folder: Path) -> Store:
    from ingot.runtime.store.store import Store

    return Store(folder)


def _rounding(manifest: Mapping[str, Any], request: RefitRequest) -> Rounding:
    """As the engine was built. Raises CannotRefit where that took a text of the user's own which is not given."""
    recipe = manifest["recipe"]
    if not recipe["calibrate"]:
        return Rounding("rtn")
    if recipe["calibration"] is not None and request.calibration is None:
        raise CannotRefit(f"the engine's weights were rounded with the text {recipe['calibration']}; give it with "
                          "--calibration, or build the engine again")
    return Rounding(recipe["quantization_method"], request.calibration)


def _record(engine: EngineFile) -> RefitRecord:
    if REFIT_MEMBER not in engine.members:
        raise CannotRefit(f"{engine.path} has no {REFIT_MEMBER}, which tells how its weights are made; build it again")
    # The plan names weights in any order (its JSON is sorted); their names are numbered in the order of writing.
    order = sorted(engine.plan["weights"], key=lambda name: int(name[1:]))
    record = parse_refit_record(engine.read(REFIT_MEMBER), order, engine.path)
    if record.packing_sha256 != packing_digest():
        raise CannotRefit(f"{engine.path} was built by Ingot {engine.manifest['ingot_version']}, whose layout of "
                          "packed weights may differ from this one's: the sources that pack them are others than "
                          f"here (Ingot {ingot_version()}).\n  Refit it with what built it, or build it again.")
    return record


def _require_same_layout(engine: EngineFile, record: RefitRecord, checkpoint: Checkpoint) -> None:
    expected, got = record.tensors, layout(checkpoint)
    for name in sorted(expected.keys() | got.keys()):
        if expected.get(name) != got.get(name):
            raise CannotRefit(f"{checkpoint.path} is of another architecture than {engine.path}; the first tensor that "
                              f"differs is {name}:\n  expected {_shown(expected.get(name))}, got "
                              f"{_shown(got.get(name))}")
    equal = equal_tensors(checkpoint)
    for name in sorted(record.equal.keys() | equal.keys()):
        if record.equal.get(name) != equal.get(name):
            raise CannotRefit(f"{engine.path} computes layers together whose scales are equal; in {checkpoint.path} "
                              f"they are others. The first is {name}:\n  equal to {record.equal.get(name, 'none')} "
                              f"there, to {equal.get(name, 'none')} here.\n  Build an engine of this checkpoint")


def _shown(entry: list[Any] | None) -> str:
    return "no such tensor" if entry is None else f"{entry[0]}{entry[1]}"


def _facts(engine: EngineFile, record: RefitRecord, checkpoint: Checkpoint, cache: BuildCache | None) -> ModelFacts:
    """Those of the engine, if the checkpoint's files say the same; else through transformers."""
    if not record.sides_sha256 or record.sides_sha256 != sides_digest(checkpoint):
        return model_facts(checkpoint, cache)
    model = engine.manifest["model"]
    tokenizer = {name.removeprefix("tokenizer/"): engine.read(name) for name in engine.members
                 if name.startswith("tokenizer/")}
    return ModelFacts(record.config, model["config_sha256"], model["architecture"], None, tokenizer, ())


def _require_same(engine: EngineFile, place: str, expected: Any, got: Any) -> None:
    """Raises CannotRefit with the first entry that differs, however deep."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        for name in sorted(expected.keys() | got.keys()):
            _require_same(engine, f"{place}: {name}", expected.get(name), got.get(name))
    elif expected != got:
        raise CannotRefit(f"the checkpoint's configuration is not that of {engine.path}: {place}: expected "
                          f"{json.dumps(expected)}, got {json.dumps(got)}")
