"""What `ingot build` tells of an engine for GPUs."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ingot.runtime.cli.output import size, table

from ..gpu.generate import KV_FRACTION

_SHOWN_CHARACTERS = 60


def gpu_rows(manifest: Mapping[str, Any], dry_run: bool) -> Iterator[tuple[str, str]]:
    """Memory of a GPU, and launches a layer. Nothing for other targets."""
    if manifest["target"]["kind"] != "cuda":
        return
    memory = manifest["memory"]
    yield "one GPU", (f"{size(memory['fixed_bytes'])} of {size(memory['device_bytes'])} without the KV cache, of which "
                      f"{KV_FRACTION:.0%} of the rest hold {memory['kv_tokens']:,} tokens")
    yield "layers", ", ".join(_launches(manifest["launches_per_layer"]))
    if not dry_run:
        spilling = sum(kernel["spill_stores"] > 0 for kernel in manifest["kernels"])
        yield "kernels", f"{len(manifest['kernels'])}, {spilling or 'none'} of them spilling registers"


def _launches(counts: Mapping[str, int]) -> Iterator[str]:
    """ "5 launches up to 8 tokens", for each number in turn."""
    buckets = sorted((int(tokens), count) for tokens, count in counts.items())
    for (tokens, count), (_, following) in zip(buckets, [*buckets[1:], (0, -1)], strict=True):
        if count != following:
            yield f"{count} launches up to {tokens} tokens"


def kernel_rows(manifest: Mapping[str, Any]) -> str:
    """A table of the kernels that were chosen."""
    rows = []
    for kernel in manifest["kernels"]:
        name, matrix = kernel["name"], ", ".join(kernel["matrix"]) or "-"
        if len(name) > _SHOWN_CHARACTERS:
            name = name[:_SHOWN_CHARACTERS - 1] + "…"
        buckets = sorted(map(int, kernel["launches"]))
        rows.append((name, f"{buckets[0]}-{buckets[-1]}" if len(buckets) > 1 else str(buckets[0]),
                     str(kernel["registers"]), str(kernel["spill_stores"]), size(kernel["shared_bytes"]),
                     str(kernel["blocks_per_sm"]), matrix))
    return table(rows, ("kernel", "tokens", "registers", "spills", "shared", "blocks/SM", "matrix instructions"))
