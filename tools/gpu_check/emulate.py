"""Writes what an engine gives in the emulator, to compare a device with.

    python -m tools.gpu_check.emulate ENGINE OUT.npz

A process of its own: the interpreter and the compiler of Triton cannot share one.
"""
from __future__ import annotations

import os
import sys

TOKENS = (11, 200, 3, 3, 45, 170, 9, 301, 77, 12, 8, 400, 31, 150, 2, 66, 91, 5, 23, 240)
"""A text of the small models; in steps of 16 tokens and of 4."""
NUM_NEW = 3


def main() -> int:
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np

    from ingot.runtime.engine import Engine
    from ingot.runtime.sampling import SamplingParams

    path, out = sys.argv[1:]
    with Engine.load(path, device="emulator", kv_cache_tokens=256) as engine:
        answer = engine.generate(list(TOKENS[:4]), SamplingParams(max_tokens=NUM_NEW, temperature=0.0))
        np.savez(out, logits=engine.logits(TOKENS), greedy=np.array(answer.token_ids, np.int32))
    return 0


if __name__ == "__main__":
    sys.exit(main())
