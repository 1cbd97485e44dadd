"""docs/reproduction.md out of records. What has no record is said to be missing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from headmax import durable
from headmax.recipes.language import HEADS_STUDY, SCALES
from headmax.tables import markdown
from lab.pages import figures
from lab.pages.efficiency import efficiency
from lab.study.earlier import (
    HEADS,
    LINEAR,
    LOSS,
    MISSING,
    RECALL_SETTINGS,
    SIZES,
    TITLES,
    WORDS,
    Results,
    Run,
    perplexity,
    recall_run,
    show,
)

Lines = Iterator[str]
IMAGES = "images/reproduction"
BACKBONES = ("transformer", "retnet", "gla", "gdn")
INTRODUCTION = """# Reproduction

Earlier small runs, what gates cost, and the commands for the paper's scale. Written by `python -m lab report` from the records in
`lab/results/`. Whether gates help is the question of the [study](findings.md); the runs here are too small and too few to decide it.
"""
PAPER_GAINS = {4: 2.37, 16: 6.71}
"""What the paper's text says of WikiText perplexity, by heads."""
PAIRS = [(b, "softmax", "plain") for b in LINEAR] + [(b, "softmax-after", "uniform-after") for b in LINEAR[1:]]
"""Backbones, gates, and what these are compared with."""


def small(results: Results) -> Lines:
    yield "12.6M tokens, 384 steps of 16 sequences of 2048; three seeds, at the learning rate that was best for the plain model on one of"
    yield "them. Seeds differ by up to 10%, so differences of a few per cent mean nothing. Mean ± standard deviation of validation"
    yield "perplexity; differences seed by seed, in % of perplexity. Runs whose texts were not recorded, all of 512 steps and their task"
    yield "scores among them, were withdrawn."
    yield ""
    rows = []
    for b, *pair in PAIRS:
        runs = [Run(b, variant) for variant in pair]
        found = [show(perplexity(results.seeds(LOSS, run))) for run in runs]
        rows.append(
            [TITLES[b], *(f"{WORDS[v]}: {cell}" for v, cell in zip(pair, found, strict=True)), show(results.paired(*runs), 1, True)]
        )
    yield markdown([f"{SIZES[1]}, 4 heads", "perplexity", "beside", "difference"], rows)
    yield ""
    rows = []
    for heads in HEADS:
        plain, *gated = (Run("gla", variant, heads=heads) for variant in ("plain", "softmax", "uniform"))
        found = [show(perplexity(results.seeds(LOSS, run))) for run in (plain, *gated)]
        rows.append([str(heads), *found, show(results.paired(*gated), 1, True)])
    yield markdown([f"GLA, {SIZES[1]}: heads", *(WORDS[v] for v in ("plain", "softmax", "uniform")), "softmax less uniform"], rows)
    gains = " and ".join(f"{gain} at {heads} heads" for heads, gain in PAPER_GAINS.items())
    yield f"\nThe paper: the softmax gains {gains} (110M, WikiText).\n"
    rows = []
    for size in SIZES:
        both = [Run("gla", variant, size) for variant in ("softmax", "plain")]
        found = [show(perplexity(results.seeds(LOSS, run))) for run in both]
        rows.append([size, *found, show(results.paired(*both), 1, True)])
    yield markdown(["GLA, 4 heads: size", WORDS["softmax"], WORDS["plain"], "softmax less no gates"], rows)


def recall(results: Results) -> Lines:
    yield "MQAR, 2 layers x 128, 2,000 steps, at the rate that was best for the plain model. Most settings are at 0 or 1, or differ from"
    yield "seed to seed by as much as they can; the study chooses a rate for each kind of gates, and settings in between."
    yield ""
    rows = []
    for b in LINEAR:
        for pairs, heads in RECALL_SETTINGS:
            cells = [show(results.seeds("accuracy", recall_run(b, variant, pairs, heads)), 2) for variant in WORDS]
            rows.append([f"{TITLES[b]}, {pairs} pairs, {heads} heads", *cells])
    yield markdown(["accuracy", *WORDS.values()], rows)


def full_scale(results: Results) -> Lines:
    yield "On 8 GPUs, after `headmax data prepare` as in [data](data.md); `headmax plan RECIPE --gpu h100` says how long each takes."
    yield ""
    yield "```"
    yield from commands()
    yield "```"


def commands() -> Lines:
    """One for each study of the paper."""
    studies = {
        "the three tables": [f"{gate}{b}-340m" for b in BACKBONES for gate in ("", "softmax-") if gate + b != "softmax-transformer"],
        "scaling": [f"{gate}gla-{scale}" for scale in SCALES if scale not in ("tiny", "340m") for gate in ("", "softmax-")],
        "heads": [f"{gate}gla-110m-h{n}" for n in HEADS_STUDY for gate in ("", "softmax-")],
    }
    for study, recipes in studies.items():
        yield f"# {study}"
        train = "torchrun --nproc-per-node 8 -m headmax train $r --data data/slimpajama --out runs/$r"
        examine = "headmax convert runs/$r --to hf && headmax eval runs/$r/hf --name $r --work runs/$r/eval"
        yield f"for r in {' '.join(recipes)}; do {train} && {examine}; done"
    yield "# beside the paper's figures"
    yield "headmax eval tables runs/*/eval/records.jsonl"


SECTIONS: dict[str, Callable[[Results], Lines]] = {
    "Small language models": small,
    "Recall": recall,
    "Efficiency": efficiency,
    "At the paper's scale": full_scale,
}
FIGURES = {"Efficiency": ("memory", "throughput", "latency")}
"""Of lab/pages/figures.py, by section."""


def render(results: Results) -> str:
    """The page. Its pictures are those of lab/pages/figures.py that have records."""
    lines = [INTRODUCTION]
    for title, section in SECTIONS.items():
        lines += [f"## {title}", "", *section(results), ""]
        for name in FIGURES.get(title, ()):
            figure = figures.FIGURES[name]
            drawn = f"![{figure.title}]({IMAGES}/{name}.svg)"
            missing = f"Figure, {figure.title}: {MISSING}. What makes its records: {figure.needs}."
            lines += [drawn if figures.collect(figure, results.records)[0] else missing, ""]
    return "\n".join(lines).rstrip() + "\n"


def write(page: Path, folder: Path) -> None:
    """The page and its pictures, from the records in a folder."""
    results, images = Results(folder), page.parent / IMAGES
    durable.write(page, render(results))
    with tempfile.TemporaryDirectory() as drawn:
        for names in FIGURES.values():
            for name in names:
                figures.draw(name, Path(drawn), results.records)
        for path in Path(drawn).glob("*.svg"):
            durable.write(images / path.name, path.read_bytes())
