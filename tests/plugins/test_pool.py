"""The worker pool: every worker runs every launch, nobody overtakes, steps follow each other however they are timed."""

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.cpu.isa import host_isa
from ingot.compiler.cpu.toolchain import compile_shared
from ingot.plugins.kernel import INCLUDE_DIR
from ingot.runtime.devices.native_code import Launch, Step

WIDTH = 16

# dst[w] = (sum of all of src) + w: wrong if any worker of the launch before has not finished.
_SOURCE = """
#include "pool.h"
INGOT_EXPORT void add_up(const ingot_step *step, void *const *args, int worker, int num_workers) {
    const uint64_t *src = args[0];
    uint64_t *dst = args[1], sum = (uint64_t)step->num_tokens;
    for (int i = 0; i < num_workers; i++) sum += src[i];
    if (worker == step->num_seqs) for (volatile int i = 0; i < 20000; i++) {}
    dst[worker] = sum * 3 + (uint64_t)worker;
}
// Waits for the first of two numbers to become 1, for some seconds; sets the second if it did.
INGOT_EXPORT void wait_for_flag(const ingot_step *step, void *const *args, int worker, int num_workers) {
    volatile uint64_t *flag = args[0];
    (void)step;
    (void)num_workers;
    for (int64_t i = 0; i < (int64_t)1 << 32 && !flag[0]; i++) {}
    if (worker == 0) flag[1] = flag[0];
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("pool")
    sources = {"pool.c": (INCLUDE_DIR / "cpu" / "pool.c").read_text(), "kernel.c": _SOURCE}
    compile_shared(sources, host_isa(), [INCLUDE_DIR / "cpu"], folder / "pool.so")
    library = ctypes.CDLL(str(folder / "pool.so"), use_errno=True)
    library.ingot_pool_create.restype = ctypes.c_void_p
    library.ingot_pool_destroy.argtypes = [ctypes.c_void_p]
    library.ingot_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(Step), ctypes.POINTER(Launch), ctypes.c_int,
                                  ctypes.c_int]
    library.ingot_start.argtypes = library.ingot_run.argtypes
    library.ingot_wait.argtypes = [ctypes.c_void_p]
    library.ingot_profile.argtypes = [*library.ingot_run.argtypes, ctypes.c_void_p]
    return library


class Chain:
    """Launches that read one of two arrays and write the other, in turn; and what they should give."""

    def __init__(self, library: ctypes.CDLL, num_workers: int, num_launches: int) -> None:
        self.library, self.num_workers = library, num_workers
        self.pool = library.ingot_pool_create(num_workers)
        assert self.pool
        self.data = np.zeros((2, WIDTH), np.uint64)
        self.expected = np.zeros((2, WIDTH), np.uint64)
        kernel = ctypes.addressof(ctypes.c_char.in_dll(library, "add_up"))
        rows = [row.ctypes.data for row in self.data]
        self.args = [(ctypes.c_void_p * 2)(rows[i], rows[1 - i]) for i in range(2)]
        self.launches = (Launch * num_launches)(
            *(Launch(kernel, ctypes.addressof(self.args[i % 2])) for i in range(num_launches)))

    def run(self, begin: int, end: int, tokens: int = 1, slow_worker: int = -1, pause: float | None = None) -> None:
        """pause: seconds between the start of the step and the wait for its end."""
        step = Step(num_tokens=tokens, num_seqs=slow_worker)
        if pause is None:
            self.library.ingot_run(self.pool, step, self.launches, begin, end)
        else:
            self.library.ingot_start(self.pool, step, self.launches, begin, end)
            time.sleep(pause)
            self.library.ingot_wait(self.pool)
        workers = np.arange(self.num_workers, dtype=np.uint64)
        for i in range(begin, end):
            source = self.expected[i % 2, : self.num_workers]
            total = source.sum(dtype=np.uint64, keepdims=True) + np.uint64(tokens)
            self.expected[1 - i % 2, : self.num_workers] = total * np.uint64(3) + workers
        np.testing.assert_array_equal(self.data, self.expected)


@pytest.fixture(params=[1, 2, 3, 7])
def chain(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[Chain]:
    chain = Chain(library, request.param, 50)
    yield chain
    library.ingot_pool_destroy(chain.pool)


def test_steps_one_behind_the_other(chain: Chain) -> None:
    for step in range(40):
        chain.run(0, 50, step)


def test_parts_of_a_list_empty_ones_too(chain: Chain) -> None:
    for begin, end in ((0, 1), (1, 4), (4, 4), (9, 5), (4, 49), (49, 50)):
        chain.run(begin, max(begin, end))


def test_any_worker_may_be_slow(chain: Chain) -> None:
    for worker in range(chain.num_workers):
        chain.run(0, 20, slow_worker=worker)


def test_the_end_of_a_step_may_be_waited_for_at_any_time(chain: Chain) -> None:
    for pause in (0.0, 0.0, 0.00005, 0.002, 0.0):
        chain.run(0, 50, pause=pause)
        chain.run(3, 3, pause=pause)
        chain.run(0, 50, slow_worker=0)
    chain.library.ingot_wait(chain.pool)


def test_others_run_while_a_step_is_waited_for(library: ctypes.CDLL) -> None:
    """The Python lock is not held meanwhile."""
    pool, flag = library.ingot_pool_create(1), np.zeros(2, np.uint64)
    args = (ctypes.c_void_p * 1)(flag.ctypes.data)
    kernel = ctypes.addressof(ctypes.c_char.in_dll(library, "wait_for_flag"))
    launches = (Launch * 1)(Launch(kernel, ctypes.addressof(args)))
    thread = threading.Thread(target=library.ingot_run, args=(pool, Step(), launches, 0, 1))
    thread.start()
    time.sleep(0.01)
    flag[0] = 1
    thread.join()
    library.ingot_pool_destroy(pool)
    assert flag[1] == 1


def test_workers_that_have_fallen_asleep_wake_up(chain: Chain) -> None:
    for pause in (0.0, 0.0002, 0.002, 0.02, 0.0002):
        time.sleep(pause)
        chain.run(0, 5)


def test_an_idle_pool_uses_no_processor_time(chain: Chain) -> None:
    """Once the workers have fallen asleep, which on a busy machine takes its time."""
    chain.run(0, 5)
    end = time.monotonic() + 20
    while used_in(0.2) > 0.05:
        assert time.monotonic() < end


def used_in(seconds: float) -> float:
    """Processor time of this process, in seconds."""
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def test_steps_may_come_from_any_thread(chain: Chain) -> None:
    for _ in range(5):
        thread = threading.Thread(target=chain.run, args=(0, 10))
        thread.start()
        thread.join()
    assert chain.expected.any()
    np.testing.assert_array_equal(chain.data, chain.expected)


def test_create_and_destroy(library: ctypes.CDLL) -> None:
    for num_workers in (1, 2, 9, 4) * 5:
        library.ingot_pool_destroy(library.ingot_pool_create(num_workers))
    library.ingot_pool_destroy(None)
    assert not library.ingot_pool_create(0)
    assert not library.ingot_pool_create(-3)


def test_workers_leave_signals_to_the_program(library: ctypes.CDLL) -> None:
    before = set(Path("/proc/self/task").iterdir())
    pool = library.ingot_pool_create(3)
    new = set(Path("/proc/self/task").iterdir()) - before
    blocked = [line.split()[1] for task in new for line in (task / "status").read_text().splitlines()
               if line.startswith("SigBlk")]
    library.ingot_pool_destroy(pool)
    interrupt, terminate = 1 << 1, 1 << 14
    assert len(blocked) == 3
    assert all(int(mask, 16) & interrupt and int(mask, 16) & terminate for mask in blocked)


def test_abi_version(library: ctypes.CDLL) -> None:
    from ingot.runtime.devices.native_code import ABI_VERSION

    assert library.ingot_abi_version() == ABI_VERSION


def test_a_profile_is_the_same_step_with_times(chain: Chain) -> None:
    durations = np.full(52, -1, np.int64)
    slow = chain.num_workers - 1
    chain.library.ingot_profile(chain.pool, Step(num_tokens=1, num_seqs=slow), chain.launches, 0, 50,
                                durations.ctypes.data)
    assert (durations[:50] > 0).all() and (durations[50:] == -1).all()
    # Of the launches together: workers that share a core may pass two barriers in one go.
    assert durations[:50].sum() > 50 * 1000, "each launch waits for the worker that counts to 20,000"
    plain = Chain(chain.library, chain.num_workers, 50)
    plain.run(0, 50)
    np.testing.assert_array_equal(chain.data, plain.data)
    chain.library.ingot_pool_destroy(plain.pool)
    chain.expected[:] = plain.expected
    chain.run(0, 50)  # and no clock runs in the steps that follow
    assert (durations[50:] == -1).all()
