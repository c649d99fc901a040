"""cp.async: copies from global to shared memory that have begun, thread by thread, in groups.

A copy's data arrive when its group is waited for, not before: until then its destination holds poison, so that who
reads too early does not pass. What is copied is read when the copy begins."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class _Copy:
    """at: offsets in shared memory [lanes]; data: u8 [lanes, size]; open: lanes whose copy has not ended; group: the
    number of each lane's group."""

    at: np.ndarray
    data: np.ndarray
    open: np.ndarray
    group: np.ndarray


class Copies:
    def __init__(self, lanes: int) -> None:
        self._committed = np.zeros(lanes, np.int64)
        self._open: list[_Copy] = []

    def begin(self, at: np.ndarray, data: np.ndarray, active: np.ndarray) -> None:
        self._open.append(_Copy(at, data, active.copy(), self._committed.copy()))

    def commit(self, active: np.ndarray) -> None:
        self._committed += active

    def wait(self, memory: np.ndarray, active: np.ndarray, but: int | None) -> None:
        """Ends all groups of the active lanes but the last `but`; None: everything, committed or not."""
        still = []
        for copy in self._open:
            ends = copy.open & active
            if but is not None:
                ends &= copy.group < self._committed - but
            size = copy.data.shape[1]
            memory.reshape(-1, size)[copy.at[ends] // size] = copy.data[ends]
            copy.open &= ~ends
            if copy.open.any():
                still.append(copy)
        self._open = still
