"""The demonstration: one tiny backbone trained three times on associative recall, and what the gates made of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM, records
from headmax.data.mqar import MQAR

VARIANTS = {"plain": None, "uniform": HeadGateConfig(kind="uniform"), "softmax": HeadGateConfig()}
"""No gates; gates frozen at their mean, the control; gates that compete."""
RECORDS = records.RESULTS / "demo.jsonl"


@dataclass
class Run:
    """One variant's training: accuracy on held-out sequences at the steps where it was measured."""

    steps: list[int]
    accuracy: list[float]
    model: HeadmaxForCausalLM


def build(variant: str, task: MQAR, heads: int, key: int, seed: int) -> HeadmaxForCausalLM:
    torch.manual_seed(seed)
    return HeadmaxForCausalLM(
        HeadmaxConfig(
            mixer="linear",
            hidden_size=64,
            num_hidden_layers=2,
            num_heads=heads,
            head_k_dim=key,
            conv_size=4,
            vocab_size=task.vocab_size,
            head_gate=VARIANTS[variant],
        )
    )


def accuracy(model: HeadmaxForCausalLM, tokens: Tensor, answers: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        logits = model(tokens, logits_to_keep=answers.shape[1], use_cache=False).logits
    return float((logits.argmax(-1) == answers).float().mean())


def train(
    model: HeadmaxForCausalLM, task: MQAR, steps: int, seed: int, every: int = 50, peak: float = 3e-3
) -> Iterator[tuple[int, float | None]]:
    """Trains in place; yields (step, held-out accuracy where it was measured)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.0)
    data = torch.Generator().manual_seed(seed)
    held_out = task.batch(512, torch.Generator().manual_seed(1_000_000 + seed))
    for step in range(1, steps + 1):
        model.train()
        tokens, answers = task.batch(64, data)
        logits = model(tokens, logits_to_keep=task.num_pairs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.param_groups[0]["lr"] = peak * min(1.0, step / 50)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield step, accuracy(model, *held_out) if step % every == 0 or step == steps else None


def run(*, seed: int, heads: int, pairs: int, key: int, steps: int, out: Path, record: Path | None) -> None:
    """Trains the variants on the same data from the same seed, draws the picture, prints the table and what earlier seeds gave."""
    from headmax.demo.figure import draw, require_matplotlib

    require_matplotlib()
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    console = Console()
    task = MQAR(num_pairs=pairs, vocab_size=64)
    case = f"mqar pairs={pairs} heads={heads} key={key} steps={steps}"
    console.print(
        f"Associative recall: {pairs} key-value pairs, then each key asks for its value ({task.time} tokens, chance {task.chance:.3f})."
    )
    runs: dict[str, Run] = {}
    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TextColumn("accuracy {task.fields[accuracy]:.3f}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bars = {variant: progress.add_task(variant, total=steps, accuracy=0.0, start=False) for variant in VARIANTS}
        for variant, bar in bars.items():
            progress.start_task(bar)
            runs[variant] = Run([], [], build(variant, task, heads, key, seed))
            for step, measured in train(runs[variant].model, task, steps, seed):
                if measured is not None:
                    runs[variant].steps.append(step)
                    runs[variant].accuracy.append(measured)
                    progress.update(bar, accuracy=measured)
                progress.update(bar, completed=step)

    make = records.Recorder("demo", "cpu")
    made = [
        make(f"{case} {variant}", "headmax", metric, value, unit, seed, variant=variant, pairs=pairs, heads=heads, key=key, steps=steps)
        for variant, r in runs.items()
        for metric, value, unit in (("accuracy", r.accuracy[-1], "fraction"), ("mean accuracy over training", mean(r.accuracy), "fraction"))
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "records.jsonl").unlink(missing_ok=True)
    records.append(out / "records.jsonl", made)
    if record is not None:
        records.append(record, made)
    draw(runs, task, seed, out / "demo.png")

    table = Table("", "accuracy", "mean over training", title=f"after {steps} steps, seed {seed}", title_justify="left", box=None)
    for variant, r in runs.items():
        table.add_row(variant, f"{r.accuracy[-1]:.3f}", f"{mean(r.accuracy):.3f}")
    console.print(table)
    console.print(verdict({variant: mean(r.accuracy) for variant, r in runs.items()}))
    for line in earlier_seeds(RECORDS):
        console.print(line, soft_wrap=True)
    console.print(f"Picture: {out / 'demo.png'}")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def verdict(score: dict[str, float]) -> str:
    """Plain words on who learnt faster, by mean accuracy over training."""
    rivals = {name: value for name, value in score.items() if name != "softmax"}
    best = max(rivals, key=lambda name: rivals[name])
    if score["softmax"] > rivals[best]:
        return (
            f"Here the softmax gates learnt faster than both plain and uniform (ahead of {best} by {score['softmax'] - rivals[best]:.3f})."
        )
    return f"Here the softmax gates did not win: {best} learnt faster, by {rivals[best] - score['softmax']:.3f}."


def seed_scores(path: Path) -> dict[str, list[dict[str, float]]]:
    """For each recorded setting, the mean accuracy over training of every variant, seed by seed."""
    settings: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for r in records.read(path):
        if r.metric == "mean accuracy over training" and r.seed is not None:
            settings[r.case.rsplit(" ", 1)[0]][r.seed][r.extra["variant"]] = r.value
    return {case: [scores for scores in by_seed.values() if set(scores) == set(VARIANTS)] for case, by_seed in settings.items()}


def earlier_seeds(path: Path) -> Iterator[str]:
    """One line per recorded setting: over how many seeds softmax was ahead of each rival, and the mean accuracies."""
    for case, scores in seed_scores(path).items():
        ahead = " and ".join(f"of {rival} in {sum(s['softmax'] > s[rival] for s in scores)}" for rival in ("plain", "uniform"))
        means = ", ".join(f"{variant} {mean([s[variant] for s in scores]):.3f}" for variant in VARIANTS)
        yield f"Recorded, {case}: softmax ahead {ahead} of {len(scores)} seeds ({means})."
