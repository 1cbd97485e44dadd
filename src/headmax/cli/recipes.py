"""Commands about recipes: what there is, what training it would take."""

from __future__ import annotations

import sys
from typing import Literal

from headmax.cli.arguments import count


def recipes() -> None:
    """List the recipes with parameter counts, gate parameters and the state carried per sequence."""
    from rich.console import Console
    from rich.table import Table

    from headmax import recipes as book
    from headmax.recipes.summary import summarize

    table = Table(
        "recipe", "layers x hidden", *("heads", "parameters", "without embeddings", "gate parameters", "state per sequence"), box=None
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for name in book.names():
        recipe = book.get(name)
        model, summary = recipe.model, summarize(recipe)
        state = f"{summary.state_bytes / 2**10:,.0f} KiB" + " per token" * summary.grows
        counts = (f"{n:,}" for n in (summary.parameters, summary.body_parameters, summary.gate_parameters))
        table.add_row(name, f"{model.num_hidden_layers} x {model.hidden_size}", str(model.num_heads), *counts, state)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def plan(
    recipe: str,
    /,
    gpu: str = "h100",
    gpus: int = 8,
    parallel: Literal["ddp", "fsdp"] | None = None,
    tokens: str | None = None,
    length: int | None = None,
    batch_tokens: str | None = None,
) -> None:
    """Estimate memory, step time, days and GPU-hours of a training run on 1 to 1024 GPUs.

    Args:
        recipe: which model.
        gpu: which card, such as a100, h100, h200, h20, b200.
        gpus: how many; the table has other numbers too.
        parallel: ddp copies the model to every GPU, fsdp shards it; both unless given.
        tokens: to train on, such as 15e9 or 15B; the recipe's unless given.
        length: tokens per sequence; the recipe's unless given.
        batch_tokens: tokens per step over all GPUs, such as 0.5M; the recipe's unless given.
    """
    from rich.console import Console

    from headmax import recipes as book
    from headmax.bench import plan_table
    from headmax.bench.plan import Run

    chosen = book.get(recipe)
    run = Run(
        chosen,
        gpu,
        chosen.train.token_budget if tokens is None else count("tokens", tokens),
        chosen.train.sequence_length if length is None else length,
        chosen.train.batch_tokens if batch_tokens is None else count("batch-tokens", batch_tokens),
    )
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for part in plan_table.render(run, gpus, ("ddp", "fsdp") if parallel is None else (parallel,)):
        console.print(part, soft_wrap=isinstance(part, str))
