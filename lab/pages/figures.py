"""`python -m lab figures`: the paper's figures from records. What was not measured is named, not drawn.

| figure | suite | records it reads |
|---|---|---|
| scaling | eval | case "wikitext", metric "word_perplexity", extra.model "[softmax-]gla-{80m,110m,170m,340m}" |
| heads | eval | the same of "[softmax-]gla-110m[-h8, -h16]"; without a suffix it has 4 heads |
| memory, throughput | train | case "RECIPE LENGTHxBATCH", metric "VARIANT/peak memory" and "VARIANT/tokens per second" (bench train) |
| latency | decode | case "MODEL batch 1 context C decoded N", metric "end to end" (bench decode) |

Of records alike the last one counts; runs that differ in their seed alone are averaged.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headmax import records
from headmax.analysis.style import save, styled, subplots
from headmax.records import Record
from lab import RESULTS

Lines = dict[str, dict[Any, float]]
"""By label, y over x."""
Points = Iterable[tuple[str, Any, float]]


@dataclass(frozen=True)
class Figure:
    title: str
    x: str
    y: str
    read: Callable[[Record], Points]
    """(label, x, y) of a record that belongs in the figure. An x that is a text is a group of bars, a number a point of a line."""
    suite: str
    needs: str
    """What makes the records, for a reader who has none."""
    log: bool = False


def perplexity(record: Record, pattern: str) -> Points:
    """A model whose name matches, with x the pattern's number."""
    match = re.fullmatch(rf"(softmax-)?{pattern}", record.extra.get("model", ""))
    if match and (record.case, record.metric) == ("wikitext", "word_perplexity"):
        yield "Softmax GLA" if match[1] else "GLA", int(match[2] or 4), record.value


def training_step(record: Record, metric: str) -> Points:
    variant, _, what = record.metric.partition("/")
    if what != metric:
        return
    recipe, size = record.case.split(" ")
    name = f"transformer-{recipe.split('-')[1]}" if variant == "transformer" else "softmax-" * (variant == "softmax") + recipe
    yield name + f", {record.impl}" * (record.impl != "headmax"), size, record.value


def generation(record: Record) -> Points:
    match = re.fullmatch(r"(.*) batch 1 context \d+ decoded (\d+)", record.case)
    if match and record.metric == "end to end":
        yield match[1], int(match[2]), record.value


WIKITEXT = "train the models (headmax train) and run headmax eval on wikitext"
FIGURES = {
    "scaling": Figure("WikiText perplexity over size", "million parameters (the paper's names)", "perplexity",
                      lambda r: perplexity(r, r"gla-(\d+)m"), "eval", WIKITEXT),
    "heads": Figure("WikiText perplexity over the number of heads, 110M", "heads", "perplexity",
                    lambda r: perplexity(r, r"gla-110m(?:-h(\d+))?"), "eval", WIKITEXT),
    "memory": Figure("Peak memory of a training step", "length x batch", "GiB",
                     lambda r: training_step(r, "peak memory"), "train", "python -m lab bench train"),
    "throughput": Figure("Training throughput", "length x batch", "tokens per second",
                         lambda r: training_step(r, "tokens per second"), "train", "python -m lab bench train"),
    "latency": Figure("Decoding one text", "decoded tokens", "seconds", generation, "decode", "headmax bench decode", log=True),
}  # fmt: skip


def collect(figure: Figure, found: Sequence[Record]) -> tuple[Lines, str]:
    """The figure's lines, and where they were measured."""
    seeds: dict[str, dict[Any, dict[int | None, float]]] = defaultdict(lambda: defaultdict(dict))
    devices: dict[str, None] = {}
    for record in found:
        if record.suite == figure.suite:
            for name, x, y in figure.read(record):
                seeds[name][x][record.extra.get("run", {}).get("seed")] = y
                devices[record.device] = None
    lines = {name: {x: statistics.mean(values.values()) for x, values in points.items()} for name, points in seeds.items()}
    return lines, "; ".join(devices)


@styled()
def draw(name: str, folder: Path, found: Sequence[Record]) -> list[Path] | None:
    """Writes one figure; None if it has no records."""
    figure = FIGURES[name]
    lines, devices = collect(figure, found)
    if not lines:
        return None
    picture, axes = subplots(figsize=(5.6, 3.4))
    places = list(dict.fromkeys(x for points in lines.values() for x in points))
    if isinstance(places[0], str):
        places.sort(key=lambda size: [int(n) for n in size.split("x")])
        width = 0.8 / len(lines)
        for n, (label, points) in enumerate(lines.items()):
            spots = [places.index(x) + (n - (len(lines) - 1) / 2) * width for x in points]
            axes.bar(spots, list(points.values()), 0.9 * width, label=label)
        axes.set_xticks(range(len(places)), places)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(0, 1.02 * max(max(points.values()) for points in lines.values()))
    else:
        for label, points in lines.items():
            x, y = zip(*sorted(points.items()), strict=True)
            axes.plot(x, y, marker="o" if len(x) < 30 else None, markersize=4, label=label)
        if len(places) < 8:
            axes.set_xscale("log")
            axes.set_xticks(places, [f"{x:,.0f}" for x in places])
            axes.minorticks_off()
        if figure.log:
            axes.set_yscale("log")
    axes.set(title=figure.title, xlabel=f"{figure.x}\n{devices}", ylabel=figure.y)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return save(picture, folder, name)


def reproduce(folder: Path, results: Path = RESULTS) -> Iterator[str]:
    """Draws all figures from the .jsonl files of `results`; says of each where it is, or what it lacks."""
    found = [record for path in sorted(results.glob("*.jsonl")) for record in records.read(path)]
    for name, figure in FIGURES.items():
        paths = draw(name, folder, found)
        if paths is None:
            yield f"{name}: no records for it in {results}; they come from: {figure.needs}"
        else:
            yield f"{name}: {', '.join(map(str, paths))}"
