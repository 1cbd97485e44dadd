"""A plan in words and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from headmax.plan.estimate import ANY, Estimate, TrainingJob, Wanted, estimate, memory, ways
from headmax.plan.measured import check, choose_efficiency, measured_steps
from headmax.plan.mesh import DIRECTIONS, MAX_GPUS, Mesh
from headmax.plan.work import Work
from headmax.tables import Table

OTHERS = 6
"""Ways that are shown beside the best one."""


def render(run: TrainingJob, gpus: int, wanted: Wanted = ANY) -> Iterator[str | Table]:
    """Lines and tables for `gpus` and for every power of two; raises where `gpus` cannot do it."""
    work, steps = Work.of(run.recipe, run.length), measured_steps()
    efficiency, source = choose_efficiency(run.recipe.name, run.cluster.name, run.length, steps)
    asked = ways(run, work, efficiency, gpus, wanted) or refuse(run, work, efficiency, gpus, wanted)
    yield from introduction(run, work)
    yield f"efficiency {efficiency:.2f}: {source}"
    yield "micro-batch: sequences x accumulation steps; memory is per GPU"

    rows, grown = {gpus: asked[0]}, set[int]()
    for number in {2**n for n in range(MAX_GPUS.bit_length())} - {gpus}:
        found = ways(run, work, efficiency, number, wanted)
        if not found:  # the least batch that so many GPUs can share
            grown.add(number)
            more = math.ceil(run.sequences / number) * number * run.length
            found = ways(replace(run, batch_tokens=more, tokens=max(run.tokens, more)), work, efficiency, number, wanted)
        if found:
            rows[number] = found[0]
    yield best(rows, grown, gpus)
    if grown & set(rows):
        yield "* with a larger batch, the smallest that so many GPUs can share"
    yield exchanged(rows, gpus)
    if len(asked) > 1:
        yield others(asked, gpus)
    yield from details(run, work, asked[0])
    yield f"check: {check(run.recipe.name, run.cluster.name, run.length, steps) or 'this model has not been measured on this GPU'}"


def refuse(run: TrainingJob, work: Work, efficiency: float, gpus: int, wanted: Wanted) -> list[Estimate]:
    """Raises the error of the simplest mesh that is wanted."""
    for mesh in wanted.meshes(gpus, run.cluster.per_node):
        estimate(run, work, efficiency, mesh)
    strategy = wanted.strategy or ("fsdp" if wanted.shard else "ddp")
    return [estimate(run, work, efficiency, Mesh(gpus, strategy, wanted.shard, wanted.context or 1, wanted.tensor or 1))]


def introduction(run: TrainingJob, work: Work) -> Iterator[str]:
    card = run.cluster.card
    yield (
        f"{run.recipe.name}: {work.parameters:,} parameters, {work.flops / 1e9:.2f} GFLOP per token; "
        f"{run.tokens:,} tokens in {run.steps:,} steps of {run.sequences} x {run.length:,}"
    )
    yield (
        f"{run.cluster.name}: {card.tflops:g} TFLOP/s in bfloat16, {card.memory:g} GB at {card.bandwidth:,g} GB/s, "
        f"{card.link:g} GB/s within a node of {run.cluster.per_node}, {card.network:g} GB/s between nodes"
    )


def best(rows: dict[int, Estimate], grown: set[int], gpus: int) -> Table:
    """One row for each number of GPUs."""
    table = Table(("GPUs", "best mesh", "micro-batch", "memory", "step", "days", "GPU-hours"), align="lll" + "r" * 4)
    table.title = "The best mesh for each number of GPUs"
    for number, way in sorted(rows.items()):
        batch = f"{way.micro_batch} x {way.accumulation}" + (", checkpointing" if way.checkpointing else "")
        row = [f"{number}*" if number in grown else str(number), str(way.mesh), batch, gigabytes(sum(way.memory.values()))]
        table.rows.append([*row, duration(way.step), f"{way.seconds / 86400:.3g}", f"{way.gpu_hours:,.0f}"])
    table.bold = [sorted(rows).index(gpus)]
    return table


def exchanged(rows: dict[int, Estimate], gpus: int) -> Table:
    """What each direction of those meshes costs."""
    table = Table(("GPUs", "best mesh", *DIRECTIONS), title="Communication per GPU and step: bytes, waiting")
    for number, way in sorted(rows.items()):
        costs = [way.costs.get(direction) for direction in DIRECTIONS]
        table.rows.append([str(number), str(way.mesh), *(f"{size(c.sent)}, {duration(c.waiting)}" if c else "" for c in costs)])
    table.bold = [sorted(rows).index(gpus)]
    return table


def others(asked: list[Estimate], gpus: int) -> Table:
    """The best way and the next ones."""
    table = Table(("mesh", "micro-batch", "memory", "step", "waiting", "days"), align="ll" + "r" * 4, bold=[0])
    table.title = f"The best meshes for {gpus} GPUs"
    for way in asked[: OTHERS + 1]:
        batch = f"{way.micro_batch} x {way.accumulation}" + (", checkpointing" if way.checkpointing else "")
        row = [str(way.mesh), batch, gigabytes(sum(way.memory.values())), duration(way.step)]
        table.rows.append([*row, f"{way.waiting / way.step:.0%}", f"{way.seconds / 86400:.3g}"])
    return table


def details(run: TrainingJob, work: Work, way: Estimate) -> Iterator[str]:
    """Where the memory goes, and the command."""
    tokens = way.micro_batch * run.length // way.mesh.context
    kept = {on: memory(work, tokens, way.mesh, way.accumulation, on)["activations"] / 1e9 for on in (False, True)}
    rest = ", ".join(f"{name} {held / 1e9:.2f}" for name, held in way.memory.items() if name != "activations")
    yield f"GB per GPU, {way.mesh}: {rest}, activations {kept[False]:.2f} ({kept[True]:.2f} with checkpointing)"
    yield command(run, way)


def command(run: TrainingJob, way: Estimate) -> str:
    """What to type, on each node."""
    nodes, train = math.ceil(way.mesh.gpus / run.cluster.per_node), run.recipe.train
    start = "headmax train" if way.mesh.gpus == 1 else f"torchrun --nproc-per-node {way.mesh.gpus // nodes} -m headmax train"
    start = start.replace("torchrun", f"torchrun --nnodes {nodes}") if nodes > 1 else start
    options = [f"--tokens {run.tokens}"] if run.tokens != train.token_budget else []
    options += [f"--length {run.length}"] if run.length != train.sequence_length else []
    batch = run.sequences * run.length
    options += [f"--batch-tokens {batch}"] if batch != train.batch_tokens else []
    options += [way.mesh.options, f"--compute.micro-batch {way.micro_batch}"]
    options += ["--compute.activation-checkpointing"] if way.checkpointing else []
    return " ".join([start, run.recipe.name, "--data DATA --out RUN", *filter(None, options)])


def gigabytes(held: float) -> str:
    return f"{held / 1e9:.1f} GB"


def size(sent: float) -> str:
    """In the unit that leaves one to three digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if sent >= scale:
            return f"{sent / scale:.3g} {unit}"
    return f"{sent:.0f} B"


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
