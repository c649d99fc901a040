"""Choosing the next token of each sequence, and log probabilities."""
