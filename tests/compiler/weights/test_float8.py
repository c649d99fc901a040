"""The tables of 8-bit floating-point types against torch's own conversion."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from ingot.compiler.weights.float8 import FLOAT8_VALUES


@pytest.mark.parametrize(("name", "dtype"), [
    ("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2), ("F8_E8M0", torch.float8_e8m0fnu)])
def test_every_code(name: str, dtype: torch.dtype) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(FLOAT8_VALUES[name], expected)
    np.testing.assert_array_equal(np.signbit(FLOAT8_VALUES[name][:127]), np.signbit(expected[:127]))
