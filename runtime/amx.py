"""The tile registers of AMX, which a process of Linux may use once it has asked."""

import ctypes
import errno
import os

from .errors import WorkFailed

FEATURE = "amx_tile"
"""As /proc/cpuinfo and the manifest of an engine name it."""

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_TILE_DATA = 18

_REASONS = {
    errno.EINVAL: "the kernel does not know tile registers; Linux has them from 5.16 on",
    errno.ENOSYS: "the kernel does not know tile registers; Linux has them from 5.16 on",
    errno.EOPNOTSUPP: "the kernel does not give tile registers to programs on this machine",
    errno.EPERM: "a sandbox does not let the process ask for them",
    errno.ENOSPC: "a thread of the process has an alternate signal stack that is too small to hold them",
}


def request_tiles(what: str) -> None:
    """Ask the kernel for this process, and for all threads that it has and will have; again does no harm.

    what: that needs them, for the message. Raises WorkFailed with the kernel's reason. Kernel documentation:
    Documentation/arch/x86/xstate.rst.
    """
    library = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(number) for number in (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA))
    if library.syscall(*arguments) == 0:
        return
    number = ctypes.get_errno()
    raise WorkFailed(
        f"{what} needs the tile registers of AMX, which the system refuses: "
        f"{_REASONS.get(number, os.strerror(number))}.\n"
        "  Build for AVX-512 alone: --target cpu:x86-64-v4-bf16"
    )
