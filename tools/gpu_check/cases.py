"""The tests of the GPU kernels (tests/plugins/gpu) as a list of cases that need no pytest to run.

Each is a test function that takes an interpreter, with one combination of its parameters. Where pytest is not installed
a stand-in holds the marks, which is all that those modules take from it.
"""
from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MODULES = ("test_linear", "test_attention", "test_rope", "test_rows", "test_experts", "test_sampling", "test_layer")


@dataclass(frozen=True)
class Case:
    """name: "linear.test_formats[fp8-fp8-tiled]"; run(interpreter) raises what the test raises."""

    name: str
    module: types.ModuleType
    run: Callable[[Any], None]


def list_cases(modules: tuple[str, ...] = MODULES) -> list[Case]:
    """Every case, in the order of the files."""
    _provide_pytest()
    return [case for name in modules for case in _of(importlib.import_module(f"tests.plugins.gpu.{name}"))]


def _of(module: types.ModuleType) -> Iterator[Case]:
    short = module.__name__.rpartition(".")[2].removeprefix("test_")
    for name, function in vars(module).items():
        code = getattr(function, "__code__", None)
        if not name.startswith("test_") or code is None or "interpreter" not in code.co_varnames[:code.co_argcount]:
            continue
        marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        for chosen in itertools.product(*(_choices(mark) for mark in reversed(marks))):
            values: dict[str, Any] = {}
            for arguments in chosen:
                values |= arguments
            shown = "-".join(str(value) for value in values.values())
            label = f"{short}.{name}" + (f"[{shown}]" if shown else "")

            yield Case(label, module, functools.partial(function, **values))


def _choices(mark: Any) -> list[dict[str, Any]]:
    """Each set of arguments of a parametrize mark."""
    names, values = mark.args[:2]
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    found = []
    for value in values:
        bare = getattr(value, "values", value) if type(value).__name__ == "ParameterSet" else value
        given = tuple(bare) if len(listed) > 1 or type(value).__name__ == "ParameterSet" else (bare,)
        found.append(dict(zip(listed, given, strict=True)))
    return found


@dataclass(frozen=True)
class Mark:
    name: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class ParameterSet:
    values: tuple[Any, ...]


class _Marks:
    def __getattr__(self, name: str) -> Any:
        def decorate(args: tuple[Any, ...], function: Any) -> Any:
            function.pytestmark = [*getattr(function, "pytestmark", []), Mark(name, args)]
            return function

        def mark(*args: Any, **options: Any) -> Any:
            if len(args) == 1 and isinstance(args[0], types.FunctionType):  # without parentheses
                return decorate((), args[0])
            return functools.partial(decorate, args)
        return mark


def stand_in() -> types.ModuleType:
    """What the tests' modules take from pytest while they are imported."""
    module = types.ModuleType("pytest")
    module.mark = _Marks()  # type: ignore[attr-defined]
    module.param = lambda *values, **options: ParameterSet(values)  # type: ignore[attr-defined]
    module.fixture = lambda *args, **options: (lambda function: function)  # type: ignore[attr-defined]
    return module


def _provide_pytest() -> None:
    if "pytest" not in sys.modules and importlib.util.find_spec("pytest") is None:
        sys.modules["pytest"] = stand_in()
