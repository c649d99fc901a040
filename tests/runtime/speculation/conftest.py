"""Speculation that does not ask for its gain."""

import pytest

from ingot.runtime.speculation.step_times import StepTimes


@pytest.fixture
def free_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps take the same time, so that every draft is worth it: tests don't depend on the clock."""
    monkeypatch.setattr(StepTimes, "known", lambda self: [(1, 1.0), (1 << 20, 1.0)])
