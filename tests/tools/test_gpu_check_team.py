"""Section "team" of gpu_check, on fake drivers with one GPU and with several."""
from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from ingot.runtime.devices.cuda_driver import Driver
from tests.runtime.devices.fake_cuda import FakeCuda
from tools.gpu_check import report, team

from .test_gpu_check_engines import TARGET, fake_for, packed, use


def started(**options: object) -> Driver:
    fake = FakeCuda({}, **options)  # type: ignore[arg-type]
    fake.cuInit(0)
    return Driver(fake)


def test_one_gpu_is_no_team(tmp_path: Path) -> None:
    rows = team.check_teams(packed(tmp_path, []), tmp_path, started(), 0)
    assert [row.ranks for row in rows] == [2, 4, 8] and not any(row.problem for row in rows)
    assert rows[0].skipped == "needs 2 GPUs that reach each other; this one reaches no other"
    results = {"team": [asdict(row) for row in rows]}
    assert not report.failures(results) and "skipped: needs 8 GPUs" in report.as_text(results)


def test_a_team_is_those_that_reach_each_other(tmp_path: Path) -> None:
    driver = started(num_gpus=4, apart=((0, 2), (0, 3), (1, 2), (1, 3)))
    first, second, third = team.check_teams(packed(tmp_path, []), tmp_path, driver, 3)
    assert first.device == "cuda:3,2" and first.problem == "not in the pack: it could not be built"
    assert second.skipped == third.skipped.replace("8", "4") == (
        "needs 4 GPUs that reach each other; 2 of this machine's do")
    assert report.failures({"team": [asdict(first), asdict(second)]}) == [f"engine of 2 ranks: {first.problem}"]


@pytest.mark.slow
def test_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_SIZES", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32})
    pack = packed(tmp_path, list(team.make(tmp_path, TARGET, ranks=(2,))))
    fake = fake_for(tmp_path / "team.2.engine", num_gpus=2)
    use(fake, monkeypatch)
    row, *_ = team.check_teams(pack, tmp_path / "out", Driver(fake), 0)
    assert not row.problem and row.emulator_error == 0 and row.device == "cuda:0,1"
    assert row.num_exchanges == 5 and row.exchange_us > 0  # two a layer, and the logits'
    fake.assert_nothing_held()
