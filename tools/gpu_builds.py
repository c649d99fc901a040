"""Builds engines for NVIDIA GPUs on this machine and tells how long each took and what is in it.

    python -m tools.gpu_builds engines --out FOLDER [--models smollm2 gemma3 mixtral] [--targets a100 …]
                                                   [--precisions int4 …]
    python -m tools.gpu_builds plans [--models llama-3.1-8b …] [--targets h200 b200] [--precision fp8]
                                     [--tensor-parallel 4]

`engines` builds the demo models and a random 2-layer mixtral for each target and precision, from nothing (no build
cache, no kernels of earlier runs) unless --warm is given. `plans` does dry runs of recipes/ from their configurations
alone: kernels compiled, memory, no weights. Both print Markdown.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ingot.runtime.cli.output import size

from .demo_models import MODELS as DEMO_MODELS
from .demo_models import provide
from .small_models import save_random, small_config

ROOT = Path(__file__).resolve().parent.parent
PRECISIONS = {"a100": ("bf16", "int8", "int4"), "b200": ("bf16", "fp8", "w4a8", "int4", "nvfp4")}
OTHERS = ("bf16", "fp8", "w4a8", "int4")
TARGETS = ("a100", "l40s", "h200", "rtx5090", "b200")
MODELS = ("smollm2", "gemma3", "mixtral")
PLANS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "mixtral-8x7b", "gpt-oss-120b")


@dataclass(frozen=True)
class Build:
    """facts: what `ingot build --json` prints; empty where it failed, with the first line of the reason in `error`."""

    model: str
    target: str
    precision: str
    seconds: float
    facts: dict[str, Any]
    error: str = ""


def run(model: str, target: str, precision: str, options: list[str], cache: Path) -> Build:
    """One `ingot build` in a process of its own, whose caches lie in `cache`."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "ingot.runtime.cli", "build", "--json", "--target", target,
               "--precision", precision]
    done = subprocess.run([*command, *options], capture_output=True, text=True,
                          env=os.environ | {"INGOT_CACHE": str(cache)})
    seconds = time.perf_counter() - begin
    if done.returncode:
        return Build(model, target, precision, seconds, {}, (done.stderr.strip() or "no reason given").splitlines()[-1])
    found = json.loads(done.stdout)
    facts = found[0] if isinstance(found, list) else found
    return Build(model, target, precision, seconds, facts, (facts.get("error") or "").partition("\n")[0])


def engines(models: list[str], targets: list[str], precisions: list[str] | None, out: Path,
            warm: Path | None) -> Iterator[Build]:
    """Of the precisions that the table has for a target those asked for, None: all."""
    out.mkdir(parents=True, exist_ok=True)
    for model in models:
        folder = checkpoint(model, out)
        for target in targets:
            for precision in PRECISIONS.get(target, OTHERS):
                if precisions is not None and precision not in precisions:
                    continue
                engine = out / f"{model}.{target}.{precision}.engine"
                with tempfile.TemporaryDirectory(prefix="ingot-cold-") as cold:
                    yield run(model, target, precision, [str(folder), "-o", str(engine), "--force"], warm or Path(cold))


def checkpoint(model: str, out: Path) -> Path:
    """The folder of a demo model, or of a random small one of that kind, made where it is not there."""
    if model in DEMO_MODELS:
        return provide(DEMO_MODELS[model]).checkpoint
    folder = out / model
    if not (folder / "config.json").exists():
        save_random(small_config(model, hidden_size=256, intermediate_size=512, head_dim=64), folder)
    return folder


def plans(models: list[str], targets: list[str], precision: str, warm: Path | None, ranks: int) -> Iterator[Build]:
    for model in models:
        for target in targets:
            with tempfile.TemporaryDirectory(prefix="ingot-cold-") as cold:
                recipe = Path(cold) / f"{model}.yaml"
                recipe.write_text(_recipe(model, target, precision, ranks))
                yield run(model, target, precision, ["--dry-run", "--recipe", str(recipe)], warm or Path(cold))


def _recipe(model: str, target: str, precision: str, ranks: int) -> str:
    """The model's recipe with one build: as for an h200, for that target."""
    recipe = yaml.safe_load((ROOT / f"recipes/{model}.yaml").read_text())
    (build,) = (build for build in recipe["builds"] if "h200" in build["targets"])
    builds = [build | {"targets": [target], "precisions": [precision]}]
    return str(yaml.safe_dump(recipe | {"builds": builds, "tensor_parallel": ranks}))


def engine_row(build: Build) -> list[str]:
    if build.error:
        return [f"{build.seconds:.1f} s", build.error, "", "", "", ""]
    manifest = build.facts["manifest"]
    kernels, layers = manifest["kernels"], manifest["launches_per_layer"]
    few = [count for tokens, count in layers.items() if int(tokens) <= 8]
    many = [count for tokens, count in layers.items() if int(tokens) > 8]
    return [f"{build.seconds:.1f} s", str(len(kernels)), f"{max(few, default=0):g}", f"{max(many, default=0):g}",
            str(sum(kernel["spill_stores"] for kernel in kernels)), size(manifest["memory"]["weights_bytes"])]


def plan_row(build: Build) -> list[str]:
    if build.error:
        return [f"{build.seconds:.1f} s", build.error, "", "", "", ""]
    manifest = build.facts["manifest"]
    memory = manifest["memory"]
    taken = memory["fixed_bytes"]
    tokens = max(0, int(0.9 * memory["device_bytes"] - taken)) // memory["kv_bytes_per_token"]
    return [f"{build.seconds:.1f} s", str(len(manifest["kernels"])), size(memory["weights_bytes"]),
            size(memory["arena_bytes"] + memory["workspace_bytes"]), size(taken), f"{tokens:,}"]


ENGINE_COLUMNS = ("time", "kernels", "launches a layer, 1 to 8 tokens", "above", "spills", "weights")
PLAN_COLUMNS = ("time", "kernels", "weights", "arena and workspace", "together", "KV tokens in 90 % of the memory")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("engines", "plans"))
    parser.add_argument("--models", nargs="+", default=None)
    parser.add_argument("--targets", nargs="+", default=None)
    parser.add_argument("--precisions", nargs="+", default=None, help="of engines")
    parser.add_argument("--precision", default="fp8", help="of plans")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS",
                        help="of plans; memory is of one GPU")
    parser.add_argument("--out", type=Path, help="folder of the engines")
    parser.add_argument("--warm", type=Path, help="a folder of caches that all builds share")
    asked = parser.parse_args()
    if asked.what == "engines" and asked.out is None:
        parser.error("engines needs --out FOLDER")
    columns = ENGINE_COLUMNS if asked.what == "engines" else PLAN_COLUMNS
    builds = engines(asked.models or list(MODELS), asked.targets or list(TARGETS), asked.precisions,
                     asked.out, asked.warm) \
        if asked.what == "engines" else plans(asked.models or list(PLANS), asked.targets or ["h200", "b200"],
                                              asked.precision, asked.warm, asked.tensor_parallel)
    print("| model | target | precision | " + " | ".join(columns) + " |")
    print("| --- " * (3 + len(columns)) + "|")
    failed = 0
    for build in builds:
        failed += bool(build.error)
        row = engine_row(build) if asked.what == "engines" else plan_row(build)
        print("| " + " | ".join([build.model, build.target, build.precision, *row]) + " |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
