"""ingot cache list|clear: what builds have kept for later builds."""

import argparse
import time

from ingot.runtime.cli.output import print_json, size, table

from ..cache.build_cache import KINDS, LIMIT_VARIABLE, BuildCache, Entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "clear"), help="list: how much of what; clear: remove it")
    parser.add_argument("--kind", choices=tuple(KINDS), help="only entries of this kind")


def run(arguments: argparse.Namespace) -> int:
    cache = BuildCache()
    entries = [entry for entry in cache.entries() if arguments.kind in (None, entry.kind)]
    removed = cache.clear(arguments.kind) if arguments.action == "clear" else 0
    total = sum(entry.size_bytes for entry in entries)
    if arguments.json:
        kinds = {kind: {"entries": len(own), "size_bytes": sum(entry.size_bytes for entry in own)}
                 for kind, own in _by_kind(entries).items()}
        print_json({"folder": str(cache.folder), "limit_bytes": cache.limit_bytes, "size_bytes": total,
                    "removed_bytes": removed, "kinds": kinds})
    elif arguments.action == "clear":
        print(f"{cache.folder}: removed {len(entries)} entries, {size(removed)}")
    else:
        print(f"{cache.folder}: {size(total)} of at most {size(cache.limit_bytes)} (${LIMIT_VARIABLE})")
        rows = [(kind, len(own), size(sum(entry.size_bytes for entry in own)), _ago(own[-1].used), KINDS[kind])
                for kind, own in _by_kind(entries).items()]
        if rows:
            print(table(rows, ("kind", "entries", "size", "last used", "")))
    return 0


def _by_kind(entries: list[Entry]) -> dict[str, list[Entry]]:
    """Only kinds that have entries; these in the order of their last use."""
    kinds: dict[str, list[Entry]] = {}
    for kind in KINDS:
        if own := [entry for entry in entries if entry.kind == kind]:
            kinds[kind] = own
    return kinds


def _ago(used: float) -> str:
    minutes = max(0.0, time.time() - used) / 60
    return f"{minutes:.0f} min ago" if minutes < 100 else f"{minutes / 60:.0f} h ago" if minutes < 6000 else \
        f"{minutes / 1440:.0f} days ago"
