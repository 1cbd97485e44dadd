"""Trains the variants one after the other; a rerun reuses what is finished and resumes what was interrupted."""

from __future__ import annotations

import functools
import json
import shutil
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmax import HeadmaxConfig, HeadmaxForCausalLM, durable, records
from headmax.data.source import Source
from headmax.demo.display import Display
from headmax.train import TrainConfig
from headmax.train.loading import load_model
from headmax.train.metrics import Line, read_lines
from headmax.train.trainer import fit


@dataclass(frozen=True)
class Experiment:
    """What to train; the variants differ only in their gates."""

    models: Mapping[str, HeadmaxConfig]
    """One per variant."""
    config: TrainConfig
    source: Source
    held_out: Source
    start: Mapping[str, Tensor] = field(default_factory=dict)
    """Initial parameters shared by all variants; the others are random."""
    tokenizer: Path | None = None


@dataclass(frozen=True)
class Trained:
    """A trained variant."""

    model: HeadmaxForCausalLM
    lines: list[Line]
    """Metrics, one line per step."""

    @property
    def loss(self) -> float:
        """On held-out text, in nats per token."""
        return self.lines[-1]["validation"]["loss"]

    @property
    def accuracies(self) -> dict[int, float]:
        """Held-out accuracy by step."""
        return {line["step"]: line["validation"]["accuracy"] for line in self.lines if "validation" in line}

    @property
    def tokens_per_s(self) -> float:
        """Median over steps."""
        return statistics.median(line["tokens_per_s"] for line in self.lines)

    @property
    def gate_entropy(self) -> float | None:
        """Mean over the gates on held-out text: 1 if all heads share evenly, 0 if one takes all; None without gates."""
        gates = self.lines[-1].get("gates", {})
        return statistics.fmean(gate["entropy"] for gate in gates.values()) if gates else None


def train(experiment: Experiment, out: Path, display: Display) -> dict[str, Trained]:
    """Trains every variant in a folder VARIANT of `out`, and writes its settings to VARIANT.json."""
    trained = {}
    with display:
        for variant, model in experiment.models.items():
            folder = out / variant
            discard_other_run(folder, settings(model, experiment))
            if is_finished(folder, experiment.config.steps):
                display.reused(variant, list(read_lines(folder / "metrics.jsonl"))[-1])
            else:
                fit(
                    model,
                    experiment.config,
                    experiment.source,
                    folder,
                    validation=experiment.held_out,
                    tokenizer=experiment.tokenizer,
                    start=experiment.start,
                    show=functools.partial(display.step, variant),
                )
            trained[variant] = Trained(load_model(folder), list(read_lines(folder / "metrics.jsonl")))
    return trained


def settings(model: HeadmaxConfig, experiment: Experiment) -> dict[str, Any]:
    """Everything that determines a variant's result, as JSON."""
    code = {"commit": records.current_commit(), "torch": torch.__version__}
    return json.loads(
        json.dumps({"model": model.to_dict(), "train": asdict(experiment.config), "data": experiment.source.identity, **code})
    )


def discard_other_run(folder: Path, wanted: dict[str, Any]) -> None:
    """Removes a run with other settings; keeps one with the wanted settings, finished or not."""
    path = folder.with_suffix(".json")
    if path.exists() and durable.read_json(path) == wanted:
        return
    path.unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    durable.write(path, json.dumps(wanted, indent=2) + "\n")


def is_finished(folder: Path, steps: int) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and durable.read_json(summary)["steps"] == steps
