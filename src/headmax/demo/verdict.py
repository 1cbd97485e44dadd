"""What the figures of the demo say in plain words, and how sure the recorded seeds make it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headmax.demo.variants import VARIANTS, Scores, mean

RIVALS = ("plain", "uniform")


def differences(seeds: Sequence[Scores], rival: str) -> list[float]:
    """Softmax less `rival`, seed by seed: the arms of a seed share tokens and start, so that less noise is left in it."""
    return [scores["softmax"] - scores[rival] for scores in seeds]


def spread(seeds: Sequence[Scores], rival: str) -> float | None:
    """From the smallest to the largest of the differences; None where there are fewer than three seeds."""
    found = differences(seeds, rival)
    return max(found) - min(found) if len(found) >= 3 else None


def compare(scores: Scores, rival: str, seeds: Sequence[Scores]) -> str:
    """One sentence on softmax and one rival, by this run's bits per byte (lower is better)."""
    gap = scores["softmax"] - scores[rival]
    size = f"{abs(gap):.3f} bits per byte {'below' if gap < 0 else 'above'} {rival}"
    noise = spread(seeds, rival)
    if noise is None:
        return f"Softmax ended {size}; no seeds are recorded for these settings, so nothing says whether that is more than chance."
    if abs(gap) <= noise:
        return f"Softmax ended {size}: less than the spread of that difference over seeds ({noise:.3f}), so no difference is shown."
    found = differences(seeds, rival)
    same = sum((other < 0) == (gap < 0) for other in found)
    better = "better" if gap < 0 else "worse"
    return f"Softmax ended {size}, {better} by more than the spread over seeds ({noise:.3f}); {same} of {len(found)} recorded seeds agree."


def verdict(scores: Scores, seeds: Sequence[Scores]) -> list[str]:
    return [compare(scores, rival, seeds) for rival in RIVALS]


def recorded(case: str, seeds: Sequence[Scores]) -> Iterator[str]:
    """What the recorded seeds of a setting gave, in one line; nothing where there are none."""
    if seeds:
        means = ", ".join(f"{variant} {describe([s[variant] for s in seeds])}" for variant in VARIANTS)
        below = " and ".join(f"below {rival} in {sum(d < 0 for d in differences(seeds, rival))}" for rival in RIVALS)
        yield f"Recorded, {case}: {means} bits per byte; softmax {below} of {len(seeds)} seeds."


def describe(values: list[float]) -> str:
    """Mean, and the smallest and largest."""
    return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
