"""Training steps that were recorded: how much of a card's peak a step reaches, and how well a plan foretells them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headmax import recipes
from headmax.plan.cards import CARDS
from headmax.plan.estimate import ideal, memory
from headmax.plan.work import Work

MEASURED = Path(__file__).with_name("measured.json")
ASSUMED_EFFICIENCY = 0.5
"""Where nothing was measured: the time of both roofs, one after the other, over the time of a step."""


@dataclass(frozen=True)
class Measured:
    """A training step as it was timed on one GPU."""

    recipe: str
    card: str
    length: int
    batch: int
    seconds: float
    memory: float | None
    """Bytes at the peak."""
    source: str

    @property
    def efficiency(self) -> float:
        return sum(ideal(self.work, CARDS[self.card], self.length * self.batch)) / self.seconds

    @property
    def work(self) -> Work:
        return Work.of(recipes.get(self.recipe), self.length)


def measured_steps() -> list[Measured]:
    """All training steps of ours that were recorded; `python -m lab package` puts them into the package."""
    return [Measured(**step) for step in json.loads(MEASURED.read_text())]


def choose_efficiency(recipe: str, card: str, length: int, steps: Sequence[Measured]) -> tuple[float, str]:
    """From the nearest measurement, of this model on this card or of what is most like them; and in words."""
    plain = recipe.removeprefix("softmax-")
    twins = [s for s in steps if s.recipe.removeprefix("softmax-") == plain]
    family = [s for s in steps if s.recipe.removeprefix("softmax-").split("-")[0] == plain.split("-")[0]]
    for kind, same in (
        ("", [s for s in twins if s.recipe == recipe and s.card == card]),
        ("with or without gates, ", [s for s in twins if s.card == card]),
        ("on another GPU, ", twins),
        ("of another size, ", [s for s in family if s.card == card]),
        ("of another model, ", [s for s in steps if s.card == card]),
        ("of another model, on another GPU, ", list(steps)),
    ):
        if same:
            nearest = min(abs(math.log(s.length / length)) for s in same)
            close = [s for s in same if abs(math.log(s.length / length)) == nearest]
            return statistics.median(s.efficiency for s in close), f"measured ({kind}{', '.join(sorted({s.source for s in close})[:2])})"
    return ASSUMED_EFFICIENCY, "assumed, since no training step was measured"


def check(recipe: str, card: str, length: int, steps: Sequence[Measured]) -> str | None:
    """The nearest measured step of this model on this card, predicted from all other measurements; None if there is none."""
    same = [s for s in steps if s.recipe == recipe and s.card == card]
    if not same:
        return None
    one = min(same, key=lambda s: abs(math.log(s.length / length)))
    efficiency, source = choose_efficiency(recipe, card, one.length, [s for s in steps if s is not one])
    tokens = one.length * one.batch
    predicted = sum(ideal(one.work, CARDS[card], tokens)) / efficiency
    line = (
        f"{one.source}: step predicted {1e3 * predicted:.0f} ms, measured {1e3 * one.seconds:.0f} ms ({predicted / one.seconds - 1:+.0%})"
    )
    if one.memory is not None:
        held = sum(memory(one.work, tokens).values())
        line += f"; memory predicted {held / 2**30:.1f} GiB, measured {one.memory / 2**30:.1f} GiB ({held / one.memory - 1:+.0%})"
    return f"{line}; efficiency {source}"
