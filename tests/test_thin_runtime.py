"""A built engine where neither the compiler nor what it needs is installed: it answers, loads fast, allocates nothing.

tests/runtime/test_thin.py does the same with the verbs of the command line on a mock engine."""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from ingot.runtime.engine import Engine
from ingot.runtime.sampling import SamplingParams
from tests.runtime.allocations import allocations
from tests.runtime.test_thin import FORBIDDEN, python

PROMPT = [40, 41, 42, 7]
IMPORT_SECONDS = 0.8
"""Twice what is promised for a machine at rest."""


def test_a_built_engine_answers_alone(speaking_engine: Callable[..., Path]) -> None:
    code = ("import json; from ingot.runtime.engine import Engine; from ingot.runtime.sampling import SamplingParams\n"
            "with Engine.load(sys.argv[1], num_workers=1) as engine:\n"
            "    params = SamplingParams(max_tokens=12, ignore_eos=True)\n"
            "    print(json.dumps([engine.generate(json.loads(sys.argv[2]), params).token_ids,\n"
            f"                      [name for name in {FORBIDDEN!r} if name in sys.modules]]))")
    for precision in ("fp32", "w4a8"):
        engine = speaking_engine("cpu", precision)
        done = python(code, str(engine), json.dumps(PROMPT))
        assert (done.returncode, done.stderr) == (0, "")
        answer, loaded = json.loads(done.stdout)
        with Engine.load(engine, num_workers=1) as here:
            assert answer == here.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True)).token_ids
        assert len(answer) == 12 and loaded == []


def test_building_alone_tells_what_to_install(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The compiler's own modules are in every installation; what they need is not."""
    code = ("absent = Absent.find_spec\n"
            "Absent.find_spec = lambda s, name, path=None, target=None: "
            "None if name.startswith('ingot.') or name.startswith('yaml') else absent(s, name)\n"
            "from ingot.runtime.cli import main; sys.exit(main(sys.argv[1:]))")
    done = python(code, "build", str(tiny_checkpoint), "--target", "cpu", "--precision", "fp32", "--no-cache",
                  "-o", str(tmp_path / "x.engine"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "`ingot build` needs the compiler" in done.stderr and "pip install 'ingot-llm[build]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_importing_the_runtime_is_fast() -> None:
    code = ("import time; begin = time.perf_counter(); import ingot.runtime.engine; "
            "print(time.perf_counter() - begin)")
    times = [float(python(code).stdout) for _ in range(3)]
    print(f"import ingot.runtime.engine: {statistics.median(times):.3f} s", file=sys.stderr)
    assert statistics.median(times) < IMPORT_SECONDS, times


def test_no_step_but_the_first_allocates(speaking_engine: Callable[..., Path], tmp_path: Path) -> None:
    """In context and generation, in every token bucket."""
    sizes = [1] * 8 + [8, 1, 3, 5, 2, 8, 1, 4]
    for precision in ("fp32", "w4a8"):
        counts = allocations(speaking_engine("cpu", precision), sizes, tmp_path)
        assert counts[1:] == [0] * (len(sizes) - 1), precision
