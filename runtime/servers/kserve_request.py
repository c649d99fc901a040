"""A ModelInfer request as what it asks the engine for, under the names that users of Triton's backends know.

A parameter may be given as an input tensor, in `parameters`, or as a key of the input sampling_parameters (a JSON
object, as Triton's vLLM backend takes it), but only once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..sampling import Guide, SamplingParams
from .generation import sampling_params
from .grpc_errors import InvalidField, Unsupported
from .kserve_tensors import BOOLEANS, FLOATS, INTEGERS, TEXTS, read_inputs
from .proto import kserve_v2_pb2 as pb


class Input(NamedTuple):
    """types: the data types it may come as, the first one is what metadata tells. is_list: any number of elements."""

    types: tuple[str, ...]
    is_list: bool = False


_INTEGER = ("INT32", *sorted(INTEGERS - {"INT32"}))
_NUMBER = ("FP32", *sorted(FLOATS - {"FP32"}), *_INTEGER)
_TEXT, _BOOLEAN = tuple(TEXTS), tuple(BOOLEANS)
INPUTS: dict[str, Input] = {
    "text_input": Input(_TEXT),
    "input_ids": Input(("INT64", *sorted(INTEGERS - {"INT64"})), is_list=True),
    "stream": Input(_BOOLEAN),
    "max_tokens": Input(_INTEGER),
    "min_tokens": Input(_INTEGER),
    "temperature": Input(_NUMBER),
    "top_k": Input(_INTEGER),
    "top_p": Input(_NUMBER),
    "min_p": Input(_NUMBER),
    "seed": Input(("UINT64", *sorted(INTEGERS - {"UINT64"}))),
    "repetition_penalty": Input(_NUMBER),
    "presence_penalty": Input(_NUMBER),
    "frequency_penalty": Input(_NUMBER),
    "stop": Input(_TEXT, is_list=True),
    "stop_token_ids": Input(_INTEGER, is_list=True),
    "bad_words": Input(_TEXT, is_list=True),
    "ignore_eos": Input(_BOOLEAN),
    "skip_special_tokens": Input(_BOOLEAN),
    "return_log_probs": Input(_BOOLEAN),
    "priority": Input(_INTEGER),
    "cache_salt": Input(_TEXT),
    "lora_name": Input(_TEXT),
    "sampling_parameters": Input(_TEXT),
    "guided_decoding_guide_type": Input(_TEXT),
    "guided_decoding_guide": Input(_TEXT),
    "exclude_input_in_output": Input(_BOOLEAN),
}
# Other names of the same parameters, from Triton's TensorRT-LLM backend.
ALIASES = {"request_output_len": "max_tokens", "min_length": "min_tokens", "random_seed": "seed", "stop_words": "stop",
           "exclude_input_from_output": "exclude_input_in_output"}
OUTPUTS = {"text_output": "BYTES", "output_ids": "INT64", "finish_reason": "BYTES", "num_input_tokens": "UINT32",
           "num_output_tokens": "UINT32", "output_log_probs": "FP32", "cum_log_probs": "FP32"}
LOG_PROBS = ("output_log_probs", "cum_log_probs")

_GUIDE_TYPE, _GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
_GUIDES = {"json": "json_object", "json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "grammar"}
_SAMPLING = frozenset(INPUTS) - {"text_input", "input_ids", "stream", "return_log_probs", "priority", "cache_salt",
                                 "lora_name", "sampling_parameters", "exclude_input_in_output", _GUIDE_TYPE, _GUIDE}
_FINAL_RESPONSE = "triton_enable_empty_final_response"


@dataclass(frozen=True)
class InferRequest:
    """outputs: names of the tensors to give. names: the engine's name of a parameter -> where the request has it."""

    text: str | None
    input_ids: list[int] | None
    params: SamplingParams
    stream: bool
    outputs: tuple[str, ...]
    raw: bool
    marks_final: bool
    priority: int
    cache_salt: str | None
    lora: str | None
    names: dict[str, str] = field(repr=False)


def parse_infer(request: pb.ModelInferRequest, has_tokenizer: bool) -> InferRequest:
    """Raises InvalidField or Unsupported."""
    values, names = _parameters(request)
    marks_final = bool(values.pop(_FINAL_RESPONSE, False))
    if values.get("exclude_input_in_output") is False:
        raise Unsupported(names["exclude_input_in_output"], "the prompt is never part of the output; expected true")
    text, ids = values.get("text_input"), values.get("input_ids")
    if (text is None) == (ids is None):
        raise InvalidField("inputs", "expected either text_input or input_ids")
    outputs = _outputs(request, has_tokenizer, bool(values.get("return_log_probs")))
    sampling = {name: value for name, value in values.items() if name in _SAMPLING}
    if any(name in LOG_PROBS for name in outputs):
        sampling["logprobs"] = 0
    sampling["guide"] = _guide(values, names)
    names["lora"] = names.get("lora_name", "lora_name")
    names.setdefault("prompt_token_ids", names["text_input" if ids is None else "input_ids"])
    return InferRequest(text, ids, sampling_params(sampling, names), bool(values.get("stream")), outputs,
                        bool(request.raw_input_contents), marks_final, values.get("priority", 0),
                        values.get("cache_salt"), values.get("lora_name"), names)


def _parameters(request: pb.ModelInferRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """(parameter -> value, parameter -> path of the field that it was found in)."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}

    def put(name: str, value: Any, where: str) -> None:
        name = ALIASES.get(name, name)
        if name in values:
            raise InvalidField(where, f"{name} is given twice; the other one is {names[name]}")
        values[name], names[name] = value, where

    for index, (name, datatype, elements) in enumerate(read_inputs(request)):
        where = f"inputs[{index}] ({name[:40]})"
        known = INPUTS.get(ALIASES.get(name, name))
        if known is None:
            raise InvalidField(where, f"there is no such input; the inputs are: {', '.join(INPUTS)}")
        if datatype not in known.types:
            raise InvalidField(where, f"has data type {datatype}; expected {' or '.join(known.types)}")
        if not known.is_list and len(elements) != 1:
            raise InvalidField(where, f"has {len(elements)} elements; expected one")
        if datatype == "BYTES":
            elements = [_decode(element, where) for element in elements]
        put(name, elements if known.is_list else elements[0], where)
    for name, parameter in request.parameters.items():
        where = f"parameters[{name[:40]!r}]"
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidField(where, "has no value")
        put(name, _checked(name, getattr(parameter, kind), where, also=_FINAL_RESPONSE), where)
    if "sampling_parameters" in values:
        where = names["sampling_parameters"]
        for name, value in _json_object(values["sampling_parameters"], where).items():
            inside = f"{where}.{name[:40]}"
            put(name, _checked(name, value, inside), inside)
    return values, names


def _checked(name: str, value: Any, where: str, also: str = "") -> Any:
    """A parameter that did not come as a tensor. Raises InvalidField unless it is of the right kind."""
    if name == also:
        return value
    known = INPUTS.get(ALIASES.get(name, name))
    if known is None or name in ("text_input", "input_ids", "sampling_parameters"):
        raise InvalidField(where, f"there is no such parameter; the parameters are: {', '.join(sorted(INPUTS))}")
    if known.is_list:
        elements = value if isinstance(value, list) else [value]
        if not all(_is_kind(each, known.types) for each in elements):
            raise InvalidField(where, f"expected a list of {known.types[0]}")
        return elements
    if not _is_kind(value, known.types):
        raise InvalidField(where, f"is of the wrong kind; expected {known.types[0]}")
    return value


def _is_kind(value: Any, types: tuple[str, ...]) -> bool:
    kinds: dict[str, Callable[[Any], bool]] = {
        "BYTES": lambda each: isinstance(each, str), "BOOL": lambda each: isinstance(each, bool),
        "FP32": lambda each: isinstance(each, (int, float)) and not isinstance(each, bool)}
    return kinds.get(types[0], lambda each: isinstance(each, int) and not isinstance(each, bool))(value)


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField(where, f"is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidField(where, "expected a JSON object")
    return parsed


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField(where, f"is not valid UTF-8 at byte {error.start} ({error.reason})") from None


def _guide(values: dict[str, Any], names: dict[str, str]) -> Guide | None:
    """Also says where errors about the guide have their field."""
    given = [name for name in (_GUIDE_TYPE, _GUIDE) if name in values]
    if not given:
        return None
    where = names["guide"] = names[given[-1]]
    kind = values.get(_GUIDE_TYPE)
    if kind not in _GUIDES:
        raise InvalidField(names.get(_GUIDE_TYPE, where), f"{_GUIDE_TYPE}: expected one of {', '.join(_GUIDES)}")
    if kind != "json" and not values.get(_GUIDE):
        raise InvalidField(where, f"{_GUIDE}: expected the schema, pattern or grammar")
    return Guide(_GUIDES[kind], values.get(_GUIDE, ""))


def _outputs(request: pb.ModelInferRequest, has_tokenizer: bool, log_probs: bool) -> tuple[str, ...]:
    for index, output in enumerate(request.outputs):
        where = f"outputs[{index}]"
        if output.name not in OUTPUTS:
            raise InvalidField(f"{where}.name", f"there is no output {output.name[:40]!r}; the outputs are: "
                                                f"{', '.join(OUTPUTS)}")
        if output.parameters:
            raise InvalidField(f"{where}.parameters", f"{min(output.parameters)[:40]!r} is not supported")
        if output.name == "text_output" and not has_tokenizer:
            raise InvalidField(f"{where}.name", "this engine has no tokenizer; ask for output_ids")
    if request.outputs:
        return tuple(dict.fromkeys(output.name for output in request.outputs))
    return tuple(name for name in OUTPUTS
                 if (name not in LOG_PROBS or log_probs) and (name != "text_output" or has_tokenizer))
