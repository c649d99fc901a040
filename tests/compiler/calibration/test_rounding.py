"""How weights are asked to be rounded, by a build and again by a refit; what the manifest says of it."""
from __future__ import annotations

from pathlib import Path

import pytest

from ingot.compiler.build import BuildRequest
from ingot.compiler.calibration.record import calibration_record
from ingot.compiler.refit import CannotRefit, RefitRequest, _rounding
from ingot.compiler.write_weights import Rounding
from ingot.runtime.errors import RequestError


def test_what_contradicts_itself() -> None:
    with pytest.raises(RequestError, match="unknown quantization method 'awk'; known: rtn, awq, gptq, best"):
        Rounding("awk")
    with pytest.raises(RequestError, match=r"need no calibration text; leave .* out"):
        _ = BuildRequest("m", "cpu", "w4a8", calibrate=False, calibration=Path("x.txt")).rounding
    with pytest.raises(RequestError, match="awq rounds weights for the inputs that they meet: leave out either"):
        _ = BuildRequest("m", "cpu", "w4a8", calibrate=False, quantization_method="awq").rounding
    assert BuildRequest("m", "cpu", "w4a8", calibrate=False).rounding == Rounding("rtn")


def test_a_refit_rounds_as_the_build_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("a text")

    def asked(recipe: dict[str, object], text: Path | None = None) -> Rounding:
        return _rounding({"recipe": {"calibrate": True, "calibration": None, "quantization_method": "best"} | recipe},
                         RefitRequest(Path("x.engine"), "m", Path("y.engine"), calibration=text))

    assert asked({"quantization_method": "awq"}) == Rounding("awq")
    assert asked({"calibrate": False}) == Rounding("rtn")
    assert asked({"calibration": "my.txt"}, Path("my.txt")) == Rounding("best", Path("my.txt"))
    with pytest.raises(CannotRefit, match=r"were rounded with the text my\.txt; give it with"):
        asked({"calibration": "my.txt"})


def test_the_record() -> None:
    record = calibration_record(["gptq", "rtn", "awq_gptq", "gptq"], "Ingot's own text", "abc", 8192)
    assert record["num_weights"] == 3 and record["num_not_calibrated"] == 1 and record["num_tokens"] == 8192
    assert record["weights"] == {"rtn": 1, "gptq": 2, "awq_gptq": 1} and "compensation" in record["method"]
    assert calibration_record(["rtn"], "t", "abc", 9) == {"method": "none", "num_weights": 0, "num_not_calibrated": 1}
