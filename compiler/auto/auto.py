"""Builds in precision "auto": search, build what was found, and hold the engine against the budget too."""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.runtime.errors import RequestError

from ..cache.build_cache import BuildCache
from ..clock import Clock, Progress
from ..cpu.isa import host_isas
from ..engine_writer import check_output
from ..model_source import open_checkpoint_source
from ..precision import AUTO
from ..quality_gate import Gate
from ..targets import Target, find_target
from .find import Choice, Finder
from .layers import recipe_text
from .search import MARGIN

if TYPE_CHECKING:
    from ..build import BuildRequest, BuildResult

DEFAULT_INCREASE = 0.01
MAX_BUILDS = 3


def build_auto(request: BuildRequest, build: Callable[[BuildRequest, Progress, BuildCache | None], BuildResult],
               progress: Progress, cache: BuildCache | None) -> BuildResult:
    """The engine, and its recipe beside it: X.yaml for X.engine. build: of what has been found.

    Where this machine can run the engine it is measured; if it loses more than its simulation did, the search goes on
    with so much less of a budget. Raises what a build raises, WorkFailed if no choice keeps the budget, RequestError
    for what cannot be searched.
    """
    if request.dry_run or request.strip_weights:
        raise RequestError("precision auto is found by running the model and measuring the engine: neither a dry run "
                           "nor an engine without weights can be made in it. Build what it finds by its recipe")
    target = find_target(request.target)
    increase = DEFAULT_INCREASE if request.max_perplexity_increase is None else request.max_perplexity_increase
    source = open_checkpoint_source(request.model, request.name)
    name = target.name.rpartition("/")[2].replace(":", "-")
    output = request.output or Path(f"{source.name}.{name}.{AUTO}.engine")
    recipe = output.with_suffix(".yaml")
    for path in (output, recipe):
        check_output(path, request.force)
    clock = Clock(progress)
    finder = Finder(request, source, target, clock, cache)
    margin, measured = MARGIN, _runs_here(target)
    unproven = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        for _ in range(MAX_BUILDS):
            choice = finder.find(increase, margin)
            size, minimums = choice.groups or (None, None)
            result = build(replace(request, precision=choice.base, layers=choice.layers, output=unproven,
                                   group_size=size, group_minimums=minimums, max_perplexity_increase=None,
                                   measure_quality=measured), progress, cache)
            if result.quality is None or result.quality.perplexity_increase <= increase:
                break
            margin *= max(0.3, 0.9 * increase / result.quality.perplexity_increase)
            unproven.unlink()
        else:
            assert result.quality is not None
            result.quality.require(Gate(increase), str(output))
        recipe.write_text(_recipe(request, source.name, choice, increase, result))
        os.replace(unproven, output)
    finally:
        unproven.unlink(missing_ok=True)
    return replace(result, path=output, seconds={**clock.seconds, **result.seconds},
                   warnings=(*choice.warnings, *result.warnings))


def _runs_here(target: Target) -> bool:
    return target.gpu is None and target.isa in {isa.name for isa in host_isas()}


def _recipe(request: BuildRequest, name: str, choice: Choice, increase: float, result: BuildResult) -> str:
    """Of this one build. The model's path is absolute: the recipe may move."""
    limits = result.manifest["limits"]
    model = str(Path(request.model).resolve()) if Path(request.model).exists() else request.model
    build: dict[str, Any] = {"targets": [request.target], "precisions": [choice.base], "layers": choice.layers,
             "limits": {key: limits[key] for key in ("max_batch_size", "max_num_tokens", "max_seq_len")}}
    said = {"kv_precision": (request.kv_precision, None), "calibrate": (request.calibrate, True),
            "calibration": (request.calibration and str(request.calibration.resolve()), None),
            "quantization_method": (request.quantization_method, "best"), "compiler": (request.compiler, "zig"),
            "tensor_parallel": (request.tensor_parallel, 1)}
    build |= {key: value for key, (value, usual) in said.items() if value != usual}
    if request.lora_max_rank is not None:
        room = {"max_rank": request.lora_max_rank, "max_adapters": request.lora_max_adapters,
                "modules": list(request.lora_modules) if request.lora_modules else None}
        build["lora"] = {key: value for key, value in room.items() if value is not None}
    if choice.groups is not None:
        build |= dict(zip(("group_size", "group_minimums"), choice.groups, strict=True))
    found = choice.found
    measured = f"the engine's perplexity {result.quality.perplexity_increase:+.2%}" if result.quality else (
        f"measured in simulation: perplexity {found.increase:+.2%}")
    return recipe_text({"model": model, "name": name, "builds": [build]}, [
        f"Found by precision auto for an increase of the perplexity by {increase:.2%} at most; {measured}.",
        f"Weights {found.cost.size_bytes / 1e6:.1f} MB. Layers that are not named have what {choice.base} gives them.",
        "Change what you like, and build it with: ingot build --recipe THIS_FILE"])
