"""A plan in words and a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from headmax.plan.estimate import (
    CARDS,
    GPUS_PER_NODE,
    MAX_GPUS,
    Parallel,
    TrainingJob,
    Work,
    check,
    choose_efficiency,
    estimate,
    measured_steps,
    memory,
)
from headmax.tables import Table


def render(run: TrainingJob, gpus: int, ways: Sequence[Parallel]) -> Iterator[str | Table]:
    """Lines and a table for `gpus` and for every power of two; raises where `gpus` cannot do it."""
    work, steps, card = Work.of(run.recipe, run.length), measured_steps(), CARDS[run.card]
    efficiency, source = choose_efficiency(run.recipe.name, run.card, run.length, steps)
    asked = [estimate(run, work, efficiency, gpus, way) for way in ways]
    yield (
        f"{run.recipe.name}: {work.parameters:,} parameters, {work.flops / 1e9:.2f} GFLOP per token; "
        f"{run.tokens:,} tokens in {run.steps:,} steps of {run.sequences} x {run.length:,}"
    )
    yield (
        f"{run.card}: {card.tflops:g} TFLOP/s in bfloat16, {card.memory:g} GB at {card.bandwidth:,g} GB/s, "
        f"{card.link:g} GB/s within a node of {GPUS_PER_NODE}, {card.network:g} GB/s between nodes"
    )
    yield f"efficiency {efficiency:.2f}: {source}"

    names = ("GPUs", "parallel", "micro-batch x accumulation", "memory", "step", "waiting", "tokens/s", "days", "GPU-hours")
    table, grown, bold = Table(names, align="ll" + "r" * 7), False, []
    for number in sorted({gpus, *(2**n for n in range(MAX_GPUS.bit_length()))}):
        sequences = math.ceil(run.sequences / number) * number
        enough = run if sequences == run.sequences else replace(run, batch_tokens=sequences * run.length)
        grown |= enough is not run
        for way in ways:
            bold += [len(table.rows)] if number == gpus else []
            try:
                one = estimate(enough, work, efficiency, number, way)
            except ValueError:
                table.rows.append([str(number), way, "does not fit"])
                continue
            batch = f"{one.micro_batch} x {one.accumulation}" + (", checkpointing" if one.checkpointing else "")
            row = [str(number) if enough is run else f"{number}*", way, batch]
            row += [f"{sum(one.memory.values()) / 1e9:.1f} GB", f"{one.step:.3g} s", f"{one.communication / one.step:.0%}"]
            row += [f"{sequences * run.length / one.step:,.0f}", f"{one.seconds / 86400:.3g}", f"{one.gpu_hours:,.0f}"]
            table.rows.append(row)
    table.bold = bold
    yield table
    if grown:
        yield "* with a larger batch: the least that so many GPUs can share"
    for one in asked:
        kept = {on: memory(work, one.micro_batch * run.length, gpus, one.parallel, on)["activations"] / 1e9 for on in (False, True)}
        rest = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in one.memory.items() if name != "activations")
        yield (
            f"GB per GPU, {gpus} x {run.card}, {one.parallel}, {one.micro_batch} sequences at once: {rest}, "
            f"activations {kept[False]:.2f} ({kept[True]:.2f} with checkpointing)"
        )
    yield f"check: {check(run.recipe.name, run.card, run.length, steps) or 'no record of a step of this model on this card'}"
