"""Calibrates a random llama of 3.2 billion parameters and tells how much memory that took.

    python -m tools.large_calibration FOLDER [--remove]

The checkpoint (6.4 GB, tools/large_build.py) is written to FOLDER/model shard by shard and is kept for the next run.
Counted is anonymous memory; what a calibration finds goes to a cache in FOLDER.
"""
from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from ingot.runtime.cli.output import Progress, size, table
from tools.large_build import Llama, measured, write_checkpoint

ALLOWED_BYTES = 6_000_000_000


def byte_tokenizer() -> dict[str, bytes]:
    """A token for each byte, as an engine holds a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids: dict[str, object] = {"bos_token_id": None, "eos_token_ids": [], "special_tokens": {}}
    return {"tokenizer.json": tokenizer.to_str().encode(), "config.json": json.dumps(ids).encode()}


def calibrate(checkpoint: Path, cache: Path) -> int:
    """In a process of its own. Tells what was found as JSON."""
    from ingot.compiler.cache.build_cache import BuildCache
    from ingot.compiler.cache.calibration import InputsOfModel
    from ingot.compiler.cache.tensor_digests import tensor_digests
    from ingot.compiler.calibration.text import default_text
    from ingot.compiler.checkpoint.open import open_checkpoint
    progress, opened = Progress(True), open_checkpoint(str(checkpoint))
    entries = BuildCache(cache, limit_bytes=1 << 40)
    inputs = InputsOfModel(opened, tensor_digests(opened, entries), byte_tokenizer(), default_text(), entries,
                           progress.show)
    found = inputs.statistics("model.layers.0.mlp.down_proj.weight")
    progress.clear()
    assert found is not None, inputs.failure
    print(json.dumps({"tokens": found.count, "entries": len(set(inputs.parameters().values())),
                      "cache_bytes": sum(entry.size_bytes for entry in entries.entries())}), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser("large_calibration", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where checkpoint and cache go: 9 GB")
    parser.add_argument("--remove", action="store_true", help="delete both at the end")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    checkpoint, cache = arguments.folder / "model", arguments.folder / "cache"
    if arguments.run:
        return calibrate(checkpoint, cache)
    llama = Llama()
    if not (checkpoint / "model.safetensors.index.json").exists():
        write_checkpoint(llama, checkpoint)
    shutil.rmtree(cache, ignore_errors=True)
    usage = measured([sys.executable, "-m", "tools.large_calibration", str(arguments.folder), "--run"])
    print(table([
        ("parameters", f"{llama.parameters:,} in {size(2 * llama.parameters)}"),
        ("calibration", f"{usage.seconds:.0f} s, exit status {usage.status}"),
        ("peak of anonymous memory", f"{size(usage.peak_anonymous_bytes)}; allowed are {size(ALLOWED_BYTES)}"),
    ]))
    if arguments.remove:
        shutil.rmtree(checkpoint)
        shutil.rmtree(cache)
    return int(usage.status != 0 or usage.peak_anonymous_bytes > ALLOWED_BYTES)


if __name__ == "__main__":
    sys.exit(main())
