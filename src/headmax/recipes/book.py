"""All recipes by name."""

from __future__ import annotations

from headmax.fields import suggest
from headmax.recipes import language, recall
from headmax.recipes.recipe import Recipe


def names() -> list[str]:
    """All recipe names, including those of registered mixers."""
    return [*language.recipes(), *recall.recipes()]


def get(name: str) -> Recipe:
    """The recipe with this name."""
    known = language.recipes() | recall.recipes()
    if name not in known:
        raise ValueError(f"unknown recipe {name!r}{suggest(name, known)}")
    return known[name]()
