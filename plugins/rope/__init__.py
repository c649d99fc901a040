"""Rotary position embedding, with the norm before it and the write to the KV cache after it."""
