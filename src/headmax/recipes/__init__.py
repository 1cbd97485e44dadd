"""Complete configurations by name: every model of the paper, and a tiny one of each kind for tests."""

from headmax.recipes.language import Recipe, get, names

__all__ = ["Recipe", "get", "names"]
