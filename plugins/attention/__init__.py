"""Attention over a paged KV cache, and the writing of keys and values into it."""
