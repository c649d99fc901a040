"""Passes: each takes a verified graph and returns a new one. The order stands in pipeline.py."""
