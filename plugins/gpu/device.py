"""What tactics must know of a GPU."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """arch              "sm_90a", for messages
    capability        90
    num_sms           multiprocessors
    shared_per_block  bytes of shared memory that a block may have
    """

    arch: str
    capability: int
    num_sms: int
    shared_per_block: int

    @property
    def has_fp8(self) -> bool:
        return self.capability >= 89

    @property
    def has_fp4(self) -> bool:
        return self.capability >= 100

    @property
    def has_tma(self) -> bool:
        """Copies by descriptor. sm_120 has them too."""
        return self.capability >= 90

    @property
    def has_warpgroup_mma(self) -> bool:
        """Matrix instructions that read both operands from shared memory: wgmma, tcgen05."""
        return 90 <= self.capability < 120
