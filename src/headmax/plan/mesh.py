"""A mesh of GPUs, and every message of a training step on it: how many, between whom, how large. docs/parallel.md has it in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headmax.plan.cards import Cluster, Kind
from headmax.plan.work import Work
from headmax.train.config import Strategy

MAX_GPUS = 1024
WIDE, NARROW = 4, 2
"""Bytes of a number in float32, and in bfloat16."""
Direction = Literal["data", "shard", "context", "tensor"]
DIRECTIONS: tuple[Direction, ...] = ("data", "shard", "context", "tensor")


@dataclass(frozen=True)
class Mesh:
    """GPUs as the trainer splits work over them. Consecutive ones share heads, then sequences, then a copy of the model."""

    gpus: int = 1
    strategy: Strategy = "ddp"
    shard: int | None = None
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MAX_GPUS:
            raise ValueError(f"gpus must be between 1 and {MAX_GPUS}, got {self.gpus}")
        for name in ("shard", "context", "tensor"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"parallel.{name} must be positive, got {number}")
        if self.gpus % (self.context * self.tensor):
            raise ValueError(f"parallel.context {self.context} times parallel.tensor {self.tensor} must divide the {self.gpus} GPUs")
        if self.shard is not None and self.strategy == "ddp":
            raise ValueError("parallel.shard goes with parallel.strategy fsdp, got 'ddp'")
        if self.alike % self.shards:
            raise ValueError(f"parallel.shard {self.shard} must divide the {self.alike} GPUs with the same piece of the model")

    @property
    def data(self) -> int:
        """Shares of a batch."""
        return self.gpus // (self.context * self.tensor)

    @property
    def alike(self) -> int:
        """GPUs with the same heads."""
        return self.gpus // self.tensor

    @property
    def shards(self) -> int:
        """GPUs over which FSDP shards a copy of the model; tensor parallelism divides it further."""
        return 1 if self.strategy == "ddp" else self.shard or self.alike

    @property
    def options(self) -> str:
        """The trainer's."""
        numbers = {"shard": self.shard, "context": self.context, "tensor": self.tensor}
        given = [f"--parallel.{name} {number}" for name, number in numbers.items() if number not in (None, 1)]
        return " ".join(["--parallel.strategy fsdp", *given] if self.strategy == "fsdp" else given)

    def __str__(self) -> str:
        spread = self.strategy if self.shard is None else f"{self.strategy} {self.shard}"
        numbers = {"context": self.context, "tensor": self.tensor}
        return " x ".join([spread, *(f"{name} {number}" for name, number in numbers.items() if number > 1)])

    def check(self, work: Work, length: int) -> None:
        """Raises if the model or the sequences cannot be split this way."""
        if length % self.context:
            raise ValueError(f"sequence_length {length} must be a multiple of parallel.context {self.context}")
        if self.context > 1 and work.unsplit:
            raise ValueError(f"parallel.context {self.context}: {work.unsplit} takes no pieces of sequences")
        for name, number in work.splits.items():
            if number % self.tensor:
                raise ValueError(f"parallel.tensor {self.tensor} must divide {name}, got {number}")


ALONE = Mesh()


@dataclass(frozen=True)
class Message:
    """A collective that every GPU takes part in, `number` times a step."""

    direction: Direction
    kind: Kind
    size: float
    """Bytes in all: of what an all-gather leaves on each GPU, or a reduce-scatter or an all-reduce begins with there."""
    ranks: int
    stride: int
    """Distance in rank between neighbours in the group."""
    number: float
    hides: Literal["forward and backward", "last backward", ""] = ""
    """The passes it may overlap with."""

    @property
    def sent(self) -> float:
        """Bytes a GPU sends in a step, in rings. The last rank sends nothing to a next one: of such messages, the mean over ranks."""
        return self.number * (self.ranks - 1) / self.ranks * self.size * (2 if self.kind == "reduce" else 1)

    def seconds(self, cluster: Cluster) -> float:
        """For all of a step."""
        return self.number * cluster.seconds(self.kind, self.size, self.ranks, self.stride)


def messages(
    work: Work, mesh: Mesh, length: int, micro_batch: int, accumulation: int, checkpointing: bool = False, width: int = NARROW
) -> Iterator[Message]:
    """All of a step of `accumulation` micro-batches with so many sequences each; `width` bytes is a number in products.

    Single numbers (the loss, norms of gradients) are left out.
    """
    yield from (message for message in _of_parameters(work, mesh, accumulation, width) if message.ranks > 1)
    if mesh.context > 1:
        yield from _of_pieces(work, mesh, length, micro_batch, accumulation, checkpointing, width)
    if mesh.tensor > 1:
        yield from _of_heads(work, mesh, length * micro_batch // mesh.context, accumulation, checkpointing, width)


def _of_parameters(work: Work, mesh: Mesh, accumulation: int, width: int) -> Iterator[Message]:
    """DDP, or FSDP: gradients are summed once a step, matrices are gathered before each forward and each backward pass."""
    t, alike, shards, layers = mesh.tensor, mesh.alike, mesh.shards, work.layers
    block, ends, others = work.matrices.on(t) / layers, work.ends / t, work.others.on(t)
    if mesh.strategy == "ddp" and t == 1:
        yield Message("data", "reduce", WIDE * work.parameters, alike, 1, 1, "last backward")
        return
    yield Message("shard", "gather", width * block, shards, t, 2 * layers * accumulation, "forward and backward")
    yield Message("shard", "gather", WIDE * ends, shards, t, accumulation, "forward and backward")
    yield Message("shard", "gather", WIDE * block, shards, t, layers, "last backward")
    yield Message("shard", "gather", WIDE * ends, shards, t, 1, "last backward")
    yield Message("data", "reduce", WIDE * block / shards, alike // shards, t * shards, layers, "last backward")
    yield Message("data", "reduce", WIDE * ends / shards, alike // shards, t * shards, 1, "last backward")
    yield Message("data", "reduce", WIDE * others, alike, t, 1)


def _of_pieces(
    work: Work, mesh: Mesh, length: int, micro_batch: int, accumulation: int, checkpointing: bool, width: int
) -> Iterator[Message]:
    """States and transitions forward, gradients of states backward; convolutions' inputs; keys and values, and their gradients."""
    ranks, again = mesh.context, 2 if checkpointing else 1
    share = micro_batch / (mesh.tensor * work.layers)

    def message(kind: Kind, size: float, times: int) -> Message:
        return Message("context", kind, size * share, ranks, mesh.tensor, times * accumulation * work.layers)

    if work.states:
        yield message("gather", ranks * WIDE * (work.states + work.transitions), again)
        yield message("gather", ranks * WIDE * work.states, 1)
    if work.convolutions:
        yield message("next", width * work.convolutions, again + 1)
    if work.keys:
        yield message("gather", width * length * work.keys, again + 1)


def _of_heads(work: Work, mesh: Mesh, tokens: int, accumulation: int, checkpointing: bool, width: int) -> Iterator[Message]:
    """Hidden states and their gradients, twice each per layer; gates, joint norms; embedding and loss."""
    again = 2 if checkpointing else 1

    def message(kind: Kind, size: float, times: float) -> Message:
        return Message("tensor", kind, size, mesh.tensor, 1, times * accumulation)

    hidden = tokens * work.hidden
    yield message("reduce", width * hidden, (3 + again) * work.layers)  # what a block ends with is not computed again
    yield message("gather", mesh.tensor * 2 * WIDE * tokens, again * work.gates)
    yield message("reduce", WIDE * tokens, work.gates + (again + 1) * work.joint_norms)
    yield message("reduce", WIDE * work.summed / work.layers, work.layers)
    yield message("reduce", WIDE * hidden, 1)
    yield message("reduce", width * hidden, 1)
    yield message("reduce", 3 * WIDE * tokens, 1)
