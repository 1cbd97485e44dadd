"""`headmax curves`: summarises a training run as records, and plots them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headmax import durable, fields
from headmax.analysis.style import save, styled, subplots
from headmax.records import Record
from headmax.train.metrics import STABILITY, SUMMARY, Line, read_lines

POINTS = 200
"""Most points of a curve."""
WARMUP_STEPS = 20
"""Steps to leave out of speed, as they include compilation and first allocations."""
Curve = list[tuple[int, float]]
"""Values over tokens seen."""


def downsample(lines: Sequence[Line], name: str, pick: Callable[[list[float]], float]) -> Curve:
    """One value per group of consecutive steps, at the last step's tokens."""
    width = -(-len(lines) // POINTS)
    parts = [lines[start : start + width] for start in range(0, len(lines), width)]
    return [(part[-1]["tokens"], round(pick([line[name] for line in part]), 4)) for part in parts]


EVENTS: dict[str, Any] = {"count": int, "steps": list[int], "definition": str}
"""Of each kind of a summary's stability."""


def gate_entropies(line: Line, gate: str) -> list[float]:
    """Entropy in each layer with this gate, as a fraction of the maximum."""
    return [round(health["entropy"], 4) for name, health in line["gates"].items() if name.endswith(f"/{gate}")]


def read_run(run: Path) -> tuple[dict[str, Any], list[Line]]:
    """The summary of a finished run, and the lines of the steps that were not skipped."""
    file = run / "summary.json"
    if not file.is_file():
        raise ValueError(f"{run}: no summary.json, which `headmax train` writes when a run ends; give the --out folder of a finished run")
    summary = durable.read_json(file)
    try:
        fields.check(summary, SUMMARY, set(SUMMARY), allow_unknown=True)
        for kind in STABILITY:
            fields.check(summary["stability"].get(kind), EVENTS, set(EVENTS))
        if summary["validation"] is not None:
            fields.check(summary["validation"], {"perplexity": float}, {"perplexity"}, allow_unknown=True)
    except ValueError as error:
        raise ValueError(f"{file}: not the summary of a run: {error}") from error
    lines = [line for line in read_lines(run / "metrics.jsonl") if not (line["skipped"] or None in (line["loss"], line["grad_norm"]))]
    if not lines:
        raise ValueError(f"{run / 'metrics.jsonl'}: all steps were skipped, so there is nothing to plot")
    return summary, lines


def digest(run: Path, name: str | None = None) -> Iterator[Record]:
    """Records of a finished run. `name` is the run's; unless given, its folder's name."""
    summary, lines = read_run(run)
    origin = {"date": summary["date"], "device": summary["device"], "commit": summary["commit"]}

    def record(metric: str, value: float, unit: str, **extra: Any) -> Record:
        return Record("training", name or run.resolve().name, "headmax", metric, value, unit, **origin, extra=extra)

    timed = lines[min(WARMUP_STEPS, len(lines) - 1) :]
    speed = sum(line["tokens_per_s"] * line["seconds"] for line in timed) / sum(line["seconds"] for line in timed)
    yield record("tokens", summary["tokens"], "tokens", steps=summary["steps"], skipped=len(summary["skipped_steps"]))
    yield record("tokens per second", speed, "tokens/s", after=WARMUP_STEPS, curve=downsample(timed, "tokens_per_s", statistics.median))
    yield record("training loss", summary["loss"], "nats", curve=downsample(lines, "loss", statistics.fmean))
    if summary["validation"] is not None:
        curve = [(line["tokens"], round(line["validation"]["perplexity"], 3)) for line in lines if "validation" in line]
        yield record("validation perplexity", summary["validation"]["perplexity"], "", curve=curve)
    norms = [line["grad_norm"] for line in lines]
    yield record("gradient norm", statistics.median(norms), "median", curve=downsample(lines, "grad_norm", max))
    for kind, events in summary["stability"].items():
        yield record(kind.replace("_", " "), events["count"], "steps", definition=events["definition"])
    for gate in ("read", "write"):
        if (entropy := gate_entropy(lines, gate)) is not None:
            yield record(f"{gate} gate entropy", entropy.pop("value"), "of the most", **entropy)


def gate_entropy(lines: Sequence[Line], gate: str) -> dict[str, Any] | None:
    """Its mean over layers at the end, each layer's, dead heads, and the curve; None if there is no such gate."""
    lines = [line for line in lines if line.get("gates")]
    if not lines or not (last := gate_entropies(lines[-1], gate)):
        return None
    dead = {name: health["dead"] for name, health in lines[-1]["gates"].items() if name.endswith(f"/{gate}") and health["dead"]}
    curve = [(line["tokens"], round(statistics.fmean(gate_entropies(line, gate)), 4)) for line in lines]
    return {"value": statistics.fmean(last), "layers": last, "dead": dead, "curve": curve}


@styled()
def draw(found: Sequence[Record], folder: Path, name: str) -> list[Path]:
    """Loss, gradient norm, speed and gates of one run, as PNG and SVG."""
    records = {record.metric: record for record in found}
    first = next(iter(records.values()))
    figure, ((loss, norm), (speed, gates)) = subplots(2, 2, figsize=(7.2, 5))

    def plot(axes: Any, metric: str, label: str | None = None, style: str = "-", of: Callable[[float], float] = float) -> None:
        if metric in records:
            curve = records[metric].extra["curve"]
            axes.plot([tokens / 1e6 for tokens, _ in curve], [of(value) for _, value in curve], style, markersize=3, label=label)

    plot(loss, "training loss", "training")
    if "validation perplexity" in records:
        plot(loss, "validation perplexity", f"validation, perplexity {records['validation perplexity'].value:.1f}", "o-", math.log)
    loss.set(title="loss, nats per token")
    loss.legend()
    plot(norm, "gradient norm")
    spikes, peaks = (int(records[kind].value) for kind in ("loss spikes", "gradient peaks"))
    norm.set(title=f"gradient norm ({peaks} peaks, {spikes} loss spikes)", yscale="log")
    plot(speed, "tokens per second", of=lambda value: value / 1e3)
    speed.set(title="thousand tokens per second", ylim=(0, None), xlabel="million tokens")
    for gate in ("read", "write"):
        plot(gates, f"{gate} gate entropy", gate)
        if f"{gate} gate entropy" in records:
            layers = records[f"{gate} gate entropy"].extra["layers"]
            gates.scatter([records["tokens"].value / 1e6] * len(layers), layers, s=10, alpha=0.6)
    gates.set(title="gate entropy (dots: layers at the end)", ylim=(0, 1.05), xlabel="million tokens")
    if gates.lines:
        gates.legend()
    figure.suptitle(f"{first.case}, {first.device}, commit {first.commit}", x=0.01, ha="left", fontsize=9)
    return save(figure, folder, name)
