"""Precision "auto": for each layer the cheapest scheme, such that the whole keeps a budget of quality."""
