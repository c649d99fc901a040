"""The kernels: one folder an operator, with its reference, its sources and its tactics."""
