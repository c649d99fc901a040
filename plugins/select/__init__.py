"""Softmax, selection, sorting and gathering along the last dimension."""
