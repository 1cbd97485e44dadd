"""Commands about recipes: what there is, what training it would take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from headmax.cli.options import Number, OptionalCount, Recipe, at_least, metavar

Speed = Annotated[float | None, metavar("GB/S")]


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


@dataclass(frozen=True)
class Spread:
    """As in `headmax train`; what is not given is chosen."""

    strategy: Annotated[Literal["ddp", "fsdp"] | None, metavar("{ddp,fsdp}", "--parallel")] = None
    """ddp replicates the model; fsdp (FSDP2) shards parameters, gradients and optimizer states."""
    shard: Number = None
    """GPUs over which fsdp shards a copy of the model, such as those of a node."""
    context: Number = None
    """GPUs that share each sequence, a segment each."""
    tensor: Number = None
    """GPUs that share the heads, the columns of each MLP and the vocabulary."""


CHOSEN = Spread()


def plan(
    recipe: Recipe,
    /,
    gpu: Annotated[str, metavar("GPU")] = "h100",
    gpus: int = 8,
    gpus_per_node: int = 8,
    link: Speed = None,
    network: Speed = None,
    parallel: Spread = CHOSEN,
    tokens: OptionalCount = None,
    length: Number = None,
    batch_tokens: OptionalCount = None,
) -> None:
    """Estimate memory, step time and GPU-hours of a training run; find the best mesh.

    For 1 to 1,024 GPUs, with the communication of each mesh dimension.

    Args:
        recipe: the model to train; `headmax recipes` lists them.
        gpu: which GPU, such as a100, h100, h200, h20 or b200.
        gpus: number of GPUs; the tables show other numbers too.
        gpus_per_node: GPUs of a node.
        link: between two GPUs of a node, one way; that of the GPU's usual node unless given.
        network: from one GPU to other nodes, one way; that of the GPU's usual cluster unless given.
        parallel: as `headmax train` has it; what is not given is chosen.
        tokens: training tokens, such as 15e9 or 15B; the recipe's unless given.
        length: tokens per sequence; the recipe's unless given.
        batch_tokens: tokens per step over all GPUs, such as 0.5M; the recipe's unless given.
    """
    from rich.console import Console

    from headmax import recipes as book
    from headmax.plan import table
    from headmax.plan.cards import Cluster
    from headmax.plan.estimate import TrainingJob, Wanted

    at_least(1, gpus_per_node=gpus_per_node)
    chosen = book.get(recipe)
    run = TrainingJob(
        chosen,
        Cluster.of(gpu, gpus_per_node, link, network),
        chosen.train.token_budget if tokens is None else tokens,
        chosen.train.sequence_length if length is None else length,
        chosen.train.batch_tokens if batch_tokens is None else batch_tokens,
    )
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for part in table.render(run, gpus, Wanted(parallel.strategy, parallel.shard, parallel.context, parallel.tensor)):
        console.print(part if isinstance(part, str) else part.terminal(), soft_wrap=isinstance(part, str))
