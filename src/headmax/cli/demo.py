"""`headmax demo`."""

from __future__ import annotations

from pathlib import Path

from headmax.cli.options import File, OutFolder


def demo(seed: int = 0, steps: int = 190, out: OutFolder = Path("runs/demo"), record: File = None) -> None:
    """Train three small language models on Python's own source and compare them.

    No gates, gates frozen at their mean (the control), softmax gates. See also `headmax demo recall`.

    Args:
        seed: random seed of initialisation, data order and sampling.
        steps: training steps of each model, of 4,096 tokens; 190 take about a minute on two cores.
        out: folder for the data, the runs, the picture, the report and the records; rerun to resume.
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
        steps: training steps of each model.
        out: folder for the picture and the records.
        record: also append the records to this file.
    """
    import torch

    from headmax.demo.recall import run

    torch.set_num_threads(min(2, torch.get_num_threads()))
    run(seed=seed, heads=heads, pairs=pairs, key=key, steps=steps, out=out, record=record)
