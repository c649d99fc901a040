"""What a recipe may hold: one table, from which the checks and the JSON schema for editors are made."""
from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.runtime.errors import RequestError

from ..calibration.record import METHODS
from ..precision import AUTO, PRECISIONS
from ..targets import architectures


class BadRecipe(RequestError):
    """A recipe is malformed; names the file, the place, what was expected and found."""


@dataclass(frozen=True)
class Field:
    """kind   "text", "count" (an integer of at least 1), "share" (a number of 0 to 1), "flag", "texts" (a list, not
           empty), "entries" (an object of any content), "choices" (an object of texts, each one of `choices`),
           "object" or "objects" (a list of them, not empty), of the fields in `fields`
    note   one sentence for the schema
    choices  for text, texts and choices: the values that are allowed, if not any
    """

    kind: str
    note: str
    required: bool = False
    fields: Mapping[str, Field] | None = None
    choices: tuple[str, ...] = ()


def _precisions() -> tuple[str, ...]:
    """Of all targets. Which of them a target has is told when the build is planned."""
    return tuple(dict.fromkeys([*PRECISIONS, *(name for arch in architectures().values() for name in arch.precisions)]))


LIMITS: Mapping[str, Field] = {
    "max_batch_size": Field("count", "Sequences in a step."),
    "max_num_tokens": Field("count", "Tokens in a step."),
    "max_seq_len": Field("count", "Tokens of a sequence, prompt and answer together."),
}
LORA: Mapping[str, Field] = {
    "max_rank": Field("count", "Largest rank of an adapter, 1 to 256.", required=True),
    "max_adapters": Field("count", "Adapters that are served at once (default 4)."),
    "modules": Field("texts", "Linear layers that they may change, such as q_proj; default: all but the head, routers "
                     "and experts."),
}
QUALITY: Mapping[str, Field] = {
    "measure": Field("flag", "Run the engine over a held-out text and record how far it is from the model."),
    "max_perplexity_increase": Field("share", "Fail if its perplexity is further above the model's: 0.01 for one per "
                                     "cent."),
    "min_top1_agreement": Field("share", "Fail if it agrees less often with the model on the most probable token."),
    "max_kl_divergence": Field("share", "Fail if its predictions diverge further from the model's, in nats: 0.005."),
}
_SHARED: Mapping[str, Field] = {
    "limits": Field("object", "What an engine is made for; the defaults are those of ingot build.", fields=LIMITS),
    "quality": Field("object", "What is measured on this machine after the build, and what fails it.", fields=QUALITY),
    "layers": Field("choices", "Pattern of names of layers, with * and ? -> their precision; the most exact pattern "
                    "decides.", choices=_precisions()),
    "lora": Field("object", "Room for LoRA adapters, which servers load while they run.", fields=LORA),
    "tensor_parallel": Field("count", "GPUs that one engine is divided among (default 1)."),
    "kv_precision": Field("text", "Element type of the KV cache; default: the precision's own."),
    "calibrate": Field("flag", "Round weights of 4 bits for the inputs they meet (default true)."),
    "calibration": Field("text", 'Text file, or JSONL with a "text" in each line, that the model is run on for it; '
                         "relative to the recipe. Default: one that ships with the compiler."),
    "group_size": Field("count", "Input channels that share a scale in four-bit integers on GPUs: 32, 64 or 128; "
                        "default: 128, or what the checkpoint is quantized in."),
    "group_minimums": Field("flag", "Whether each of these groups has a minimum too (default true)."),
    "quantization_method": Field("text", "How weights of 4 bits are rounded; default: what errs least, layer by layer.",
                                 choices=tuple(METHODS)),
    "tuning_records": Field("text", "What ingot tune has measured: which kernels of a CPU target are the fastest; "
                            "relative to the recipe."),
    "self_test": Field("flag", "Run the engine on this machine and record in it what it answers, for servers to ask "
                       "again before it takes over."),
    "compiler": Field("text", "C compiler of CPU targets: the pinned zig (default), or this machine's cc.",
                      choices=("zig", "cc")),
}
BUILD: Mapping[str, Field] = {
    "targets": Field("texts", "What to build for; each with each precision. See: ingot targets.", required=True),
    "precisions": Field("texts", "Each with each target. auto: found for each layer.", required=True,
                        choices=(*_precisions(), AUTO)),
    **_SHARED,
}
RECIPE: Mapping[str, Field] = {
    "model": Field("text", "Hub name, or a folder or GGUF file: a path that starts with / ./ ../ or ~ and is relative "
                   "to the recipe.", required=True),
    "name": Field("text", "What the engines call the model, and what their files' names start with; default: the last "
                  "part of model."),
    "config": Field("entries", "The model's config.json, for a dry run where the checkpoint is not there."),
    "builds": Field("objects", "Matrices of targets and precisions; they share everything above them.", required=True,
                    fields=BUILD),
    **_SHARED,
}


def check(value: Any, fields: Mapping[str, Field], file: str, place: str = "") -> None:
    """Raises BadRecipe for the first thing that is wrong in an object of these fields."""
    where = f"{file}: {place or 'the recipe'}"
    if not isinstance(value, dict):
        raise BadRecipe(f"{where}: expected an object with some of {', '.join(fields)}; got {_shown(value)}")
    for name in value:
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise BadRecipe(f"{where}: unknown key {str(name)!r}.{hint}\n  Valid keys: {', '.join(fields)}")
    for name, field in fields.items():
        if name in value:
            _check_value(value[name], field, file, f"{place}.{name}" if place else name)
        elif field.required:
            raise BadRecipe(f"{where}: {name} is missing. {field.note}")


def _check_value(value: Any, field: Field, file: str, place: str) -> None:
    def wrong(expected: str) -> BadRecipe:
        return BadRecipe(f"{file}: {place}: expected {expected}, got {_shown(value)}")

    match field.kind:
        case "text":
            if not isinstance(value, str) or not value:
                raise wrong("a text")
            _check_choice(value, field, file, place)
        case "count":
            if type(value) is not int or value < 1:
                raise wrong("an integer of at least 1")
        case "share":
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise wrong("a number of 0 to 1")
        case "flag":
            if not isinstance(value, bool):
                raise wrong("true or false")
        case "texts":
            if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
                raise wrong("a list of texts")
            if len(set(value)) < len(value):
                raise wrong("a list without repetition")
            for number, item in enumerate(value):
                _check_choice(item, field, file, f"{place}[{number}]")
        case "entries":
            if not isinstance(value, dict):
                raise wrong("an object")
        case "choices":
            if not isinstance(value, dict) or not value or not all(
                    isinstance(text, str) and text for pair in value.items() for text in pair):
                raise wrong("an object of texts")
            for name, choice in value.items():
                _check_choice(choice, field, file, f"{place}[{name!r}]")
        case "object":
            check(value, field.fields or {}, file, place)
        case "objects":
            if not isinstance(value, list) or not value:
                raise wrong("a list of objects")
            for number, item in enumerate(value):
                check(item, field.fields or {}, file, f"{place}[{number}]")


def _check_choice(value: str, field: Field, file: str, place: str) -> None:
    if field.choices and value not in field.choices:
        near = difflib.get_close_matches(value, field.choices, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise BadRecipe(f"{file}: {place}: unknown value {value!r}.{hint}\n  Valid values: {', '.join(field.choices)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
