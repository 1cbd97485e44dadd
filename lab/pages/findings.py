"""docs/findings.md and its appendix out of the study's records. What has no record is said to be missing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from headmax import durable
from headmax.analysis.style import save, styled
from headmax.tables import Table
from lab.pages.findings_figures import FIGURES
from lab.study import trials
from lab.study.contrasts import LEVEL, MARGIN, NEEDLES, Contrast, Study, equivalent, needed, percent_right, verdict
from lab.study.session import MOST_NOISE, recorded
from lab.study.trials import ROWS

IMAGES, APPENDIX = "images/findings", "findings-tables.md"
NOT_RUN = "not run yet"
MOST = 10
"""Secondary contrasts that the page names."""
PRIMARY_MEANS = {
    "superior": "Competition helps at this scale, beyond scale and start. The softmax stays the default.",
    "superior and equivalent": "Competition makes no difference that matters here.",
    "equivalent": "Competition makes no difference that matters here.",
    "inferior": "Competition hurts at this scale. The softmax is no longer a default.",
    "inferior and equivalent": "Competition makes no difference that matters here, and the softmax is no longer a default.",
    "undecided": "Whether competition helps at this scale is open.",
}
"""What the plan concludes."""


def signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def told(contrast: Contrast) -> str:
    """Mean and interval."""
    digits = 4 if contrast.unit == "nats" else 1
    if contrast.n < 2:
        return NOT_RUN if not contrast.n else f"{signed(contrast.mean, digits)} (one seed)"
    low, high = (signed(x, digits) for x in contrast.interval())
    return f"{signed(contrast.mean, digits)} ({low} to {high}) {contrast.unit}"


def answer(study: Study) -> Iterator[str]:
    """The primary contrast, by the plan's rule."""
    primary = study.primary
    if not primary.complete:
        yield f"**{primary.name}: {NOT_RUN}** ({primary.n} of {primary.planned} seeds). No conclusion before all seeds are complete."
        return
    word = verdict(primary)
    yield f"**{primary.name}: {told(primary)} per token, n = {primary.n}: {word}.** {PRIMARY_MEANS[word]}"
    within = "lies" if equivalent(primary) else "does not lie"
    yield f"The 90% interval {within} within ±{MARGIN} nats."
    if word == "undecided":
        number = needed(primary.spread)
        yield f"With the observed standard deviation of {primary.spread:.4f}, a difference of {MARGIN} nats takes"
        yield f"{number if number else 'more than 10,000'} seeds for 80% power."


def others(study: Study) -> Iterator[str]:
    """The secondary contrasts in a few lines."""
    tested = [contrast for contrast in study.secondary if contrast.n > 1]
    if not tested:
        yield f"The secondary contrasts: {NOT_RUN}."
        return
    shown = sorted((c for c in tested if study.corrected[c.name] < LEVEL), key=lambda contrast: contrast.p)
    yield f"Of {len(tested)} secondary contrasts with two seeds or more, {len(shown)} remain after Holm's correction at 5%, clearest first:"
    yield ""
    yield from (f"- {contrast.name}: {told(contrast)}, p = {study.corrected[contrast.name]:.2g}." for contrast in shown[:MOST])
    if len(shown) > MOST:
        yield f"- {len(shown) - MOST} more, in the [tables]({APPENDIX})."
    if not shown:
        yield "- none."


def settings(study: Study) -> Iterator[str]:
    """What was decided on the way, and how far the runs are."""
    noise, start = trials.noise(study.done), trials.chosen_start(study.done)
    apart = NOT_RUN if noise is None else f"{noise:.2%} apart, {'below' if noise < MOST_NOISE else 'not below'} {MOST_NOISE:.0%}"
    yield f"- Noise check, two seeds of plain GLA: {apart}."
    yield f"- The scaled start: {NOT_RUN if start is None else 'output and down projections x {} and {}'.format(*trials.STARTS[start])}."
    full = sum(trial.steps is None and trial.pairs is None for trial in study.found)
    short, recall = sum(trial.steps is not None for trial in study.found), sum(trial.pairs is not None for trial in study.found)
    yield f"- Recorded: {full} language models of one pass, {short} short ones, {recall} of recall."
    if study.found:
        commits = sorted({record.commit for record in study.found.values()})
        hours = sum(record.extra["seconds"] for record in study.found.values()) / 3600
        yield f"- {hours:.1f} hours on {', '.join(sorted({r.device for r in study.found.values()}))}; commits {', '.join(commits)}."


INTRODUCTION = f"""# Findings

Does competition between heads help, beyond a smaller output and a better initialisation? The study trains 80M-parameter language models for
one pass over 90M tokens, with eight seeds for the primary contrast. Questions and rules were
[fixed](../lab/study/plan.md) before the first run. [The appendix]({APPENDIX}) has all contrasts and arms;
`python -m lab findings` writes both pages from `lab/results/study.jsonl`.
"""
APPENDIX_INTRODUCTION = """# Findings: tables

The appendix of [Findings](findings.md). Differences are paired by seed; p is that of a paired t-test, corrected by Holm's
method over all secondary contrasts with at least two seeds. S-NIAH and SQuAD: accuracy in percent; S-NIAH: mean over 1K to 8K tokens.
"""
NOT_TESTED = """Models above 80M parameters, more than 90M tokens, other corpora and optimisers, instruction tuning. Gates after the norm,
gates with scale "heads" and sigmoid gates are compared in MQAR only, not in language models."""


def render(study: Study) -> str:
    """The page of two screens."""
    lines = [INTRODUCTION, "## Answer", "", *answer(study), "", *picture(study, "contrasts"), ""]
    lines += ["## Other contrasts", "", *others(study), ""]
    for name, figure in FIGURES.items():
        if name != "contrasts":
            lines += [f"## {figure.title}", "", *picture(study, name), ""]
    return "\n".join([*lines, "## Runs", "", *settings(study), "", "## Not tested", "", NOT_TESTED, ""])


def picture(study: Study, name: str) -> Iterator[str]:
    said = FIGURES[name].finding(study)
    yield f"{NOT_RUN.capitalize()}." if said is None else f"![{said}]({IMAGES}/{name}.svg)"


def tables(study: Study) -> str:
    """The appendix."""
    contrasts = Table(["contrast", "seeds", "mean (95% interval)", "p", "corrected p"], align="lrlrr")
    for contrast in (study.primary, *study.secondary):
        p = f"{contrast.p:.3g}" if contrast.n > 1 else ""
        corrected = study.corrected.get(contrast.name)
        word = "primary" if contrast is study.primary else "" if corrected is None else f"{corrected:.3g}"
        contrasts.rows.append([contrast.name, f"{contrast.n} of {contrast.planned}", told(contrast), p, word])
    arms = Table(["arm", "gates", "rate", "seeds", "validation loss"], align="llrrl")
    retrieval = Table(["arm", "gates", *NEEDLES], align="ll" + "r" * len(NEEDLES))
    for row in ROWS:
        for gates, number in row.seeds.items():
            found = list(study.arm(row, gates).values())
            right = [answers(found, prefix) for prefix in NEEDLES.values()]
            rate = f"{found[0].extra['rate']:g}" if found else ""
            losses = spread([record.value for record in found], 4)
            arms.rows.append([row.title, gates, rate, f"{len(found)} of {number}", losses])
            retrieval.rows.append([row.title, gates, *right])
    lines = [APPENDIX_INTRODUCTION]
    for title, table in {"Contrasts": contrasts, "Arms": arms, "Retrieval": retrieval}.items():
        lines += [f"## {title}", "", table.markdown(), ""]
    return "\n".join(lines)


def answers(found: Sequence[Any], prefix: str) -> str:
    return spread([percent_right(record, prefix) for record in found], 1)


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation."""
    if not values:
        return NOT_RUN
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


@styled()
def draw(study: Study, folder: Path) -> None:
    """Those that have records, as SVG."""
    for name, figure in FIGURES.items():
        if figure.finding(study) is not None:
            with tempfile.TemporaryDirectory() as drawn:
                save(figure.draw(study), Path(drawn), name)
                durable.write(folder / f"{name}.svg", (Path(drawn) / f"{name}.svg").read_bytes())


def write(page: Path, records: Path) -> None:
    """The page, its appendix and its pictures."""
    study = Study(recorded(records))
    durable.write(page, render(study))
    durable.write(page.with_name(APPENDIX), tables(study))
    draw(study, page.parent / IMAGES)
