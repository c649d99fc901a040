"""Checkpoints whose weights are quantized: how each layout's tensors become the weights that they stand for."""
from .equal import equal_tensors, with_equal_tensors_shared
from .read import read_quantized, stored_groups, stored_schemes, stored_weights
from .report import quantization_report
from .weights import Quantized, QuantizedWeight

__all__ = ["Quantized", "QuantizedWeight", "equal_tensors", "quantization_report", "read_quantized", "stored_groups",
           "stored_schemes", "stored_weights", "with_equal_tensors_shared"]
