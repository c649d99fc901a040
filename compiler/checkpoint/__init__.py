"""Readers of checkpoints: tensors by name, the model's configuration, the tokenizer's files."""
