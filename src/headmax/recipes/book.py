"""All recipes by name."""

from __future__ import annotations

from headmax.ops.registry import suggest
from headmax.recipes import language, recall
from headmax.recipes.recipe import Recipe

RECIPES = {**language.RECIPES, **recall.RECIPES}


def names() -> list[str]:
    """All recipe names."""
    return list(RECIPES)


def get(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}{suggest(name, RECIPES)}")
    return RECIPES[name]()
