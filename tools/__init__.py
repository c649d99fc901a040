"""Tools for people who work on Ingot; no part of the installed package."""
