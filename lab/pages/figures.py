"""Figures of the pages, from records; `python -m lab figures` draws them all. What was not measured is named, not drawn.

| figure | suite | records it reads |
|---|---|---|
| scaling | eval | case "wikitext", metric "word_perplexity", extra.model "[softmax-]gla-{80m,110m,170m,340m}" |
| heads | eval | the same of "[softmax-]gla-110m[-h8, -h16]"; without a suffix it has 4 heads |
| differences | reproduction | "validation loss" of the small language models, seed by seed |
| memory, throughput | train | case "RECIPE LENGTHxBATCH", metric "VARIANT/peak memory" and "VARIANT/tokens per second" (bench train) |
| latency | decode | case "MODEL batch 1 context C decoded N", metric "end to end" (bench decode) |

Of records alike the last one counts. Runs that differ in their seed alone are points of one mean, with its standard deviation.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headmax.analysis.style import COLOURS, WIDTH, save, styled, subplots
from lab import RESULTS
from lab.study.earlier import LINEAR, MISSING, TITLES, Results, Run

Lines = dict[str, dict[Any, list[float]]]
"""By label and x, a value per seed."""
Points = Iterable[tuple[str, Any, int | None, float]]
"""Label, x, seed, y."""
OURS, PEER, ATTENTION = "headmax", "flash-linear-attention", TITLES["transformer"]
GATES = {"plain": "no gates", "softmax": "softmax gates"}
SERIES = {
    f"{OURS}, no gates": COLOURS[0],
    f"{OURS}, softmax gates": COLOURS[4],
    f"{PEER}, no gates": COLOURS[5],
    f"{PEER}, softmax gates": COLOURS[1],
}
"""Blue is ours, red theirs; dark without gates, light with them."""
README_MODEL, README_COMMIT = "gdn-340m", "5b63018"
"""What README's chart and table are of."""
SPEED, MEMORY = "tokens per second", "peak memory"
BESIDE, LONG = (4096, 8), 65_536
"""Length and batch at which the peer was timed; tokens of a step that was timed at several lengths."""


@dataclass(frozen=True)
class Figure:
    title: str
    read: Callable[[Results], Points]
    draw: Callable[[Lines], Any]
    """The picture of what was read."""
    finding: Callable[[Lines], str]
    """What is to be seen in it: its alternative text."""
    needs: str
    """What makes the records, for a reader who has none."""


def perplexity(results: Results, pattern: str) -> Points:
    """Models whose name matches, with x the pattern's number."""
    for record in results.records:
        match = re.fullmatch(rf"(softmax-)?{pattern}", record.extra.get("model", ""))
        if match and (record.suite, record.case, record.metric) == ("eval", "wikitext", "word_perplexity"):
            yield "Softmax GLA" if match[1] else "GLA", int(match[2] or 4), record.extra.get("run", {}).get("seed"), record.value


def differences(results: Results) -> Points:
    """Softmax gates against the plain model and against the control, in per cent of perplexity."""
    for rival, title in {"plain": "no gates", "uniform": "gates frozen at 1/H"}.items():
        for backbone in LINEAR:
            place = "" if rival == "plain" or backbone == "gla" else "-after"
            for seed, value in results.paired(Run(backbone, f"softmax{place}"), Run(backbone, rival + place)).items():
                yield title, TITLES[backbone], seed, value


def training_step(results: Results, metric: str) -> Points:
    """Of the 340M models, with x the backbone, the length and the batch."""
    for record in results.records:
        match = re.fullmatch(r"(\w+)-340m (\d+)x(\d+)", record.case)
        variant, _, what = record.metric.partition("/")
        if record.suite != "train" or what != metric or match is None:
            continue
        size = int(match[2]), int(match[3])
        if variant == "transformer":
            yield ATTENTION, (ATTENTION, *size), None, record.value
        elif variant in GATES:
            yield f"{PEER if record.impl == 'fla' else OURS}, {GATES[variant]}", (TITLES[match[1]], *size), None, record.value


def one_commit(results: Results) -> Points:
    """README's training steps: one model, one size, one commit."""
    for record in results.records:
        variant, _, what = record.metric.partition("/")
        if (record.case, what) == (f"{README_MODEL} 4096x8", SPEED) and record.commit.startswith(README_COMMIT):
            yield PEER if record.impl == "fla" else OURS, GATES[variant], None, record.value


def generation(results: Results) -> Points:
    """With x the backbone and the number of tokens."""
    for record in results.records:
        match = re.fullmatch(r"(softmax-)?(\w+)-340m batch 1 context \d+ decoded (\d+)", record.case)
        if match and (record.suite, record.metric) == ("decode", "end to end"):
            yield GATES["softmax" if match[1] else "plain"], (TITLES[match[2]], int(match[3])), None, record.value


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the standard deviation over seeds; 0 for one seed."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def draw_perplexity(lines: Lines, x: str) -> Any:
    picture, axes = subplots(figsize=(WIDTH, 3.2))
    for label, values in lines.items():
        spots = sorted(values)
        middle, spread = zip(*(mean_and_spread(values[spot]) for spot in spots), strict=True)
        axes.errorbar(spots, middle, yerr=spread, fmt="o-", markersize=4, capsize=2, label=label)
    ticks(axes, {spot for values in lines.values() for spot in values})
    axes.set(xlabel=x, ylabel="perplexity")
    axes.legend()
    return picture


def draw_differences(lines: Lines) -> Any:
    """A forest plot: seeds as open circles, mean ± standard deviation as a bar."""
    rows = [(f"{backbone}, against {rival}", values) for rival, found in lines.items() for backbone, values in found.items()][::-1]
    picture, axes = subplots(figsize=(WIDTH, 0.32 * len(rows) + 0.8))
    for place, (_, values) in enumerate(rows):
        middle, spread = mean_and_spread(values)
        axes.errorbar([middle], [place], xerr=[spread], fmt="o", markersize=6, capsize=3, color=COLOURS[0])
        axes.plot(values, [place] * len(values), "o", markersize=4, color=COLOURS[5], markerfacecolor="white", zorder=3)
    axes.axvline(0, color="#404040", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set(ylim=(-0.6, len(rows) - 0.4), xlabel="change in perplexity with softmax gates, %")
    return picture


def draw_training(lines: Lines, unit: str) -> Any:
    """Bars beside the peer; below them our softmax models over length, at as many tokens a step."""
    picture, (bars, lengths) = subplots(2, 1, figsize=(WIDTH, 5.4), height_ratios=(3, 2))
    for n, (label, colour) in enumerate(SERIES.items()):
        found = {place: lines.get(label, {}).get((TITLES[backbone], *BESIDE)) for place, backbone in enumerate(LINEAR)}
        spots = {place + 0.2 * (n - 1.5): values[0] for place, values in found.items() if values}
        bars.bar(list(spots), list(spots.values()), 0.18, color=colour, label=label)
    for values in lines.get(ATTENTION, {}).values():
        bars.axhline(values[0], color="#404040", linewidth=1, linestyle="--", label=ATTENTION)
    bars.set_xticks(range(len(LINEAR)), [TITLES[backbone] for backbone in LINEAR])
    bars.set(title="{1} sequences of {0:,} tokens".format(*BESIDE))
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    speeds = {place: values[0] for place, values in lines.get(f"{OURS}, softmax gates", {}).items() if place[1] * place[2] == LONG}
    for backbone, style in zip(LINEAR, ("o-", "s-", "^-"), strict=True):
        length = sorted(place[1] for place in speeds if place[0] == TITLES[backbone])
        heights = [speeds[TITLES[backbone], n, LONG // n] for n in length]
        lengths.plot(length, heights, style, markersize=4, label=TITLES[backbone])
    ticks(lengths, {place[1] for place in speeds})
    lengths.set(title=f"{LONG:,} tokens a step, {OURS}, softmax gates", xlabel="tokens in a sequence")
    lengths.legend(loc="lower center", ncols=3)
    for axes in (bars, lengths):
        axes.set(ylabel=unit, ylim=(0, 1.08 * max(axes.dataLim.y1, 0.1)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
    return picture


def draw_one_commit(lines: Lines) -> Any:
    """A bar per library and kind of gates, with its value."""
    picture, axes = subplots(figsize=(WIDTH, 1.9))
    rows = [(f"{impl}, {gates}", values[0]) for impl, found in lines.items() for gates, values in found.items()]
    rows.sort(key=lambda row: list(SERIES).index(row[0]), reverse=True)
    bars = axes.barh([name for name, _ in rows], [value for _, value in rows], color=[SERIES[name] for name, _ in rows])
    axes.bar_label(bars, [f"{value:,.0f}" for _, value in rows], padding=3)
    axes.set(xlabel=f"tokens per second, {README_MODEL}", xlim=(0, 1.2 * max(value for _, value in rows)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", visible=False)
    return picture


def draw_latency(lines: Lines) -> Any:
    """A text's time over its tokens."""
    picture, axes = subplots(figsize=(WIDTH, 3.2))
    order = list(TITLES.values())
    places = sorted({place for found in lines.values() for place in found}, key=lambda place: (place[1], order.index(place[0])))
    for (label, found), shift, colour in zip(sorted(lines.items()), (-0.19, 0.19), (COLOURS[0], COLOURS[4]), strict=False):
        spots = {places.index(place) + shift: 1e3 * values[0] / place[1] for place, values in found.items()}
        axes.bar(list(spots), list(spots.values()), 0.36, color=colour, label=label)
    axes.set_xticks(range(len(places)), [f"{name}\n{tokens:,}" for name, tokens in places])
    axes.set(xlabel="decoded tokens", ylabel="ms per token", ylim=(0, None))
    axes.legend(loc="upper right")
    return picture


def ticks(axes: Any, places: set[int]) -> None:
    """A logarithmic axis that names these places alone."""
    axes.set_xscale("log")
    axes.set_xticks(sorted(places) or [1], [f"{place:,}" for place in sorted(places)] or [""])
    axes.minorticks_off()


def find_perplexity(lines: Lines) -> str:
    """Where every label is lowest."""
    lowest = {label: min(found, key=lambda x: mean_and_spread(found[x])[0]) for label, found in lines.items()}
    return "WikiText perplexity is lowest at " + ", ".join(f"{x} for {label}" for label, x in lowest.items())


def find_differences(lines: Lines) -> str:
    """Which differences exceed two standard deviations."""
    said = []
    for rival, found in lines.items():
        apart = [name for name, values in found.items() if abs(mean_and_spread(values)[0]) > 2 * mean_and_spread(values)[1]]
        said.append(f"against {rival}, {' and '.join(apart) or 'nowhere'}")
    return "Where softmax gates change perplexity by more than two standard deviations: " + "; ".join(said)


def find_training(lines: Lines, what: str) -> str:
    """Ours over the peer's, with gates."""
    found = {b: [lines.get(f"{impl}, softmax gates", {}).get((TITLES[b], *BESIDE)) for impl in (OURS, PEER)] for b in LINEAR}
    ratios = [f"{TITLES[b]} {ours[0] / theirs[0]:.2f}" for b, (ours, theirs) in found.items() if ours and theirs]
    return f"{what} with softmax gates, as a multiple of {PEER}'s: {', '.join(ratios) or MISSING}"


def find_one_commit(lines: Lines) -> str:
    ratios = [f"{lines[OURS][gates][0] / lines[PEER][gates][0]:.2f} times with {gates}" for gates in GATES.values()]
    return f"Training throughput of {README_MODEL} in headmax, relative to {PEER}: {' and '.join(ratios)}"


def find_latency(lines: Lines) -> str:
    """What gates add."""
    plain, gated = (lines.get(gates, {}) for gates in GATES.values())
    costs = [100 * (gated[place][0] / values[0] - 1) for place, values in plain.items() if place in gated]
    span = f"by {min(costs):+.1f}% to {max(costs):+.1f}%".replace("-", "−") if costs else MISSING
    return f"With softmax gates the time to decode one text changes {span}"


WIKITEXT = "train the models (headmax train) and run headmax eval on wikitext"
BENCH = "python -m lab bench train"
FIGURES = {
    "scaling": Figure(
        "WikiText perplexity over size",
        lambda results: perplexity(results, r"gla-(\d+)m"),
        lambda lines: draw_perplexity(lines, "million parameters (the paper's names)"),
        find_perplexity,
        WIKITEXT,
    ),
    "heads": Figure(
        "WikiText perplexity over the number of heads, 110M",
        lambda results: perplexity(results, r"gla-110m(?:-h(\d+))?"),
        lambda lines: draw_perplexity(lines, "heads"),
        find_perplexity,
        WIKITEXT,
    ),
    "differences": Figure(
        "Softmax gates in small language models", differences, draw_differences, find_differences, "small language models of several seeds"
    ),
    "speed": Figure("Training speed", one_commit, draw_one_commit, find_one_commit, BENCH),
    "throughput": Figure(
        "Training throughput",
        lambda results: training_step(results, SPEED),
        lambda lines: draw_training(lines, SPEED),
        lambda lines: find_training(lines, "Training throughput"),
        BENCH,
    ),
    "memory": Figure(
        "Peak memory of a training step",
        lambda results: training_step(results, MEMORY),
        lambda lines: draw_training(lines, "GiB"),
        lambda lines: find_training(lines, "Peak memory"),
        BENCH,
    ),
    "latency": Figure("Decoding one text", generation, draw_latency, find_latency, "headmax bench decode"),
}


def collect(figure: Figure, results: Results) -> Lines:
    """What the figure shows; of records alike the last one counts."""
    seeds: dict[str, dict[Any, dict[int | None, float]]] = defaultdict(lambda: defaultdict(dict))
    for label, x, seed, y in figure.read(results):
        seeds[label][x][seed] = y
    return {label: {x: list(values.values()) for x, values in found.items()} for label, found in seeds.items()}


@styled()
def draw(name: str, folder: Path, results: Results) -> list[Path] | None:
    """Writes one figure; None if it has no records."""
    figure = FIGURES[name]
    lines = collect(figure, results)
    return save(figure.draw(lines), folder, name) if lines else None


def reproduce(folder: Path, results: Path = RESULTS) -> Iterator[str]:
    """Draws all figures from the .jsonl files of `results`; says of each where it is, or what it lacks."""
    found = Results(results)
    for name, figure in FIGURES.items():
        paths = draw(name, folder, found)
        if paths is None:
            yield f"{name}: no records for it in {results}; they come from: {figure.needs}"
        else:
            yield f"{name}: {', '.join(map(str, paths))}"
