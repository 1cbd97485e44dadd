"""What would it take? Memory, step time, days and GPU-hours of a training run on a mesh of GPUs, and the best mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from headmax.layers.loss import LOGITS_AT_ONCE
from headmax.plan.cards import USABLE, Card, Cluster
from headmax.plan.mesh import ALONE, DIRECTIONS, NARROW, WIDE, Direction, Mesh, Message, messages
from headmax.plan.work import Work
from headmax.recipes import Recipe
from headmax.train.config import Strategy

STATE_BYTES = {"parameters": WIDE, "gradients": WIDE, "AdamW": 2 * WIDE}
"""Of a parameter; float32, and sharded by FSDP."""
OPTIMIZER_TRAFFIC = 36
"""Bytes an optimizer step moves per parameter: the norm and the clipping read and write gradients, AdamW reads 16 and writes 12."""
WEIGHT_TRAFFIC = 14
"""Bytes of a micro-batch per parameter: float32 read, bfloat16 written and read twice, the gradient written."""
ACTIVATION_TOUCHES = 5
"""Times that a kept activation moves: written, read, read again going back, its gradient written and read."""
NEVER_HIDDEN = 0.1
"""The share of communication that does not overlap with work: the last bucket, the first gather."""
NEAR_BEST = 1.02
"""A simpler mesh is better where it takes at most so many times as long."""


@dataclass(frozen=True)
class TrainingJob:
    """A training run to plan."""

    recipe: Recipe
    cluster: Cluster
    tokens: int
    length: int
    batch_tokens: int

    def __post_init__(self) -> None:
        if self.length < 1 or self.batch_tokens < self.length:
            raise ValueError(f"a batch of {self.batch_tokens:,} tokens holds no sequence of {self.length:,}")
        if self.tokens < self.batch_tokens:
            raise ValueError(f"{self.tokens:,} tokens are fewer than one batch of {self.batch_tokens:,}")

    @property
    def sequences(self) -> int:
        """Per batch, whole ones."""
        return self.batch_tokens // self.length

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.sequences * self.length))


@dataclass(frozen=True)
class Cost:
    """What one direction of a mesh sends."""

    sent: float
    """Bytes by each GPU in a step."""
    seconds: float
    """Of a step's messages."""
    waiting: float
    """The part of `seconds` in which no work is done."""


@dataclass(frozen=True)
class Estimate:
    """One way to do it."""

    mesh: Mesh
    micro_batch: int
    """Sequences a GPU takes, or has a piece of, at once."""
    accumulation: int
    checkpointing: bool
    memory: dict[str, float]
    """Bytes per GPU by what they are for."""
    costs: dict[Direction, Cost]
    step: float
    """Seconds."""
    steps: int

    @property
    def waiting(self) -> float:
        """Seconds of a step."""
        return sum(cost.waiting for cost in self.costs.values())

    @property
    def seconds(self) -> float:
        return self.step * self.steps

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.mesh.gpus / 3600


def memory(work: Work, tokens: int, mesh: Mesh = ALONE, accumulation: int = 1, checkpointing: bool = False) -> dict[str, float]:
    """Bytes on a GPU with so many tokens at once, by what they are for."""
    t, spread = mesh.tensor, mesh.strategy == "fsdp"
    whole = work.matrices.on(t) + work.ends / t
    others = work.others.on(t)
    held = {name: size * (whole / mesh.shards + others) for name, size in STATE_BYTES.items()}
    if spread and accumulation > 1:  # summed over micro-batches before they are sent
        held["gradients"] = WIDE * (whole + others)
    # Sharded parameters are whole for the layer at work and the next, in bfloat16, and so is a layer's gradient before it is reduced.
    at_work = (whole + others) / (work.layers + 1)
    held["bfloat16 weights"] = NARROW * (2 * at_work if spread else whole + others) + (WIDE * at_work if mesh.shards > 1 else 0)
    kept = work.inputs if checkpointing else work.activations.on(t)
    keys = NARROW * work.keys / t * (mesh.context - 1)  # of the pieces before
    held["activations"] = tokens * (kept + work.block.on(t) + keys)
    vocabulary = work.vocabulary / t
    held["loss"] = 2.0 * min(LOGITS_AT_ONCE, tokens * vocabulary) + 4.0 * vocabulary * work.hidden + 4.0 * tokens * work.hidden
    return held


def ideal(work: Work, card: Card, tokens: int, mesh: Mesh = ALONE, checkpointing: bool = False) -> tuple[float, float]:
    """(seconds of a micro-batch, seconds of the optimizer) with products at the card's peak and traffic at its bandwidth, in turns.

    `tokens` are those of a GPU. The last piece of a sequence sees all keys, and all wait for it.
    """
    again, t, parameters = 4 / 3 if checkpointing else 1.0, mesh.tensor, work.parameters / mesh.tensor
    per_token = work.flops / t
    if mesh.context > 1:
        per_token += (work.corrections + work.attention * (1 - 1 / mesh.context)) / t
    flops = tokens * per_token * again / (card.tflops * 1e12)
    traffic = tokens * work.activations.on(t) * ACTIVATION_TOUCHES * again + WEIGHT_TRAFFIC * parameters
    return flops + traffic / (card.bandwidth * 1e9), OPTIMIZER_TRAFFIC * parameters / mesh.shards / (card.bandwidth * 1e9)


def costs(sent: list[Message], cluster: Cluster, micro: float, accumulation: int) -> dict[Direction, Cost]:
    """By direction. Gathers of parameters overlap with all passes, sums of gradients with the last backward pass, nothing else overlaps."""
    hiding = {"forward and backward": micro * accumulation, "last backward": 2 / 3 * micro, "": 0.0}
    total = {place: sum(m.seconds(cluster) for m in sent if m.hides == place) for place in hiding}
    waits = {place: max(time - hiding[place], (NEVER_HIDDEN if place else 1.0) * time) for place, time in total.items()}
    by_direction: dict[Direction, Cost] = {}
    for direction in DIRECTIONS:
        if own := [m for m in sent if m.direction == direction]:
            waiting = sum(m.seconds(cluster) * waits[m.hides] / total[m.hides] for m in own if total[m.hides])
            by_direction[direction] = Cost(sum(m.sent for m in own), sum(m.seconds(cluster) for m in own), waiting)
    return by_direction


def estimate(run: TrainingJob, work: Work, efficiency: float, mesh: Mesh) -> Estimate:
    """The fastest way that fits: the largest micro-batch, with checkpointing only where there is no other."""
    mesh.check(work, run.length)
    if run.sequences % mesh.data:
        raise ValueError(
            f"{mesh.gpus} GPUs cannot share a batch of {run.sequences} sequences of {run.length:,} evenly; "
            f"the next batch that they can is {math.ceil(run.sequences / mesh.data) * mesh.data * run.length:,} tokens"
        )
    card, share = run.cluster.card, run.sequences // mesh.data
    for checkpointing in (False, True):
        for micro in (n for n in range(share, 0, -1) if share % n == 0):
            tokens, accumulation = micro * run.length // mesh.context, share // micro
            needs = memory(work, tokens, mesh, accumulation, checkpointing)
            if sum(needs.values()) <= USABLE * card.memory * 1e9:
                once, optimizer = (t / efficiency for t in ideal(work, card, tokens, mesh, checkpointing))
                sent = list(messages(work, mesh, run.length, micro, accumulation, checkpointing))
                exchanged = costs(sent, run.cluster, once, accumulation)
                step = accumulation * once + optimizer + sum(cost.waiting for cost in exchanged.values())
                return Estimate(mesh, micro, accumulation, checkpointing, needs, exchanged, step, run.steps)
    raise ValueError(
        f"one sequence of {run.length:,} does not fit on {run.cluster.name}: {sum(needs.values()) / 1e9:.0f} GB with checkpointing, "
        f"{USABLE * card.memory:.0f} of {card.memory:.0f} GB can be used: take fsdp, parallel.context, parallel.tensor or shorter sequences"
    )


@dataclass(frozen=True)
class Wanted:
    """Constraints on a mesh; what is None is chosen."""

    strategy: Strategy | None = None
    shard: int | None = None
    context: int | None = None
    tensor: int | None = None

    def meshes(self, gpus: int, per_node: int) -> Iterator[Mesh]:
        """All of so many GPUs, the simplest first: tensor parallelism within a node, the rest in powers of two, FSDP over all or a node."""
        powers = [2**n for n in range(gpus.bit_length())]
        for tensor in [self.tensor] if self.tensor else [n for n in powers if n <= per_node]:
            for context in [self.context] if self.context else powers:
                for strategy in [self.strategy] if self.strategy else get_args(Strategy):
                    node = [per_node // tensor] if strategy == "fsdp" and gpus > per_node > tensor else []
                    for shard in [self.shard] if self.shard else [None, *node]:
                        try:
                            yield Mesh(gpus, strategy, shard, context, tensor)
                        except ValueError:
                            continue


ANY = Wanted()


def ways(run: TrainingJob, work: Work, efficiency: float, gpus: int, wanted: Wanted = ANY) -> list[Estimate]:
    """All that fit, the best first: the fastest, or a simpler one nearly as fast (NEAR_BEST). The others follow by time."""
    fitting = []
    for mesh in wanted.meshes(gpus, run.cluster.per_node):
        try:
            fitting.append(estimate(run, work, efficiency, mesh))
        except ValueError:
            continue
    if not fitting:
        return []
    limit = NEAR_BEST * min(way.step for way in fitting)
    best = next(way for way in fitting if way.step <= limit)
    return [best, *sorted((way for way in fitting if way is not best), key=lambda way: way.step)]
