"""What differs between two engines, and which of their inputs explain it. Reads manifest and plan, no weights."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .engine_file import EngineFile
from .manifest import is_weight

MAX_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """topic: "model", "weights", "kernels", … detail: one line. a, b: the two values, None where one has none."""

    topic: str
    detail: str
    a: Any = None
    b: Any = None


@dataclass(frozen=True)
class EngineDiff:
    """reasons: the inputs of the two builds that differ, in words; the differences follow from them."""

    equal: bool
    differences: list[Difference] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def diff(a: EngineFile, b: EngineFile) -> EngineDiff:
    """Engines of equal hash are equal in every member, whether or not one of them is stripped."""
    if a.hash == b.hash:
        return EngineDiff(True)
    x, y = a.manifest, b.manifest
    differences = [*_fields(x, y), *_weights(a, b), *_kernels(x, y), *_members(x, y)]
    return EngineDiff(False, differences, _reasons(x, y, differences))


# Field of the manifest -> the topic that it is told under. Of an object every entry is compared.
_TOPICS = {
    "model": "model", "target": "target", "precision": "precision", "kv_precision": "precision", "limits": "limits",
    "memory": "memory", "quality": "quality", "num_calibrated_weights": "quality", "ingot_version": "toolchain",
    "toolchain": "toolchain", "graph_sha256": "graph", "recipe": "recipe", "format_version": "toolchain",
}
_APART = ("members", "kernels")


def _fields(x: Mapping[str, Any], y: Mapping[str, Any]) -> Iterator[Difference]:
    names = (x.keys() | y.keys()) - set(_APART)
    for name in [*(name for name in _TOPICS if name in names), *sorted(names - set(_TOPICS))]:
        for path, left, right in _changes(name, x.get(name), y.get(name)):
            yield Difference(_TOPICS.get(name, name), f"{path}: {_shown(left)} / {_shown(right)}", left, right)


def _changes(path: str, left: Any, right: Any) -> Iterator[tuple[str, Any, Any]]:
    """The innermost values that differ, with their paths."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for name in sorted(left.keys() | right.keys()):
            yield from _changes(f"{path}.{name}", left.get(name), right.get(name))
    elif left != right:
        yield path, left, right


def _weights(a: EngineFile, b: EngineFile) -> Iterator[Difference]:
    """By what the model calls them; packed in another way, a weight differs too."""
    left, right = _blobs(a), _blobs(b)
    both = [name for name in left if name in right]
    changed = [name for name in both if left[name][0] != right[name][0]]
    if changed:
        shown = "; ".join(_two(left[name][1], right[name][1]) for name in changed[:MAX_SHOWN])
        yield Difference("weights", f"{len(changed)} of {len(both)} differ: {shown}{_more(changed)}", changed, changed)
    for mine, theirs, which in ((left, right, "first"), (right, left, "second")):
        if only := [name for name in mine if name not in theirs]:
            yield Difference("weights", f"{len(only)} only in the {which}: {', '.join(only[:MAX_SHOWN])}{_more(only)}",
                             only if which == "first" else None, only if which == "second" else None)


def _blobs(engine: EngineFile) -> dict[str, tuple[list[str], str]]:
    """Name -> (SHA-256 on each rank, label). The label begins with the name; packing and shape follow."""
    found: dict[str, tuple[list[str], str]] = {}
    weights = engine.plan["weights"]
    for weight in (weights[name] for name in sorted(weights, key=lambda name: (len(name), name))):
        name = weight["label"].partition(" ")[0]
        while name in found:  # one matrix packed in two ways
            name += "'"
        found[name] = weight.get("blobs", [weight["blob"]]), weight["label"]
    return found


def _kernels(x: Mapping[str, Any], y: Mapping[str, Any]) -> Iterator[Difference]:
    left = {kernel["name"]: kernel for kernel in x["kernels"]}
    right = {kernel["name"]: kernel for kernel in y["kernels"]}
    for mine, theirs, which in ((left, right, "first"), (right, left, "second")):
        if only := [name for name in mine if name not in theirs]:
            kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(n.partition("_")[0] for n in only).items())
            yield Difference("kernels", f"{len(only)} only in the {which} ({kinds}): {', '.join(only[:MAX_SHOWN])}"
                             f"{_more(only)}", only if which == "first" else None, only if which == "second" else None)
    changed = [name for name in left if name in right and left[name] != right[name]]
    if changed:
        yield Difference("kernels", f"{len(changed)} run in other places or numbers: {', '.join(changed[:MAX_SHOWN])}"
                         f"{_more(changed)}", [left[name] for name in changed], [right[name] for name in changed])


def _members(x: Mapping[str, Any], y: Mapping[str, Any]) -> Iterator[Difference]:
    """Whole members, without the weights."""
    for name in sorted(x["members"].keys() | y["members"].keys()):
        left, right = x["members"].get(name), y["members"].get(name)
        if left != right and not is_weight(name):
            text = f"{name}: " + (f"only in the {'first' if right is None else 'second'}" if None in (left, right) else
                                  f"{left['size']} / {right['size']} bytes")
            yield Difference("members", text, left, right)


def _reasons(x: Mapping[str, Any], y: Mapping[str, Any], differences: list[Difference]) -> list[str]:
    """Inputs of the builds that differ."""
    reasons = []
    if x["model"]["config_sha256"] != y["model"]["config_sha256"]:
        reasons.append("they are built from models of different configuration")
    if x["model"].get("checkpoint_sha256") != y["model"].get("checkpoint_sha256"):
        reasons.append("the checkpoints hold different tensors")
    reasons += [f"the recipes differ: {path.partition('.')[2]} {_shown(left)} / {_shown(right)}"
                for path, left, right in _changes("recipe", x.get("recipe", {}), y.get("recipe", {}))]
    reasons += [f"the tools differ: {path.rpartition('.')[2]} {_shown(left)} / {_shown(right)}"
                for name in ("ingot_version", "toolchain") for path, left, right in _changes(name, x[name], y[name])]
    if any(d.topic == "members" and d.detail.startswith("tokenizer/") for d in differences):
        reasons.append("the tokenizer's files differ")
    if not reasons and x.get("num_calibrated_weights") and any(d.topic == "weights" for d in differences):
        reasons.append("weights were calibrated on machines of different kinds: sums of floats come out differently by "
                       "the vector instructions of the CPU that builds")
    if not reasons:
        reasons.append("all inputs that are recorded are equal: either Ingot itself was changed between the builds "
                       "without a new version, or the build depends on something that it should not")
    return reasons


def _shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return f"{text[:12]}…" if len(text) == 64 and " " not in text else text if len(text) <= 80 else f"{text[:77]}…"


def _two(left: str, right: str) -> str:
    return left if left == right else f"{left} / {right.partition(' ')[2]}"


def _more(items: list[str]) -> str:
    return f" and {len(items) - MAX_SHOWN} more" if len(items) > MAX_SHOWN else ""
