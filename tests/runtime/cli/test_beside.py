"""Work in a process of its own, tried in fresh processes."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.runtime.cli.beside import Beside
from ingot.runtime.engine import Engine
from ingot.runtime.sampling import SamplingParams

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


def fresh(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)


def test_the_result_comes_back() -> None:
    done = fresh("from ingot.runtime.cli.beside import Beside\nimport os\n"
                 "beside = Beside.start(lambda: [os.getpid(), list(range(100_000))])\n"
                 "pid, numbers = beside.result()\n"
                 "assert pid != os.getpid() and numbers == list(range(100_000))\n"
                 "try:\n    os.waitpid(-1, 0)\nexcept ChildProcessError:\n    print('gone')")
    assert (done.stdout, done.stderr, done.returncode) == ("gone\n", "", 0)


@pytest.mark.parametrize("work", ["1 / 0", "exit(3)", "os.kill(os.getpid(), 9)", "object()"])
def test_work_that_fails_gives_nothing_and_says_nothing(work: str) -> None:
    done = fresh("from ingot.runtime.cli.beside import Beside\nimport os\n"
                 f"print(Beside.start(lambda: {work}).result())")
    assert done.stdout == "None\n" and done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_with_libraries_is_not_forked() -> None:
    assert "numpy" in sys.modules and Beside.start(lambda: 1) is None


def test_generate_encodes_its_prompt_there(speaking_engine: Callable[..., Path]) -> None:
    """The process that answers never reads the tokenizer; the answer is that of the API."""
    path = str(speaking_engine())
    script = ("import sys\nfrom ingot.runtime.cli import main\n"
              "status = main(['generate', *sys.argv[1:], '--max-tokens', '5', '--ignore-eos'])\n"
              "print('tokenizers' in sys.modules, status, file=sys.stderr)")
    done = fresh(script, path, "hello there", "--raw")
    assert done.stderr == "False 0\n", done.stderr
    with Engine.load(path) as engine:
        answer = engine.generate("hello there", SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert done.stdout == f"{answer.text}\n"


def test_an_error_there_is_told_here(speaking_engine: Callable[..., Path], tmp_path: Path) -> None:
    script = "import sys\nfrom ingot.runtime.cli import main\nsys.exit(main(['generate', *sys.argv[1:]]))"
    done = fresh(script, str(tmp_path / "none.engine"), "hello")
    assert done.returncode == 2 and done.stderr.count("none.engine") == 1 and "Traceback" not in done.stderr
    done = fresh(script, str(speaking_engine()), "word " * 500, "--raw")
    assert done.returncode == 2 and done.stderr.startswith("ingot: PromptError"), done.stderr
