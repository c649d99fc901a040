"""What masks mean, found by asking them."""
from __future__ import annotations

import pytest
import torch
from transformers import masking_utils as hf

from ingot.compiler.importer.masks import MaskMeaning, UnknownMask, Visible, read_meaning

FAR = 1 << 24


def of(mask_function: object) -> Visible:
    """transformers' mask functions take batch and head too."""
    return lambda q, k: mask_function(torch.zeros_like(q), torch.zeros_like(q), q, k)  # type: ignore[operator]


@pytest.mark.parametrize("limit", [639, 4095, FAR])
@pytest.mark.parametrize("window", [1, 2, 3, 8, 127, 128, 500])
def test_windows(window: int, limit: int) -> None:
    assert read_meaning(of(hf.sliding_window_causal_mask_function(window)), limit) == MaskMeaning(window=window)


@pytest.mark.parametrize("chunk", [2, 3, 8, 127, 128, 300])
def test_chunks(chunk: int) -> None:
    function = hf.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.long))
    for limit in (639, 4095, FAR):
        assert read_meaning(of(function), limit) == MaskMeaning(chunk=chunk)


def test_plain_causal() -> None:
    assert read_meaning(of(hf.causal_mask_function), FAR) == MaskMeaning()


def test_a_window_wider_than_every_sequence_is_none() -> None:
    assert read_meaning(of(hf.sliding_window_causal_mask_function(FAR + 1)), FAR) == MaskMeaning()


def prefix(length: int) -> Visible:
    """Bidirectional within a prefix, causal after it."""
    return lambda q, k: (k <= q) | (k < length)


def sink(window: int) -> Visible:
    """A window, and the first tokens always."""
    return lambda q, k: (k <= q) & ((k > q - window) | (k < 4))


def dilated(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (k <= q) & ((q - k) % 2 == 0)


@pytest.mark.parametrize("visible", [
    of(hf.bidirectional_mask_function), of(hf.sliding_window_bidirectional_mask_function(8)), prefix(16), sink(8),
    dilated, lambda q, k: k < q, lambda q, k: (k <= q) & (k > q - 4) & (k >= q // 6 * 6), lambda q, k: k <= q + 1])
def test_what_attention_cannot_express_is_refused(visible: Visible) -> None:
    for limit in (639, FAR):
        with pytest.raises(UnknownMask, match=r"the token at \d+ (sees|does not see) the one at \d+"):
            read_meaning(visible, limit)
