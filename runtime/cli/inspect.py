"""ingot inspect ENGINE: what it holds and needs, without running it."""

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..devices import default_fraction, free_bytes, target_kind
from ..devices.native_code import check_cpu
from ..devices.plan_fields import memory_of
from ..engine_file import EngineFile
from ..engine_format import section
from ..errors import IngotError
from ..program import EngineMismatch, check_plan_version
from . import inspect_gpu
from .engine_options import add_engine_argument, open_engine
from .inspect_html import write_page
from .output import print_json, size, table

_NUM_LARGEST = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_argument(parser)
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--layers", action="store_true", help="launches and weights of each layer")
    view.add_argument("--kernels", action="store_true", help="which kernel runs how often, for each number of tokens")
    view.add_argument("--roofline", action="store_true",
                      help="what a step must read and multiply, and how long that takes this machine at least")
    view.add_argument("--memory", action="store_true", help="arena, KV cache and the largest weights")
    view.add_argument("--sass", metavar="NAME", help="the instructions of a GPU kernel, by its name or a part of it")
    view.add_argument("--fits", metavar="GPU", help="how many tokens of KV fit beside it on a GPU: a name of "
                      "`ingot targets`, a size such as 24GiB, or all")
    view.add_argument("--html", metavar="FILE", type=Path, help="write all of this, but for --fits and --sass, as one "
                      "page that needs nothing else")


def run(arguments: argparse.Namespace) -> int:
    with open_engine(arguments) as engine:
        check_plan_version(engine)
        if arguments.sass is not None:
            facts: Any = inspect_gpu.sass(engine, arguments.sass)
            text: Callable[[Any], str] = inspect_gpu.sass_text
        elif arguments.fits is not None:
            facts, text = inspect_gpu.fits(engine, arguments.fits), inspect_gpu.fits_text
        elif arguments.html is not None:
            views = {name: VIEWS[name][0](engine) for name in ("summary", "layers", "kernels", "memory")}
            facts, text = write_page(engine, views, arguments.html), _html_text
        else:
            view = next((name for name in VIEWS if getattr(arguments, name, False)), "summary")
            collect, text = VIEWS[view]
            facts = collect(engine)
    if arguments.json:
        print_json(facts)
    else:
        print(text(facts))
    return 0


def _html_text(facts: dict[str, Any]) -> str:
    return f"wrote {facts['html']} ({size(facts['size_bytes'])})"


def _summary(engine: EngineFile) -> dict[str, Any]:
    manifest = {key: value for key, value in engine.manifest.items() if key not in ("kernels", "members")}
    members: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, num_bytes in engine.sizes.items():
        members[section(name)] += 1
        sizes[section(name)] += num_bytes
    memory = manifest["memory"]
    kv_token_bytes = memory.get("kv_bytes_per_token", 0)
    longest_bytes = inspect_gpu.longest_kv_bytes(memory, manifest["limits"]["max_seq_len"])
    obstacle = _obstacle(engine)
    taken = memory.get("weights_bytes", 0) + memory.get("lora_bytes", 0)
    available = 0 if obstacle else max(free_bytes(engine) - taken, 0)
    if target_kind(manifest) == "cuda":
        available = int(available * default_fraction(engine))
    return {
        "engine": engine.path,
        "hash": engine.hash,
        **manifest,
        "buckets": [bucket["tokens"] for bucket in engine.plan["buckets"]],
        "num_kernels": len(engine.manifest["kernels"]),
        "sections": {name: {"members": members[name], "size_bytes": sizes[name]} for name in sizes},
        "why_not_here": obstacle,
        "kv_tokens_that_fit_here": available // kv_token_bytes if kv_token_bytes else None,
        "kv_bytes_of_longest_sequence": longest_bytes,
        "longest_sequences_that_fit_here": available // longest_bytes if longest_bytes else None,
    }


def _obstacle(engine: EngineFile) -> str | None:
    """Why this machine does not run the engine."""
    try:
        if target_kind(engine.manifest) == "cpu":
            check_cpu(engine)
        else:
            from ..devices.cuda import check_gpus
            from ..devices.cuda_driver import load_driver

            check_gpus(engine, load_driver())
    except EngineMismatch as error:
        return str(error)
    except IngotError as error:
        if target_kind(engine.manifest) == "cpu":
            raise
        return str(error)  # no driver, no GPU
    return None


def _kv_text(facts: dict[str, Any]) -> str:
    memory = facts["memory"]
    kinds = Counter(entry["window"] for entry in memory.get("kv_tables", ()))
    tables = ", ".join(f"{count} × {f'window of {window} tokens' if window else 'all tokens'}"
                       for window, count in kinds.items())
    later = memory.get("kv_bytes_per_token_beyond_windows", 0)
    beyond = f", beyond the windows {size(later)}" if any(kinds) else ""
    count = sum(kinds.values())
    return (f"blocks of {memory.get('kv_block_size')} tokens, {size(memory.get('kv_block_bytes', 0))}, in {count} "
            f"table{'' if count == 1 else 's'} ({tables}); a token takes {size(memory.get('kv_bytes_per_token', 0))}"
            f"{beyond}; the longest sequence {size(facts['kv_bytes_of_longest_sequence'])}")


def _summary_text(facts: dict[str, Any]) -> str:
    model, target, memory = facts["model"], facts["target"], facts["memory"]
    here = "runs on this machine"
    if facts["why_not_here"] is not None:
        here = "does not run on this machine" + (", but for --device emulator" if target.get("kind") == "cuda" else "")
    rows = [
        ("engine", facts["engine"]),
        ("hash", facts["hash"]),
        ("model", f"{model['name']} ({model['architecture']})"),
        ("target", f"{target['name']}; {here}"),
        ("precision", f"{facts['precision']}, KV cache {facts.get('kv_precision', 'as that')}"),
        ("limits", ", ".join(f"{name} {value}" for name, value in facts["limits"].items())),
        ("memory", ", ".join(f"{name.removesuffix('_bytes').replace('_', ' ')} {size(value)}"
                             for name, value in memory.items()
                             if name.endswith("_bytes") and not name.startswith("kv_"))),
        ("KV cache", _kv_text(facts)),
        ("KV room", _room_text(facts)),
        *([("adapters", _lora_text(facts["lora"]))] if facts.get("lora") else []),
        ("code", f"{facts['num_kernels']} kernels; buckets of {', '.join(map(str, facts['buckets']))} tokens"),
        *([("launches", "a layer, by the tokens of a step: " + ", ".join(
            f"{tokens}: {count}" for tokens, count in sorted(facts["launches_per_layer"].items(),
                                                             key=lambda item: int(item[0]))))]
          if "launches_per_layer" in facts else []),
        ("file", ", ".join(f"{entry['members']} × {name} {size(entry['size_bytes'])}" if entry["members"] > 1 else
                           f"{name} {size(entry['size_bytes'])}" for name, entry in facts["sections"].items())),
        ("built by", ", ".join([f"ingot {facts['ingot_version']}",
                                *(f"{name} {version}" for name, version in facts["toolchain"].items())])),
    ]
    return table(rows)


def _lora_text(lora: dict[str, Any]) -> str:
    kinds = dict.fromkeys(module["name"].rpartition(".")[2] for module in lora["modules"])
    return (f"room for {lora['max_adapters']} of rank {lora['max_rank']}, {size(lora['bytes_per_adapter'])} each, for "
            f"{len(lora['modules'])} linear layers: {', '.join(kinds)}")


def _room_text(facts: dict[str, Any]) -> str:
    if facts["target"].get("kind") == "cuda" and facts["why_not_here"] is not None:
        return f"ingot inspect {facts['engine']} --fits {facts['target']['name']}"
    return (f"{facts['kv_tokens_that_fit_here']} tokens, or {facts['longest_sequences_that_fit_here']} longest "
            "sequences, fit beside the weights in this machine's free memory")


def _layers(engine: EngineFile) -> list[dict[str, Any]]:
    plan = engine.plan
    layers: dict[str, dict[str, Any]] = {}
    for bucket in (plan["buckets"][0], plan["buckets"][-1]):
        for launch in bucket["launches"]:
            name = layer_of(launch.get("origin", ""))
            layer = layers.setdefault(name, {"layer": name, "launches": {}, "weights": {}})
            tokens = str(bucket["tokens"])
            layer["launches"][tokens] = layer["launches"].get(tokens, 0) + 1
            for weight in _weights_of(launch):
                layer["weights"][weight] = {key: plan["weights"][weight][key] for key in ("label", "size")}
    return [{**layer, "weights": list(layer["weights"].values())} for layer in layers.values()]


def layer_of(origin: str) -> str:
    """The layer of a launch's origin: "model.layers.3.mlp (file.py:172)" -> "model.layers.3"."""
    path = origin.partition(" ")[0]
    numbered = re.match(r".*?\.\d+(?=\.|$)", path)
    return numbered[0] if numbered else path or "(none)"


def _weights_of(launch: dict[str, Any]) -> Iterator[str]:
    return (arg[1] for arg in memory_of(launch) if arg[0] == "weight")


def _layers_text(layers: list[dict[str, Any]]) -> str:
    buckets = list(dict.fromkeys(tokens for layer in layers for tokens in layer["launches"]))
    rows = []
    for layer in layers:
        total = sum(weight["size"] for weight in layer["weights"])
        counts = [layer["launches"].get(tokens, 0) for tokens in buckets]
        rows.append((layer["layer"], *counts, len(layer["weights"]), size(total)))
    launches = (f"launches, {tokens} token{'s' * (tokens != '1')}" for tokens in buckets)
    return table(rows, ("layer", *launches, "weights", "size"))


def _kernels(engine: EngineFile) -> list[dict[str, Any]]:
    kernels: list[dict[str, Any]] = engine.manifest["kernels"]
    return kernels


def _kernels_text(kernels: list[dict[str, Any]]) -> str:
    if any("registers" in kernel for kernel in kernels):
        return inspect_gpu.kernels_text(kernels)
    buckets = sorted({tokens for kernel in kernels for tokens in kernel.get("launches", {})}, key=int)
    rows = []
    for kernel in kernels:
        told = ("name", "launches", "tuned_by", "problem", "tactic")
        more = (f"{key} {value}" for key, value in kernel.items() if key not in told)
        counts = (kernel.get("launches", {}).get(tokens, 0) for tokens in buckets)
        rows.append((kernel["name"], *counts, ", ".join([_tactic(kernel), *more])))
    return "Launches in a step of so many tokens:\n" + table(rows, ("kernel", *buckets, "how"))


def _tactic(kernel: dict[str, Any]) -> str:
    """Of a kernel that can be cut in several ways, by whose choice, and how it differs from the model's."""
    if "problem" not in kernel:
        return ""
    chosen = " ".join(f"{name} {value}" for name, value in kernel.get("tactic", {}).items())
    return f"{kernel['tuned_by']}{f': {chosen}' if chosen else ''}"


def _memory(engine: EngineFile) -> dict[str, Any]:
    plan = engine.plan
    kv = plan["kv"]
    slots = Counter((slot["table"], kv["windows"][slot["table"]], slot["heads"], slot["key_dim"], slot["value_dim"],
                     slot["dtype"]) for slot in kv["slots"])
    return {
        **engine.manifest["memory"],
        "buckets": [
            {"tokens": bucket["tokens"], "launches": len(bucket["launches"]), "arena_bytes": bucket["arena_bytes"]}
            for bucket in plan["buckets"]
        ],
        "kv": [
            {"table": table, "window": window, "layers": count, "heads": heads, "key_dim": key_dim,
             "value_dim": value_dim, "dtype": dtype}
            for (table, window, heads, key_dim, value_dim, dtype), count in sorted(slots.items())
        ],
        "weights": sorted(plan["weights"].values(), key=lambda weight: -int(weight["size"])),
    }


def _memory_text(facts: dict[str, Any]) -> str:
    buckets = [(entry["tokens"], entry["launches"], size(entry["arena_bytes"])) for entry in facts["buckets"]]
    kv = [tuple("all" if value is None else value for value in entry.values()) for entry in facts["kv"]]
    weights = [(weight["label"], size(weight["size"])) for weight in facts["weights"][:_NUM_LARGEST]]
    totals = [(name, size(value)) for name, value in facts.items() if name.endswith("_bytes") or "_per_token" in name]
    return "\n\n".join([
        table(totals),
        table(buckets, ("tokens", "launches", "arena")),
        f"KV cache, in blocks of {facts['kv_block_size']} tokens, {size(facts['kv_block_bytes'])} of each table:\n"
        + table(kv, ("table", "window", "layers", "heads", "key dim", "value dim", "type")),
        f"The largest of {len(facts['weights'])} weights:\n" + table(weights),
    ])


def _roofline(engine: EngineFile) -> dict[str, Any]:
    from ..profile.report import engine_roofline

    return engine_roofline(engine)


def _roofline_text(facts: dict[str, Any]) -> str:
    from ..profile.report import roofline_text

    return roofline_text(facts)


# View -> what it tells, and how that is put for people.
VIEWS: dict[str, tuple[Callable[[EngineFile], Any], Callable[[Any], str]]] = {
    "summary": (_summary, _summary_text),
    "layers": (_layers, _layers_text),
    "kernels": (_kernels, _kernels_text),
    "memory": (_memory, _memory_text),
    "roofline": (_roofline, _roofline_text),
}
