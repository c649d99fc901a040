"""The tokenizer of a checkpoint as the runtime reads it: without transformers."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .checkpoint.checkpoint import Checkpoint
from .vocabulary import vocabulary_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER, TEMPLATE, CONFIG = "tokenizer.json", "chat_template.jinja", "config.json"
VOCABULARY = "vocabulary.bin"


def tokenizer_members(checkpoint: Checkpoint) -> tuple[dict[str, bytes], list[str]]:
    """(files below tokenizer/ of the engine, warnings). An engine without a tokenizer takes and gives token ids.

    tokenizer.json       for the package tokenizers
    chat_template.jinja  where the checkpoint has one
    vocabulary.bin       names of the tokens and how short texts are encoded, before tokenizer.json has been read
    config.json          bos_token_id, eos_token_ids, the special tokens that templates name, generation defaults
    """
    tokenizer = _load(checkpoint)
    if tokenizer is None:
        return {CONFIG: _json(_ids(checkpoint, None))}, ["the checkpoint has no tokenizer: the engine takes token ids"]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {CONFIG: _json(_ids(checkpoint, tokenizer))}, [
            f"{type(tokenizer).__name__} has no tokenizer.json form: the engine takes token ids"]
    files = {TOKENIZER: backend.to_str().encode(), CONFIG: _json(_ids(checkpoint, tokenizer))}
    if (names := vocabulary_file(backend)) is not None:
        files[VOCABULARY] = names
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        files[TEMPLATE] = template.encode()
    return files, []


def _load(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer
    path = checkpoint.path
    folder = path.parent if path.is_file() else path
    options = {"gguf_file": path.name} if path.is_file() else {}
    if not options and not any((folder / name).exists() for name in (TOKENIZER, "tokenizer.model", "vocab.json")):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
    except (ValueError, OSError, KeyError, ImportError):
        return None
    return tokenizer


def _ids(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """The ids that end an answer are those of the generation config first: chat models end turns with another token
    than texts."""
    from transformers import GenerationConfig
    config = checkpoint.config.get_text_config()
    try:
        generation = GenerationConfig.from_pretrained(checkpoint.path, local_files_only=True).to_diff_dict() \
            if checkpoint.path.is_dir() else {}
    except OSError:
        generation = {}
    eos = generation.get("eos_token_id", getattr(config, "eos_token_id", None))
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    bos = getattr(config, "bos_token_id", None)
    specials = {name: str(getattr(tokenizer, name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
                if tokenizer is not None and getattr(tokenizer, name, None) is not None}
    sampling = {key: generation[key] for key in ("temperature", "top_k", "top_p", "do_sample") if key in generation}
    return {"bos_token_id": bos, "eos_token_ids": [eos] if isinstance(eos, int) else list(eos or []),
            "special_tokens": specials, "generation": sampling}


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode()
