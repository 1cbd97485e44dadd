"""Complete configurations by name: every model of the paper, a tiny one of each kind for tests, and recall tasks."""

from headmax.recipes.book import get, names
from headmax.recipes.recipe import Recipe

__all__ = ["Recipe", "get", "names"]
