"""The graph side stands on numpy alone: torch is loaded only where a model is traced."""
from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["ir.registry", "ir.interpret", "ir.verify", "ir.dump", "weights.evaluate",
                                    "checkpoint.open", "checkpoint.checkpoint", "importer.importer"])
def test_torch_is_not_loaded(module: str) -> None:
    code = (f"import sys, ingot.compiler.{module}\n"
            "print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
