"""Generated modules: their name is their text's, and what they import is a part of their identity."""
from __future__ import annotations

import inspect
import sys

import pytest

from ingot.plugins.gpu.generated import module_name, module_of
from ingot.plugins.gpu.sources import source_digest

TEXT = '"""A module."""\n\n\ndef doubled(x):\n    return 2 * x\n'


def test_a_text_becomes_a_module_once() -> None:
    module = module_of(module_name(TEXT), TEXT)
    assert module.doubled(4) == 8 and module_of(module_name(TEXT), TEXT) is module
    assert inspect.getsource(module.doubled).startswith("def doubled"), "Triton reads a function's lines"


def test_another_text_than_the_name_tells() -> None:
    name = module_name(TEXT)
    with pytest.raises(ValueError, match="is another text"):
        module_of(name, TEXT + "\n")
    assert name not in sys.modules or sys.modules[name].doubled(1) == 2


def test_a_text_that_fails_leaves_no_module() -> None:
    text = "raise KeyError('broken')\n"
    for _ in range(2):
        with pytest.raises(KeyError, match="broken"):
            module_of(module_name(text), text)
    assert module_name(text) not in sys.modules


def test_modules_of_files_are_imported() -> None:
    assert module_of("ingot.plugins.gpu.kernel").GpuKernel


def test_imports_take_part_in_the_digest() -> None:
    plain = source_digest(module_name(TEXT), TEXT)
    text = "from ingot.plugins.gpu.math import narrow\n" + TEXT
    assert len({plain, source_digest(module_name(text), text), source_digest("ingot.plugins.gpu.math")}) == 3
    assert source_digest(module_name(TEXT), TEXT) == plain
