"""The C text of kernels."""
from __future__ import annotations

import pytest

from ingot.plugins.kernel import CpuKernel, translation_unit


def test_includes_and_definitions_appear_once() -> None:
    a = CpuKernel("a", "quantize/quantize.h", "int x = 0;\n\n(void)x;")
    b = CpuKernel("b", "quantize/quantize.h", "", prelude="static const int b_table[1] = {7};")
    text = translation_unit([a, b, a])
    assert text.count('#include "quantize/quantize.h"') == 1
    assert text.count("INGOT_EXPORT void a(") == 1
    assert "    int x = 0;\n\n    (void)x;\n}\n" in text
    assert text.index("b_table") < text.index("INGOT_EXPORT void b(")


def test_two_kernels_of_one_name_are_refused() -> None:
    with pytest.raises(AssertionError, match="share a symbol"):
        translation_unit([CpuKernel("a", "", "x();"), CpuKernel("a", "", "y();")])
