"""`headmax demo`."""

from __future__ import annotations

from pathlib import Path

from headmax.cli.options import File, OutFolder


def demo(seed: int = 0, steps: int = 190, out: OutFolder = Path("runs/demo"), record: File = None) -> None:
    """Train three small language models on Python's own source and compare them.

    One model has no gates, one has gates frozen at their mean (the control), one has softmax gates. See also `headmax demo recall`.

    Args:
        seed: random seed for initialisation, data order and sampling.
        steps: training steps per model, of 4,096 tokens each; 190 take about a minute on two cores.
        out: folder for data, runs, plot, report and records; rerun to resume, or with other settings to start over.
        record: also append the records to this file.
    """
    from headmax.demo.code import run

    run(seed=seed, steps=steps, out=out, record=record)


def recall(
    seed: int = 0,
    heads: int = 4,
    pairs: int = 16,
    key: int = 8,
    steps: int = 600,
    out: OutFolder = Path("runs/demo-recall"),
    record: File = None,
) -> None:
    """Train three tiny models on associative recall and compare them.

    Args:
        seed: random seed of initialisation and data.
        heads: heads of the linear-attention layers.
        pairs: key-value pairs to remember.
        key: width of a head's query and key.
        steps: training steps per model.
        out: folder for runs, plot, report and records; rerun to resume, or with other settings to start over.
        record: also append the records to this file.
    """
    import torch

    from headmax.demo.recall import run

    torch.set_num_threads(min(2, torch.get_num_threads()))
    run(seed=seed, heads=heads, pairs=pairs, key=key, steps=steps, out=out, record=record)
