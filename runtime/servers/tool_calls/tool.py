"""A function that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tool:
    """parameters: the JSON schema of its arguments, that of an object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schema of each argument, by name; empty where the schema does not list them."""
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}

    def property_schema(self, name: str) -> Mapping[str, Any]:
        """The schema of an argument, on its own: definitions that it may refer to come along."""
        schema = self.properties[name]
        shared = {key: self.parameters[key] for key in ("$defs", "definitions") if key in self.parameters}
        return {**shared, **schema} if isinstance(schema, dict) else {}

    @property
    def required(self) -> frozenset[str]:
        found = self.parameters.get("required")
        return frozenset(name for name in found if isinstance(name, str)) if isinstance(found, list) else frozenset()
