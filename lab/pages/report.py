"""docs/reproduction.md and its appendix out of records. What has no record is said to be missing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from headmax import durable, records
from headmax.analysis import curves
from headmax.recipes.language import HEADS_STUDY, SCALES
from headmax.tables import markdown
from lab.pages import efficiency, figures
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
IMAGES, APPENDIX = "images/reproduction", "reproduction-tables.md"
TRAINING = "training_h200.jsonl"
"""A whole run, which docs/training.md shows."""
BACKBONES = ("transformer", "retnet", "gla", "gdn")
INTRODUCTION = f"""# Reproduction

Earlier small runs, the cost of gates, and the commands for the paper's scale. The runs are too small and too few to decide
whether gates help, which is the question of the [study](findings.md). [The appendix]({APPENDIX}) has all tables.
`python -m lab report` writes both pages from the records in `lab/results/`.
"""
APPENDIX_INTRODUCTION = """# Reproduction: all tables

The appendix of [Reproduction](reproduction.md), written by `python -m lab report` from the records in `lab/results/`.
Mean ± standard deviation over three seeds, unless a cell says otherwise.
"""
PAPER_GAINS = {4: 2.37, 16: 6.71}
"""What the paper's text says of WikiText perplexity, by heads."""
PAIRS = [*((b, "softmax", "plain") for b in LINEAR), ("gla", "softmax", "uniform")]
PAIRS += [(b, "softmax-after", "uniform-after") for b in LINEAR[1:]]
"""Backbones, gates, and what these are compared with."""


def small(results: Results) -> Lines:
    rows = []
    for b, *pair in PAIRS:
        runs = [Run(b, variant) for variant in pair]
        found = [show(perplexity(results.seeds(LOSS, run))) for run in runs]
        words = ["gates frozen at 1/H" if variant.startswith("uniform") else "no gates" for variant in pair[1:]]
        place = "after the norm" if pair[0].endswith("after") else "on the query"
        rows.append([TITLES[b], place, *words, *found, show(results.paired(*runs), 1, True)])
    yield markdown(["backbone", "read gate", "softmax vs.", "perplexity, softmax", "perplexity, the other", "difference, %"], rows)
    yield ""
    yield f"{SIZES[1]}, 4 heads, 12.6M tokens (384 steps of 16 x 2048), three seeds, at the best learning rate of the model"
    yield "without gates. Mean ± standard deviation, differences paired by seed. Seeds differ by up to 10%, so a few per cent mean nothing."
    yield "Runs without a record of their training text were withdrawn, among them all runs of 512 steps and their task scores."
    yield ""
    yield f"More tables: [numbers of heads and sizes of models]({APPENDIX}#small-language-models), [recall]({APPENDIX}#recall)."


def scales(results: Results) -> Lines:
    rows = []
    for heads in HEADS:
        plain, *gated = (Run("gla", variant, heads=heads) for variant in ("plain", "softmax", "uniform"))
        found = [show(perplexity(results.seeds(LOSS, run))) for run in (plain, *gated)]
        rows.append([str(heads), *found, show(results.paired(*gated), 1, True)])
    header = [f"GLA, {SIZES[1]}: heads", "no gates", "softmax gates", "gates frozen at 1/H", "softmax vs. frozen, %"]
    yield markdown(header, rows)
    gains = " and ".join(f"{gain} at {heads} heads" for heads, gain in PAPER_GAINS.items())
    yield f"\nIn the paper, softmax gates lower WikiText perplexity by {gains} (110M parameters).\n"
    rows = []
    for size in SIZES:
        both = [Run("gla", variant, size) for variant in ("softmax", "plain")]
        found = [show(perplexity(results.seeds(LOSS, run))) for run in both]
        rows.append([size, *found, show(results.paired(*both), 1, True)])
    yield markdown(["GLA, 4 heads: layers x width", "softmax gates", "no gates", "softmax vs. no gates, %"], rows)


def recall(results: Results) -> Lines:
    yield "Multi-query associative recall (MQAR): 2 layers x 128, 2,000 steps, at the best learning rate of the model without gates."
    yield "Most settings are solved, not solved at all, or vary between seeds over the whole range. The study tunes the rate for each kind"
    yield "of gate."
    yield ""
    rows = []
    for b in LINEAR:
        for pairs, heads in RECALL_SETTINGS:
            cells = [show(results.seeds("accuracy", recall_run(b, variant, pairs, heads)), 2) for variant in WORDS]
            rows.append([f"{TITLES[b]}, {pairs} pairs, {heads} heads", *cells])
    yield markdown(["accuracy", *WORDS.values()], rows)


def full_scale(results: Results) -> Lines:
    yield "On 8 GPUs, after `headmax data prepare` as in [data](data.md); `headmax plan RECIPE --gpu h100` estimates how long each takes."
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
    yield "# our tables next to the paper's figures"
    yield "headmax eval tables runs/*/eval/records.jsonl"


SECTIONS: dict[str, tuple[Callable[[Results], Lines], tuple[str, ...]]] = {
    "Small language models": (small, ("differences",)),
    "Cost of gates in training": (efficiency.training, ("throughput", "memory")),
    "Cost of gates in decoding": (efficiency.decoding, ("latency",)),
    "At the paper's scale": (full_scale, ()),
}
"""What a section says, and its figures of lab/pages/figures.py."""
TABLES: dict[str, Callable[[Results], Lines]] = {
    "Small language models": scales,
    "Recall": recall,
    "Training": efficiency.sizes,
    "Decoding": efficiency.texts,
}


def render(results: Results) -> str:
    """The page. Of its pictures those are shown that have records."""
    lines = [INTRODUCTION]
    for title, (section, names) in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name in names:
            figure = figures.FIGURES[name]
            found = figures.collect(figure, results)
            missing = f"Figure, {figure.title}: {MISSING}. What makes its records: {figure.needs}."
            lines += [f"![{figure.finding(found)}]({IMAGES}/{name}.svg)" if found else missing, ""]
        lines += [*section(results), ""]
    return "\n".join(lines).rstrip() + "\n"


def tables(results: Results) -> str:
    """The appendix."""
    lines = [APPENDIX_INTRODUCTION]
    for title, section in TABLES.items():
        lines += [f"## {title}", "", *section(results), ""]
    return "\n".join(lines).rstrip() + "\n"


def write(page: Path, folder: Path) -> None:
    """The page, its appendix and their pictures, from the records in a folder."""
    results, images = Results(folder), page.parent / IMAGES
    durable.write(page, render(results))
    durable.write(page.with_name(APPENDIX), tables(results))
    with tempfile.TemporaryDirectory() as drawn:
        for name in ("speed", *(name for _, names in SECTIONS.values() for name in names)):
            figures.draw(name, Path(drawn), results)
        for path in Path(drawn).glob("*.svg"):
            durable.write(images / path.name, path.read_bytes())
        if (folder / TRAINING).exists():
            curves.draw(list(records.read(folder / TRAINING)), Path(drawn), "training")
            durable.write(images.parent / "training.svg", (Path(drawn) / "training.svg").read_bytes())
