"""Builds a random llama of 3.2 billion parameters and tells how much memory that took.

    python -m tools.large_build /tmp/large --precision w4a8

The checkpoint (6.4 GB in bfloat16) is written to FOLDER/model shard by shard and is kept for the next run; `--remove`
deletes it at the end. Counted is anonymous memory, that of the building process and of all it started (compilers): the
pages of mapped checkpoint files are the system's to take back.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.runtime.cli.output import size, table

ALLOWED_BYTES = 3_000_000_000
SHARD_BYTES = 1_000_000_000
SAMPLE_SECONDS = 0.05


@dataclass(frozen=True)
class Llama:
    """Sizes of a llama with tied embeddings. The default has 3.2 billion parameters."""

    hidden: int = 3072
    inner: int = 8192
    layers: int = 28
    heads: int = 24
    kv_heads: int = 8
    vocab: int = 128_256

    def config(self) -> dict[str, object]:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
                "intermediate_size": self.inner, "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab,
                "max_position_embeddings": 4096, "tie_word_embeddings": True, "dtype": "bfloat16"}

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each tensor."""
        kv = self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for number in range(self.layers):
            prefix = f"model.layers.{number}."
            for name, shape in (
                    ("input_layernorm", (self.hidden,)), ("post_attention_layernorm", (self.hidden,)),
                    ("self_attn.q_proj", (self.hidden, self.hidden)), ("self_attn.k_proj", (kv, self.hidden)),
                    ("self_attn.v_proj", (kv, self.hidden)), ("self_attn.o_proj", (self.hidden, self.hidden)),
                    ("mlp.gate_proj", (self.inner, self.hidden)), ("mlp.up_proj", (self.inner, self.hidden)),
                    ("mlp.down_proj", (self.hidden, self.inner))):
                yield f"{prefix}{name}.weight", shape
        yield "model.norm.weight", (self.hidden,)

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(shape)) for _, shape in self.tensors())


def write_checkpoint(llama: Llama, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder as save_pretrained writes it, without a tokenizer. In memory is one tensor at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama.config(), indent=1))
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in llama.tensors():
        num_bytes = 2 * int(np.prod(shape))
        if shards[-1] and filled + num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += num_bytes
    rng, weight_map = np.random.default_rng(0), {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, shard, rng)
        weight_map.update(dict.fromkeys((name for name, _ in shard), file))
    index = {"metadata": {"total_size": 2 * llama.parameters}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))  # last: then it is complete


def _write_shard(path: Path, shard: list[tuple[str, tuple[int, ...]]], rng: np.random.Generator) -> None:
    entries, at = {}, 0
    for name, shape in shard:
        end = at + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, shape in shard:
            bits = np.frombuffer(rng.bytes(2 * int(np.prod(shape))), np.uint16).copy()
            bits &= 0x80FF  # sign, the last bit of the exponent, fraction
            bits |= 0x3F00 if len(shape) == 1 else 0x3C00  # gains of 0.5 to 2; weights of 1/128 to 1/32
            file.write(bits.data)


@dataclass(frozen=True)
class Usage:
    """status: of the command. peak_anonymous_bytes: of it and its descendants at once."""

    status: int
    peak_anonymous_bytes: int
    seconds: float


def measured(command: list[str]) -> Usage:
    """Runs a command, looking at its memory every 50 ms."""
    begin, peak = time.perf_counter(), 0
    process = subprocess.Popen(command)
    try:
        while process.poll() is None:
            peak = max(peak, _anonymous_bytes(process.pid))
            time.sleep(SAMPLE_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return Usage(process.returncode, peak, time.perf_counter() - begin)


def _anonymous_bytes(pid: int) -> int:
    """RssAnon of a process and its descendants; of those that have ended meanwhile nothing."""
    total = 0
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        status = Path(f"/proc/{pid}/status").read_text()
        total += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                # Between fork and exec a child has its parent's memory, which would count twice.
                if Path(f"/proc/{child}/cmdline").read_bytes() != command:
                    total += _anonymous_bytes(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass
    return total


def build_command(checkpoint: Path, engine: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "ingot.runtime.cli", "build", str(checkpoint), "-o", str(engine), "--force", *options]


def main() -> int:
    parser = argparse.ArgumentParser("large_build", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where checkpoint and engine go: 9 GB")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--remove", action="store_true", help="delete checkpoint and engine at the end")
    arguments = parser.parse_args()
    llama, checkpoint, engine = Llama(), arguments.folder / "model", arguments.folder / "large.engine"
    begin = time.perf_counter()
    if not (checkpoint / "model.safetensors.index.json").exists():
        write_checkpoint(llama, checkpoint)
    written = time.perf_counter() - begin
    usage = measured(build_command(checkpoint, engine, "--target", arguments.target,
                                   "--precision", arguments.precision))
    print(table([
        ("parameters", f"{llama.parameters:,} in {size(2 * llama.parameters)}, written in {written:.0f} s"),
        ("build", f"{usage.seconds:.0f} s, exit status {usage.status}"),
        ("engine", size(engine.stat().st_size) if engine.exists() else "none"),
        ("peak of anonymous memory", f"{size(usage.peak_anonymous_bytes)}; allowed are {size(ALLOWED_BYTES)}"),
    ]))
    if arguments.remove:
        shutil.rmtree(checkpoint)
        engine.unlink(missing_ok=True)
    return int(usage.status != 0 or usage.peak_anonymous_bytes > ALLOWED_BYTES)


if __name__ == "__main__":
    sys.exit(main())
