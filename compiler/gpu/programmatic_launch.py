"""Programmatic dependent launch (CUDA C++ Programming Guide; PTX ISA, griddepcontrol): from sm_90 on, a kernel begins
while the one before it ends.

Each kernel says as its first instruction that the next one may be started once all of its own blocks have been, and
waits then, before it touches memory, until the kernel before it has ended and what that wrote is visible. What
overlaps is the launch: blocks are placed, parameters loaded. Nothing else changes: a kernel that has ended has waited
for its predecessor, so all that came earlier has ended too.

Where a launch may overlap is read from the disassembled code, not taken from what was asked for (`waits_first`).
"""
from __future__ import annotations

from .disassemble import base, instructions

FIRST_CAPABILITY = 90
_BEGIN = ("\tgriddepcontrol.launch_dependents;", "\tgriddepcontrol.wait;")
_WAIT = "ACQBULK"
_REGISTERS_ALONE = frozenset((
    "BMSK", "BSSY", "CS2R", "IABS", "IADD", "IADD3", "IMAD", "ISETP", "LDC", "LDCU", "LEA", "LOP3", "MOV", "NOP",
    "PLOP3", "PREEXIT", "PRMT", "R2UR", "S2R", "S2UR", "SEL", "SHF", "UIADD3", "UIMAD", "UISETP", "ULDC", "ULEA",
    "ULOP3", "UMOV", "UPRMT", "USEL", "USHF", "VIADD", "VIMNMX"))
"""Mnemonics that read parameters and constants and write registers, before their modifiers."""


def overlap_launches(ptx: str) -> str:
    """The PTX of one kernel with both instructions at its beginning; as it is if it has them. Raises ValueError if
    there is no kernel."""
    if "griddepcontrol" in ptx:
        return ptx
    lines = ptx.split("\n")
    at = next((number for number, line in enumerate(lines) if line.startswith("{")), None)
    if at is None:
        raise ValueError("the PTX has no kernel")
    at += 1
    while not lines[at].strip() or lines[at].lstrip().startswith((".", "//")):  # declarations come first
        at += 1
    return "\n".join([*lines[:at], *_BEGIN, *lines[at:]])


def waits_first(sass: str) -> bool:
    """Whether disassembled code waits for the kernel before it ahead of any branch and any memory but parameters."""
    for name in map(base, instructions(sass)):
        if name == _WAIT:
            return True
        if name not in _REGISTERS_ALONE:
            return False
    return False
