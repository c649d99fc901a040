"""What the cost model says of the instructions beside products, held to disassembled loops."""
from __future__ import annotations

import re
from collections import Counter

import pytest

from ingot.compiler.gpu.disassemble import count_instructions, disassemble, matrix_instructions
from ingot.plugins.linear.gpu_arithmetic import scaling, widening
from ingot.plugins.linear.tactics import Problem, Tile, launch

from .support import compiled

_LABEL = re.compile(r"^\s*(\.L_x_\d+):", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b[^;\n]*`\((\.L_x_\d+)\)")


def loop_over_steps(sass: str, matrix: str) -> Counter[str]:
    """Instructions of the shortest loop with that matrix instruction, by the first word of their names."""
    begins = {match[1]: match.start() for match in _LABEL.finditer(sass)}
    bodies = [sass[begins[match[1]]:match.end()] for match in _BRANCH.finditer(sass)
              if begins.get(match[1], len(sass)) < match.start()]
    loops = [counts for counts in map(count_instructions, bodies)
             if any(matrix in name for name in matrix_instructions(counts))]
    found: Counter[str] = Counter()
    for name, number in min(loops, key=lambda counts: sum(counts.values())).items():
        found[name.partition(".")[0]] += number
    return found


@pytest.mark.parametrize(("arch", "format", "activation", "matrix"), [
    ("sm_90a", "int4", "fp8", "QGMMA"), ("sm_90a", "int4_g32m", "fp8", "QGMMA"), ("sm_80", "int4_g64", "int8", "IMMA"),
    ("sm_90a", "fp8_block", "fp8", "QGMMA")])
def test_instructions_beside_products(arch: str, format: str, activation: str, matrix: str) -> None:
    step = Problem(512, 256, 1024, format, activation, token_scales=True)
    tile = Tile(128, 64, 64 if format.startswith("int4_g32") else 128, 1, 8, 3, tma=arch == "sm_90a")
    kernel = launch(step, tile).kernel
    counts = loop_over_steps(disassemble(compiled([kernel], arch)[kernel].cubin), matrix)
    threads = 32 * tile.warps
    weights, products = tile.features * tile.channels / threads, tile.features * tile.tokens * tile.channels / threads
    assert counts["FFMA"] + counts["FMUL"] + counts["I2F"] + counts["I2FP"] == scaling(format, activation) * products
    widened = counts["PRMT"] + counts["LOP3"] + counts["SHF"]
    assert widened >= 0.6 * widening(format, activation) * weights, "a subtraction or two have other names"
    assert widened <= 1.3 * widening(format, activation) * weights + 60, "addresses and what else there is"
