"""Which gate settings the records speak for, by one rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from headmax.layers import HeadGateConfig
from headmax.models import HeadmaxConfig
from headmax.tables import markdown
from lab.pages.figures import TITLES
from lab.study.runs import EPS, LINEAR, PLACES, VARIANTS, Run, comparable
from lab.study.statistics import LOSS, MISSING, WORDS, Results, Seeds, interval, relative, show, told_apart

PAPER = "softmax"
"""The variant that is the paper's equation to the letter."""
LEAST = 2
"""Columns in which a setting must be better."""
RULE = (
    "Rule: other settings take the default's place only if they were measured in all columns and are better in at least two and worse in",
    "none, where better and worse mean that the 95% interval of the mean difference over seeds leaves out zero. Of several such settings",
    "the one with the lowest loss of GLA is taken, or one with fewer changes that does not differ significantly from it.",
    "Otherwise the default stays.",
)


@dataclass(frozen=True)
class Setting:
    variant: str
    norm_eps: float

    @property
    def fields(self) -> dict[str, Any]:
        """What makes it, beside what all have in common."""
        gate = VARIANTS[self.variant]
        if gate is None:
            return {"head_gate": None, "norm_eps": self.norm_eps}
        names = ("kind", "read_position") + ("write",) * (not gate.write)
        return {name: getattr(gate, name) for name in names} | {"norm_eps": self.norm_eps}

    def __str__(self) -> str:
        """In code."""
        return "`" + ", ".join(f"{name}={value!r}" for name, value in self.fields.items()).replace("'", '"') + "`"

    @property
    def words(self) -> str:
        """In a table."""
        return f"{WORDS[self.variant]}, eps {self.norm_eps:g}"

    def changes(self, other: Setting) -> int:
        return sum(field not in other.fields.items() for field in self.fields.items())

    def run(self, backbone: str) -> Run:
        return Run(backbone, self.variant, norm_eps=self.norm_eps)


def default() -> Setting:
    """What a user gets who asks for gates and says no more."""
    return Setting(next(name for name, gate in VARIANTS.items() if gate == HeadGateConfig()), HeadmaxConfig.norm_eps)


def settings() -> list[Setting]:
    """All that were tried."""
    return [*(Setting(variant, eps) for eps in EPS for variant in PLACES), Setting("uniform-read-after", EPS[0])]


Evidence = dict[str, tuple[Seeds, int]]
"""Differences by column, and the sign of a better one."""


def evidence(results: Results, one: Setting, other: Setting) -> Evidence:
    made: Evidence = {}
    for b in LINEAR:
        made[f"{TITLES[b]}, % of perplexity"] = relative(results.paired(LOSS, *comparable(one.run(b), other.run(b)))), -1
    for b in LINEAR:
        measured = one.variant != other.variant and one.norm_eps == EPS[0]
        made[f"{TITLES[b]}, recall"] = (results.recall_at_own_rates(b, one.variant, other.variant) if measured else {}), 1
    return made


def promising(found: Mapping[Setting, Evidence]) -> list[Setting]:
    """Better in LEAST columns and worse in none, as far as they were measured."""
    signs = {setting: [told_apart(x) * wanted for x, wanted in columns.values()] for setting, columns in found.items()}
    return [setting for setting, seen in signs.items() if seen.count(1) >= LEAST and -1 not in seen]


def preferred(results: Results, found: Mapping[Setting, Evidence]) -> Setting | None:
    """By the rule; None if the default stays."""
    whole = [setting for setting in promising(found) if all(interval(differences) for differences, _ in found[setting].values())]
    if not whole:
        return None
    losses = {setting: mean(results.seeds(LOSS, setting.run("gla")).values()) for setting in whole}
    best = min(losses, key=lambda setting: losses[setting])
    alike = [setting for setting in losses if not told_apart(results.paired(LOSS, setting.run("gla"), best.run("gla")))]
    return min(alike, key=lambda setting: (setting.changes(default()), losses[setting]))


def all_evidence(results: Results) -> dict[Setting, Evidence]:
    """For all settings instead of the default."""
    return {setting: evidence(results, setting, default()) for setting in settings() if setting != default()}


def recommendation(results: Results) -> Iterator[str]:
    now, found = default(), all_evidence(results)
    rows = []
    for setting, columns in found.items():
        cells = []
        for digits, (differences, wanted) in zip((1, 1, 1, 3, 3, 3), columns.values(), strict=True):
            words = {1: ", **better**", -1: ", **worse**", 0: ""}[told_apart(differences) * wanted]
            cells.append(show(differences, digits, sign=True) + words if differences else "")
        rows.append([setting.words, *cells])
    yield f"The default is {now}; the paper's literal setting is " + ("the same." if now.variant == PAPER else f"{literal()}.")
    yield "Other settings less the default, seed by seed; a loss is better below zero, recall above (accuracy of 32 pairs, 4 heads, each"
    yield f"at its own learning rate; norm_eps {EPS[0]:g} alone). An empty cell was not measured."
    yield ""
    yield markdown(["instead of the default", *next(iter(found.values()))], rows)
    yield ""
    yield from RULE
    yield ""
    yield from verdict(results, found)


def verdict(results: Results, found: Mapping[Setting, Evidence]) -> Iterator[str]:
    """What the rule comes to, and what it leaves out."""
    now = default()
    judged = sum(interval(differences) is not None for columns in found.values() for differences, _ in columns.values())
    if not judged:
        yield f"Recommendation: {MISSING}; the default stays."
        return
    taken, waiting = preferred(results, found), len(promising(found))
    if taken is not None:
        yield f"**Recommendation: {taken}** instead of {now}. The paper's literal setting remains {literal()}."
    elif waiting:
        yield f"**No recommendation yet: the default stays for want of measurements, {now}.**"
        yield f"Settings better in {LEAST} columns and worse in none that were not measured in all: {waiting}. Rows at another eps were not"
        yield "asked for in all of them."
    else:
        yield f"**The default stays, {now}:** no other setting was seen to be better in {LEAST} columns without being worse elsewhere."
    for column in next(iter(found.values())):
        better = {s: columns[column][0] for s, columns in found.items() if told_apart(columns[column][0]) * columns[column][1] == 1}
        if better:
            names = "; ".join(f"{s.words} ({mean(x.values()):+.3g})".replace("(-", "(−") for s, x in better.items())
            yield f"- Better than the default, {column}: {names}."
    yield ""
    yield f"{judged} differences have three seeds and were judged one by one, many against the same runs of the default: a few of them"
    yield "may be called better or worse by chance."
    frozen = found.get(Setting("uniform", now.norm_eps), {})
    signs = {column: told_apart(differences) * wanted for column, (differences, wanted) in frozen.items() if interval(differences)}
    if now.variant == PAPER and signs:
        counts = [list(signs.values()).count(sign) for sign in (0, 1, -1)]
        yield f"Of {len(signs)} columns that have three seeds, gates frozen at 1/H did not differ significantly from gates that compete in"
        yield f"{counts[0]}, better in {counts[1]} and worse in {counts[2]}."


def literal() -> Setting:
    return Setting(PAPER, HeadmaxConfig.norm_eps)
