"""`ingot inspect ENGINE --html FILE`: all views of an engine as one page that needs nothing else, to read and to keep.

The page is text and drawings in one file: no script, font or image comes from elsewhere, so that it can be an artifact
beside its engine.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..devices.plan_fields import memory_of
from ..devices.traced_values import value_bytes, value_shape
from ..engine_file import EngineFile
from ..errors import RequestError
from ..store.blobs import write_atomic
from .output import size

_BEGINNING = b"<!DOCTYPE html>"
_COLOURS = ("#3f7fbf", "#b5651d", "#3d9970", "#a0447a", "#7a6fbe", "#8f8a1e", "#c0504d", "#2f8f9d", "#6b8e23",
            "#8b5a2b", "#5b6fb0", "#96506e")
_TOLD = ("limits", "quality", "calibration", "launches_per_layer", "launches_outside_layers", "license", "toolchain",
         "recipe")
_DEVICE_MEMORY = ("weights", "arena", "workspace", "code", "step", "lora")
_NUMERIC = ("seconds_model", "registers", "spill_stores", "spill_loads", "shared_bytes", "code_bytes", "blocks_per_sm",
            "threads")
_KERNEL_COLUMNS = ("op", "tactic", "precision", "phase", "matrix", "tuned_by", *_NUMERIC)


class _FullStep(NamedTuple):
    num_tokens: int
    num_logits: int


@dataclass(frozen=True)
class Buffer:
    """A value in the arena of one bucket: written by launch `begin`, read last by launch `end`.

    offset, num_bytes  of the arena
    """

    name: str
    begin: int
    end: int
    offset: int
    num_bytes: int


def write_page(engine: EngineFile, facts: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """facts: of the views summary, layers, kernels and memory. Raises RequestError where `path` cannot be written."""
    if path.is_dir():
        raise RequestError(f"--html {path}: that is a folder; expected a file, such as {path / 'engine.html'}")
    if not path.parent.exists():
        raise RequestError(f"--html {path}: the folder {path.parent} does not exist; create it or choose another path")
    text = page(engine, facts)
    try:
        if path.is_file() and not _may_replace(path):
            raise RequestError(f"--html {path}: that is a file, and no page; it is not replaced.\n  Name another one, "
                               "or remove it.")
        write_atomic(path, text.encode())
    except OSError as error:
        raise RequestError(f"--html {path}: cannot be written: {error.strerror}") from None
    return {"engine": engine.path, "html": str(path), "size_bytes": len(text.encode())}


def _may_replace(path: Path) -> bool:
    """Whether there is nothing, or a page: nobody's engine is lost by a slip."""
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) in (b"", _BEGINNING)


def page(engine: EngineFile, facts: Mapping[str, Any]) -> str:
    """The page, HTML5 in UTF-8."""
    import jinja2

    source = importlib.resources.files(__package__).joinpath("inspect.html.j2").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
                                     lstrip_blocks=True)
    environment.filters |= {"size": size, "microseconds": lambda seconds: f"{seconds * 1e6:.1f}"}
    plan, kernels, summary = engine.plan, facts["kernels"], facts["summary"]
    seconds = {kernel["name"]: kernel["seconds_model"] for kernel in kernels if "seconds_model" in kernel}
    fullest = max(plan["buckets"], key=lambda bucket: int(bucket["arena_bytes"]))
    return environment.from_string(source).render(
        facts, colours=_COLOURS, told=_TOLD,
        sections=[(name, entry["size_bytes"]) for name, entry in summary["sections"].items()],
        device_memory=[(part, summary["memory"].get(f"{part}_bytes", 0)) for part in _DEVICE_MEMORY],
        buckets=[_bucket(bucket, plan["weights"], seconds) for bucket in plan["buckets"]],
        layer_tokens=list(dict.fromkeys(tokens for layer in facts["layers"] for tokens in layer["launches"])),
        largest_layer=max([1, *(sum(weight["size"] for weight in layer["weights"]) for layer in facts["layers"])]),
        kernel_columns=[name for name in _KERNEL_COLUMNS if any(name in kernel for kernel in kernels)],
        numeric=_NUMERIC,
        arena={"tokens": fullest["tokens"], "launches": len(fullest["launches"]),
               "num_bytes": max(int(fullest["arena_bytes"]), 1),
               "buffers": arena_buffers(fullest, engine.manifest["limits"]["max_batch_size"])})


def _bucket(bucket: Mapping[str, Any], weights: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
    """The launches of a step in their order, with the weights that each reads and its time by the model, if told."""
    rows = []
    for launch in bucket["launches"]:
        read = list(dict.fromkeys(arg[1] for arg in memory_of(launch) if arg[0] == "weight"))
        rows.append({"op": launch["op"], "origin": launch.get("origin", ""), "kernel": launch["kernel"],
                     "grid": "×".join(map(str, launch["grid"])) if "grid" in launch else "",
                     "weight_bytes": sum(int(weights[name]["size"]) for name in read),
                     "seconds": seconds.get(launch["kernel"])})
    told = [row["seconds"] for row in rows if row["seconds"] is not None]
    return {"tokens": bucket["tokens"], "launches": rows, "arena_bytes": bucket["arena_bytes"],
            "seconds": sum(told) if len(told) == len(rows) else None, "longest": max(told, default=0)}


def arena_buffers(bucket: Mapping[str, Any], max_batch_size: int) -> list[Buffer]:
    """Who lies where and for how long in the arena of a bucket that is full; scratch memory of kernels is not told."""
    step = _FullStep(bucket["tokens"], min(bucket["tokens"], max_batch_size))
    reads = [_places_read(launch) for launch in bucket["launches"]]
    outputs = {output["offset"] for output in bucket["outputs"].values()}
    found, alive = list[Buffer](), list[Buffer]()
    for number, launch in enumerate(bucket["launches"]):
        alive = [_read(buffer, number, reads[number]) for buffer in alive]
        for name, value in launch.get("writes", {}).items():
            kind, *place = memory_of(launch)[value["arg"]]
            if kind != "arena":
                continue
            num_bytes = value_bytes(value_shape(value["shape"], step), value["dtype"])
            made = Buffer(name, number, number, place[0], num_bytes)
            replaced = [old for old in alive if _overlap(old, made)]
            found += replaced
            alive = [*(old for old in alive if old not in replaced), made]
    return [*found, *(_read(buffer, len(reads) - 1, outputs) for buffer in alive)]


def _places_read(launch: Mapping[str, Any]) -> set[int]:
    written = {value["arg"] for value in launch.get("writes", {}).values()}
    return {arg[1] for number, arg in enumerate(memory_of(launch)) if arg[0] == "arena" and number not in written}


def _read(buffer: Buffer, launch: int, offsets: set[int]) -> Buffer:
    """The buffer after a launch that takes those places of the arena."""
    taken = any(buffer.offset <= offset < buffer.offset + buffer.num_bytes for offset in offsets)
    return replace(buffer, end=launch) if taken else buffer


def _overlap(one: Buffer, other: Buffer) -> bool:
    return one.offset < other.offset + other.num_bytes and other.offset < one.offset + one.num_bytes
