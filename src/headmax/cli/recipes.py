"""Commands about recipes: what there is, what training it would take."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from headmax.cli.options import Number, OptionalCount, Recipe, metavar


def recipes() -> None:
    """List the recipes with parameter counts and state sizes."""
    from rich.console import Console

    from headmax import recipes as book
    from headmax.recipes.summary import summarize
    from headmax.tables import Table

    columns = ["recipe", "layers x hidden", "heads", "parameters", "without embeddings", "gate parameters", "state per sequence"]
    table = Table(columns, align="llrrrrr")
    for name in book.names():
        recipe = book.get(name)
        model, summary = recipe.model, summarize(recipe)
        sizes = ((summary.state_bytes, ""), (summary.token_bytes, " per token"))
        state = " + ".join(f"{size / 2**10:,.{0 if size >= 2**13 else 2}f} KiB{what}" for size, what in sizes if size)
        counts = (f"{n:,}" for n in (summary.parameters, summary.body_parameters, summary.gate_parameters))
        table.rows.append([name, f"{model.num_hidden_layers} x {model.hidden_size}", str(model.num_heads), *counts, state])
    Console(width=None if sys.stdout.isatty() else 140).print(table.terminal())


def plan(
    recipe: Recipe,
    /,
    gpu: Annotated[str, metavar("GPU")] = "h100",
    gpus: int = 8,
    parallel: Annotated[Literal["ddp", "fsdp"] | None, metavar("{ddp,fsdp}")] = None,
    tokens: OptionalCount = None,
    length: Number = None,
    batch_tokens: OptionalCount = None,
) -> None:
    """Estimate memory, step time, days and GPU-hours of a training run.

    Args:
        recipe: the model to train; `headmax recipes` lists them.
        gpu: which GPU, such as a100, h100, h200, h20 or b200.
        gpus: number of GPUs; the table shows other numbers too.
        parallel: ddp copies the model to every GPU, fsdp shards it; both unless given.
        tokens: training tokens, such as 15e9 or 15B; the recipe's unless given.
        length: tokens per sequence; the recipe's unless given.
        batch_tokens: tokens per step over all GPUs, such as 0.5M; the recipe's unless given.
    """
    from rich.console import Console

    from headmax import recipes as book
    from headmax.plan import table
    from headmax.plan.estimate import TrainingJob

    chosen = book.get(recipe)
    run = TrainingJob(
        chosen,
        gpu,
        chosen.train.token_budget if tokens is None else tokens,
        chosen.train.sequence_length if length is None else length,
        chosen.train.batch_tokens if batch_tokens is None else batch_tokens,
    )
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for part in table.render(run, gpus, ("ddp", "fsdp") if parallel is None else (parallel,)):
        console.print(part if isinstance(part, str) else part.terminal(), soft_wrap=isinstance(part, str))
