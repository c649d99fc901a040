"""The runtime is thin: it answers where torch, transformers, triton and the compiler are not installed."""

import subprocess
import sys
from pathlib import Path

FORBIDDEN = ("torch", "transformers", "triton", "safetensors", "yaml", "ingot.compiler", "ingot.plugins")

_BLOCKED = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(absent + ".") for absent in {FORBIDDEN!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _BLOCKED + code, *arguments], capture_output=True, text=True)


def test_every_runtime_verb_works_alone(mock_path: Path) -> None:
    code = "from ingot.runtime.cli import main; sys.exit(main(sys.argv[1:]))"
    for verb in (["generate", str(mock_path), "Hi", "--max-tokens", "3"], ["inspect", str(mock_path)],
                 ["verify", str(mock_path)], ["doctor"]):
        done = python(code, *verb)
        assert (done.returncode, done.stderr) == (0, ""), verb
    done = python(code, "build", "x", "--target", "cpu", "--precision", "fp32")
    assert done.returncode == 2
    assert "pip install 'ingot-llm[build]'" in done.stderr


def test_the_block_blocks() -> None:
    assert "No module named 'ingot.compiler'" in python("import ingot.compiler").stderr
    assert "No module named 'torch'" in python("import torch.nn").stderr


def test_what_an_import_loads() -> None:
    """Reading engine files needs no arrays; the tokenizer and templates come with the first text and chat."""
    done = python("import ingot.runtime.engine_file; print('numpy' in sys.modules);"
                  "from ingot.runtime import Engine, SamplingParams; print('numpy' in sys.modules);"
                  "print([name for name in ('tokenizers', 'jinja2', 'numpy.random') if name in sys.modules])")
    assert done.stdout.split("\n")[:3] == ["False", "True", "[]"]
