"""Recipes: a model and what is to be built of it, in YAML."""
from .read import Recipe, read_recipe

__all__ = ["Recipe", "read_recipe"]
