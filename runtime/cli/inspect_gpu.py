"""What `ingot inspect` tells of GPU engines alone: kernels as compiled, their instructions, and the GPUs they fit."""

from __future__ import annotations

import importlib
import re
from typing import Any

from ..devices import target_kind
from ..devices.cuda import DEFAULT_FRACTION, runs_on
from ..engine_file import EngineFile
from ..errors import RequestError
from .output import size, table

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
          "tib": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b)", re.IGNORECASE)


def kernels_text(kernels: list[dict[str, Any]]) -> str:
    """As they were compiled; times are those of the compiler's model of the device."""
    buckets = sorted({tokens for kernel in kernels for tokens in kernel.get("launches", {})}, key=int)
    rows = []
    for kernel in kernels:
        launches = kernel.get("launches", {})
        matrix = ", ".join(f"{count} {name}" for name, count in kernel.get("matrix", {}).items())
        spills = kernel.get("spill_stores", 0) + kernel.get("spill_loads", 0)
        seconds = kernel.get("seconds_model")
        rows.append((kernel.get("tactic", kernel.get("op", "")), *(launches.get(tokens, 0) for tokens in buckets),
                     "" if seconds is None else f"{seconds * 1e6:.1f}", kernel.get("registers", ""), spills,
                     size(kernel["shared_bytes"]) if "shared_bytes" in kernel else "", kernel.get("blocks_per_sm", ""),
                     matrix or "none", kernel["name"]))
    header = ("kernel", *buckets, "µs, by model", "registers", "spills", "shared", "blocks/SM", "matrix instructions",
              "name")
    return ("Launches in a step of so many tokens, and what one of them needs (--sass NAME: its instructions):\n"
            + table(rows, header))


def sass(engine: EngineFile, wanted: str) -> dict[str, Any]:
    """The instructions of the kernel that is called so, or whose name alone has this in it. Raises RequestError."""
    if target_kind(engine.manifest) != "cuda":
        raise RequestError(f"{engine.path} has code for {engine.manifest['target']['name']}; --sass shows that of GPUs")
    kernels = {name: entry for name, entry in engine.plan.get("kernels", {}).items() if entry.get("code")}
    names = [wanted] if wanted in kernels else [name for name in kernels if wanted in name]
    if len(names) != 1:
        found = f"several kernels have {wanted!r} in their names" if names else f"no kernel has {wanted!r} in its name"
        raise RequestError(f"{found}; there are:\n  " + "\n  ".join(names or kernels))
    (name,) = names
    told = next((dict(entry) for entry in engine.manifest["kernels"] if entry.get("name") == name), {"name": name})
    code = engine.read(kernels[name]["code"])
    # It reads cubins with the tools of Triton's wheel, and says what to install where that is missing.
    text: str = importlib.import_module("ingot.compiler.gpu.disassemble").disassemble(code)
    return {**told, "name": name, "member": kernels[name]["code"], "size_bytes": len(code), "sass": text}


def sass_text(facts: dict[str, Any]) -> str:
    shown = [(key.replace("_", " "), _plain(value)) for key, value in facts.items() if key not in ("sass", "launches")]
    return table(shown) + "\n\n" + facts["sass"]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items()) or "none"
    if isinstance(value, list):
        return f"{len(value)} tactics" if value else "none"
    return str(value)


def fits(engine: EngineFile, wanted: str) -> dict[str, Any]:
    """What a GPU of that name, or with so much memory ("24GiB"), has room for; "all": each that is known."""
    memory = engine.manifest["memory"]
    fixed = memory.get("fixed_bytes", sum(memory.get(f"{part}_bytes", 0) for part in ("weights", "arena", "lora")))
    longest = longest_kv_bytes(memory, engine.manifest["limits"]["max_seq_len"])
    gpus = [_room(gpu, memory, fixed, longest) for gpu in _gpus(engine, wanted)]
    return {"engine": engine.path, "target": engine.manifest["target"]["name"], "fixed_bytes": fixed,
            "kv_bytes_per_token": memory.get("kv_bytes_per_token", 0), "kv_fraction": DEFAULT_FRACTION,
            "kv_bytes_of_longest_sequence": longest, "max_seq_len": engine.manifest["limits"]["max_seq_len"],
            "gpus": gpus}


def longest_kv_bytes(memory: dict[str, Any], num_tokens: int) -> int:
    """Of the KV blocks that a sequence of so many tokens holds, those that have left their window given up."""
    block_size, blocks = memory.get("kv_block_size", 1), 0
    for entry in memory.get("kv_tables", ()):
        needed = -(-num_tokens // block_size)
        # A window begins anywhere in a block.
        blocks += min(needed, (entry["window"] - 2) // block_size + 2) if entry["window"] else needed
    return int(blocks * memory.get("kv_block_bytes", 0))


def _gpus(engine: EngineFile, wanted: str) -> list[dict[str, Any]]:
    if (match := _SIZE.fullmatch(wanted.strip())) is not None:
        return [{"gpu": wanted, "memory_bytes": int(float(match[1]) * _UNITS[match[2].lower()]), "runs_code": None}]
    try:
        listed: Any = importlib.import_module("ingot.compiler.targets").list_targets()
    except ModuleNotFoundError as error:
        raise RequestError(f"--fits {wanted}: the figures of GPUs come with the compiler, which is not installed here: "
                           f"no module named {error.name!r}.\n  Give the GPU's memory instead, such as --fits 80GiB, "
                           "or install it: pip install 'ingot-llm[build]'") from None
    isa = engine.manifest["target"]["isa"]
    known = [{"gpu": target.name, "memory_bytes": target.gpu.memory_bytes,
              "runs_code": runs_on(isa, divmod(target.gpu.arch.capability, 10))}
             for target in listed if target.gpu is not None]
    found = known if wanted == "all" else [gpu for gpu in known if gpu["gpu"] == wanted]
    if not found:
        raise RequestError(f"--fits: unknown GPU {wanted!r}; expected a size such as 24GiB, all, or one of: "
                           f"{', '.join(gpu['gpu'] for gpu in known)}")
    return found


def _room(gpu: dict[str, Any], memory: dict[str, Any], fixed: int, longest: int) -> dict[str, Any]:
    left = gpu["memory_bytes"] - fixed
    room = max(0, int(DEFAULT_FRACTION * left))
    token = memory.get("kv_bytes_per_token", 0)
    return {**gpu, "fits": left > 0, "left_bytes": left, "kv_tokens": room // token if token else None,
            "longest_sequences": room // longest if longest else None}


def fits_text(facts: dict[str, Any]) -> str:
    rows = [(gpu["gpu"], size(gpu["memory_bytes"]), "yes" if gpu["fits"] else f"no, {size(-gpu['left_bytes'])} too few",
             gpu["kv_tokens"] if gpu["fits"] else "", gpu["longest_sequences"] if gpu["fits"] else "",
             {True: "runs there", False: "for another architecture", None: ""}[gpu["runs_code"]])
            for gpu in facts["gpus"]]
    return "\n".join([
        f"Weights, arena and the like take {size(facts['fixed_bytes'])}, a token of KV "
        f"{size(facts['kv_bytes_per_token'])}, a sequence of {facts['max_seq_len']} tokens "
        f"{size(facts['kv_bytes_of_longest_sequence'])}.",
        f"KV gets {facts['kv_fraction']:.0%} of what is left; the driver's own needs come out of the rest.",
        "", table(rows, ("GPU", "memory", "fits", "KV tokens", "longest sequences", "this code"))])
