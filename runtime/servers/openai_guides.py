"""The form that an answer must have, as OpenAI's and vLLM's requests say it."""

import json
from typing import Any

from ..sampling import Guide
from . import openai_fields as fields
from .openai_errors import invalid


def guide(body: dict[str, Any]) -> Guide | None:
    """From response_format, as OpenAI has it, or structured_outputs, as vLLM has it."""
    if "response_format" in body and "structured_outputs" in body:
        raise invalid("response_format", "response_format: not together with structured_outputs")
    if "structured_outputs" in body:
        return _structured_outputs(body["structured_outputs"])
    form = body.get("response_format", {"type": "text"})
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide("json_object")
    if kind != "json_schema":
        raise invalid("response_format.type", f"response_format.type is {str(kind)[:40]!r}; "
                                              "expected text, json_object or json_schema")
    described = fields.mapping("response_format.json_schema", form.get("json_schema"))
    schema = fields.mapping("response_format.json_schema.schema", described.get("schema"))
    return Guide("json_schema", json.dumps(schema))


def _structured_outputs(given: dict[str, Any]) -> Guide:
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1 or not set(given) <= {"json", "json_object", "regex", "grammar", "choice"}:
        raise invalid("structured_outputs", "structured_outputs: expected exactly one of json, json_object, regex, "
                                            f"grammar and choice; got {', '.join(given)[:100] or 'none'}")
    (name, value), = given.items()
    where = f"structured_outputs.{name}"
    if name == "json_object":
        if not fields.boolean(where, value):
            raise invalid(where, f"{where}: false asks for nothing; leave it out")
        return Guide("json_object")
    if name == "choice":
        return Guide("choice", choices=tuple(fields.list_of(fields.text)(where, value)))
    if name == "json":
        return Guide("json_schema", value if type(value) is str else json.dumps(fields.mapping(where, value)))
    return Guide(name, fields.text(where, value))
