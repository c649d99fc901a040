"""Checkpoints whose weights are quantized: how each layout's tensors become the weights that they stand for."""
from .read import read_quantized
from .weights import Quantized, QuantizedWeight

__all__ = ["Quantized", "QuantizedWeight", "read_quantized"]
