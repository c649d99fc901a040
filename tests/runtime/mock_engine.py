"""A real engine of a model that is small enough to be written by hand, with a reference in numpy.

The model: each token has an embedding, written to the K cache of its only layer (and twice it to the V cache). What
the token sees is the mean over its context, read back from the cache; logits are its products with the head. Sums run
over the context in order, so that results are equal bit for bit whatever the batch, the bucket and the chunks are.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ingot.compiler.cpu.isa import host_isa
from ingot.compiler.cpu.toolchain import compile_shared
from ingot.compiler.engine_writer import EngineWriter
from ingot.plugins.cpu.ceilings import CEILINGS
from ingot.plugins.kernel import INCLUDE_DIR, translation_unit
from ingot.plugins.sampling.cpu import sampling
from ingot.runtime.manifest import canonical_json
from ingot.runtime.program import PLAN_VERSION

DIM, HEADS, VOCAB_SIZE, BLOCK_SIZE = 16, 2, 258, 4
BOS, EOS = 256, 257
VALUE_OFFSET = 4 * BLOCK_SIZE * DIM + 64
BLOCK_BYTES = 2 * VALUE_OFFSET  # a gap of 64 bytes behind keys and behind values
LIMITS = {"max_batch_size": 4, "max_num_tokens": 16, "max_seq_len": 48}
BUCKETS = (1, 4, 16)
TEMPLATE = "{% for m in messages %}{{ m.role[0] + ':' + m.content + '|' }}{% endfor %}{{ bos_token }}a:"

_rng = np.random.default_rng(1)
TABLE = _rng.standard_normal((VOCAB_SIZE, DIM)).astype(np.float32)
HEAD = _rng.standard_normal((VOCAB_SIZE, DIM)).astype(np.float32)


def reference_means(tokens: list[int]) -> np.ndarray:
    return np.cumsum(TABLE[tokens], axis=0) / np.arange(1, len(tokens) + 1, dtype=np.float32)[:, None]


def reference_logits(tokens: list[int], head: np.ndarray = HEAD) -> np.ndarray:
    """[T, VOCAB_SIZE], equal to the engine's but for rounding."""
    return np.asarray(reference_means(tokens) @ head.T)


def reference_greedy(tokens: list[int], count: int, head: np.ndarray = HEAD) -> list[int]:
    """The answer to a prompt; shorter than `count` where EOS comes."""
    tokens = list(tokens)
    begin = len(tokens)
    while len(tokens) < begin + count and tokens[-1] != EOS:
        tokens.append(int(reference_logits(tokens, head)[-1].argmax()))
    return tokens[begin:]


def compile_code(folder: Path) -> bytes:
    """The shared object of the mock model, for this machine."""
    include = INCLUDE_DIR / "cpu"
    out = folder / "model.so"
    sizes = (f"enum {{ DIM = {DIM}, HEADS = {HEADS}, VOCAB = {VOCAB_SIZE}, BLOCK = {BLOCK_SIZE},\n"
             f"       BLOCK_BYTES = {BLOCK_BYTES} }};\n")
    kernels = sizes + Path(__file__).with_name("mock_kernels.c").read_text()
    sources = {"pool.c": (include / "pool.c").read_text(), "kernels.c": kernels,
               "sampling.c": translation_unit(sampling(VOCAB_SIZE)),
               "ceilings.c": translation_unit(CEILINGS.values())}
    compile_shared(sources, host_isa(), [INCLUDE_DIR, include], out)
    return out.read_bytes()


def bucket(tokens: int) -> dict[str, Any]:
    """One bucket of the plan. x and y have their own room: 16 tokens need 1024 bytes each."""
    x, y, logits = 0, 64 * tokens, 128 * tokens
    cache: list[list[Any]] = [["kv", 0, "k"], ["kv", 0, "v"], ["input", "block_tables"]]
    rows = min(tokens, LIMITS["max_batch_size"])
    return {
        "tokens": tokens,
        "arena_bytes": logits + rows * VOCAB_SIZE * 4,
        "outputs": {"logits": {"offset": logits, "width": VOCAB_SIZE, "dtype": "f32"}},
        "launches": [
            {"kernel": "mock_embed", "op": "embedding",
             "args": [["input", "token_ids"], ["weight", "table"], ["arena", x]],
             "origin": "embed (mock.py:1)", "writes": {"x": {"arg": 2, "shape": [1, "T", DIM], "dtype": "f32"}}},
            {"kernel": "mock_store", "op": "kv_write", "args": [["arena", x], *cache], "origin": "layers.0.attn"},
            {"kernel": "mock_mean", "op": "attention", "args": [["null"], *cache, ["arena", y]],
             "origin": "layers.0.attn", "writes": {"y": {"arg": 4, "shape": ["T", DIM], "dtype": "f32"}}},
            {"kernel": "mock_logits", "op": "linear",
             "args": [["arena", y], ["weight", "head"], ["input", "logit_rows"], ["arena", logits]],
             "origin": "head", "writes": {"logits": {"arg": 3, "shape": ["L", VOCAB_SIZE], "dtype": "f32"}}},
            *({"kernel": kernel.symbol, "op": "sampling", "args": [["arena", logits]], "origin": "sampling"}
              for kernel in sampling(VOCAB_SIZE)),
        ],
    }


def plan(blobs: dict[str, str]) -> dict[str, Any]:
    """blobs: weight name -> SHA-256 of its data."""
    return {
        "version": PLAN_VERSION,
        "kv": {"block_size": BLOCK_SIZE, "block_bytes": BLOCK_BYTES, "windows": [None], "slots": [
            {"slot": 0, "table": 0, "heads": HEADS, "key_dim": DIM // HEADS, "value_dim": DIM // HEADS, "dtype": "f32",
             "key_offset": 0, "value_offset": VALUE_OFFSET}]},
        "weights": {name: {"blob": blob, "size": TABLE.nbytes, "label": name, "shape": TABLE.shape,
                           "scheme": "fp32"} for name, blob in blobs.items()},
        "buckets": [bucket(tokens) for tokens in BUCKETS],
        "probes": {"embed": "x", "layers.0": "y"},
    }


def tokenizer_json() -> bytes:
    """One token a byte, as byte-level BPE has them before any merge, then <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer.to_str().encode()


def manifest(**changes: Any) -> dict[str, Any]:
    """changes: target, limits, … whole fields."""
    isa = host_isa()
    return {
        "ingot_version": "0.1.0",
        "model": {"name": "mock", "architecture": "MockForCausalLM", "config_sha256": "0" * 64,
                  "hidden_size": TABLE.shape[1], "num_layers": 1, "num_heads": 1},
        "target": {"name": f"cpu:{isa.name}", "isa": isa.name, "machine": isa.machine,
                   "features": sorted(isa.required)},
        "precision": "fp32",
        "limits": LIMITS,
        "kernels": [{"name": "mock_embed", "launches": {str(tokens): 1 for tokens in BUCKETS}}],
        "memory": {"weights_bytes": 2 * TABLE.nbytes, "arena_bytes": bucket(16)["arena_bytes"],
                   "kv_block_size": BLOCK_SIZE, "kv_block_bytes": BLOCK_BYTES,
                   "kv_tables": [{"window": None, "layers": 1}], "kv_bytes_per_token": BLOCK_BYTES // BLOCK_SIZE,
                   "kv_bytes_per_token_beyond_windows": BLOCK_BYTES // BLOCK_SIZE},
        "toolchain": {"c_compiler": "any"},
        **changes,
    }


def write_engine(path: Path, code: bytes, *, edit_plan: Any = None, with_tokenizer: bool = True,
                 before_finish: Any = None, head: np.ndarray = HEAD, table: np.ndarray = TABLE,
                 **changes: Any) -> Path:
    """edit_plan(plan) changes it in place; before_finish(writer, manifest) adds members; `changes` replace fields of
    the manifest."""
    with EngineWriter(path) as writer:
        blobs = {name: writer.add_weight(data).removeprefix("weights/").removesuffix(".bin")
                 for name, data in (("table", table), ("head", head))}
        the_plan = plan(blobs)
        if edit_plan is not None:
            edit_plan(the_plan)
        writer.add("plan.json", canonical_json(the_plan))
        writer.add("code/model.so", code)
        if with_tokenizer:
            writer.add("tokenizer/tokenizer.json", tokenizer_json())
            writer.add("tokenizer/chat_template.jinja", TEMPLATE.encode())
        config = {"eos_token_ids": [EOS], "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"}}
        writer.add("tokenizer/config.json", json.dumps(config).encode())
        if before_finish is not None:
            before_finish(writer, manifest(**changes))
        writer.finish(manifest(**changes))
    return path
