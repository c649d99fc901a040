"""The JSON schema of recipes, for editors: python -m ingot.compiler.recipe.schema > recipes/schema.json"""
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .fields import RECIPE, Field


def json_schema() -> dict[str, Any]:
    """JSON schema, draft 2020-12, made from the table that recipes are checked by."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Ingot recipe", **_object(RECIPE)}


def schema_text() -> str:
    return json.dumps(json_schema(), indent=1) + "\n"


def _object(fields: Mapping[str, Field]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False,
            "required": [name for name, field in fields.items() if field.required],
            "properties": {name: {"description": field.note, **_value(field)} for name, field in fields.items()}}


def _value(field: Field) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string", "minLength": 1} | ({"enum": list(field.choices)} if field.choices else {})
    match field.kind:
        case "text":
            return text
        case "count":
            return {"type": "integer", "minimum": 1}
        case "share":
            return {"type": "number", "minimum": 0, "maximum": 1}
        case "flag":
            return {"type": "boolean"}
        case "texts":
            return {"type": "array", "minItems": 1, "uniqueItems": True, "items": text}
        case "entries":
            return {"type": "object"}
        case "choices":
            return {"type": "object", "minProperties": 1, "additionalProperties": text}
        case "object":
            return _object(field.fields or {})
        case _:
            return {"type": "array", "minItems": 1, "items": _object(field.fields or {})}


if __name__ == "__main__":
    print(schema_text(), end="")
