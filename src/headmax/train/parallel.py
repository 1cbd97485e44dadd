"""One process or many: their ranks and devices, and which of them hold the same data, sequence or heads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from headmax import durable
from headmax.train.config import TrainConfig

PATIENCE = timedelta(days=1)
"""How long ranks wait for one that works alone; if it dies, torchrun ends them."""


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started, or alone."""

    rank: int
    size: int
    device: torch.device
    host_group: dist.ProcessGroup | None
    """Gloo, for Python objects; the training has groups of its own."""
    context_group: dist.ProcessGroup | None = None
    """The ranks that hold the pieces of the same sequences, as near each other as can be; None where each holds whole ones."""
    tensor: int = 1
    """How many consecutive ranks share the heads, and hold the same tokens."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def pieces(self) -> int:
        """How many ranks share a sequence."""
        return 1 if self.context_group is None else self.context_group.size()

    @property
    def piece(self) -> int:
        """Which of them this one is."""
        return self.rank // self.tensor % self.pieces

    @property
    def data_size(self) -> int:
        """How many shares of a batch there are."""
        return self.size // (self.pieces * self.tensor)

    @property
    def data_rank(self) -> int:
        """Which of them is this rank's."""
        return self.rank // (self.pieces * self.tensor)

    def sum(self, x: Tensor) -> Tensor:
        """x summed over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def broadcast(self, message: Any) -> Any:
        """The first rank's message, on all ranks."""
        if self.size == 1:
            return message
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def first(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, which only the first rank does, on all ranks; a ValueError or OSError is raised on all of them."""
        result: Any = None
        if self.main:
            try:
                result = None, work()
            except (ValueError, OSError) as error:
                if self.size == 1:
                    raise
                result = error, None
        failed, given = self.broadcast(result)
        if failed is not None:
            raise failed
        return given

    @contextlib.contextmanager
    def sole_user(self, folder: Path, owner: durable.Owner | None = None) -> Iterator[None]:
        """Keeps other programs out of a folder, which must be the owner's or empty: the first rank holds it."""
        with contextlib.ExitStack() as held:

            def take() -> None:
                if owner is not None:
                    durable.claim(folder, owner)
                held.enter_context(durable.sole_user(folder))

            self.first(take)
            yield

    def gather(self, message: Any) -> list[Any]:
        """Every rank's message, on all ranks."""
        if self.size == 1:
            return [message]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, message, group=self.host_group)
        return box


def environment_number(name: str, default: int) -> int:
    """What torchrun tells a process."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"{name} in the environment must be a number, as torchrun sets it, got {text!r}: unset it or start with torchrun")
    return int(text)


def find_device(name: str | None, source: str = "") -> torch.device:
    """The device of that name for this process, its own GPU where there are several; an error begins with `source` of the name."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if name in (None, "auto") else str(name)
    if kind.split(":")[0] not in ("cpu", "cuda") or (kind.startswith("cuda") and not torch.cuda.is_available()):
        devices = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(f"{source or f'--device {kind}'}: this machine has {devices}")
    if kind == "cuda":
        return torch.device("cuda", environment_number("LOCAL_RANK", 0))
    return torch.device(kind)


def check_pieces(size: int, context: int, tensor: int) -> None:
    """Raises if the number of processes is not a multiple of those that share a sequence."""
    if size % (context * tensor):
        named = [f"parallel.{name} {number}" for name, number in (("context", context), ("tensor", tensor)) if number > 1]
        raise ValueError(f"{' times '.join(named)} must divide the number of processes, got {size}: start them with torchrun")


@contextlib.contextmanager
def join(device: str | None, context: int = 1, tensor: int = 1) -> Iterator[World]:
    """The world that torchrun's environment describes; its process group ends with the block unless it was there before.

    `context` ranks hold a piece of each sequence, `tensor` ranks a part of the heads."""
    mine = find_device(device)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    there = dist.is_initialized()
    if not there and (environment_number("WORLD_SIZE", 1) > 1 or dist.is_torchelastic_launched()):
        # PyTorch 2.13: processes that torchrun starts again find the store of those before, and gloo connects to addresses that are gone.
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend = "cpu:gloo,cuda:nccl" if mine.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    if not dist.is_initialized():
        check_pieces(1, context, tensor)
        yield World(0, 1, mine, None)
        return
    try:
        size = dist.get_world_size()
        check_pieces(size, context, tensor)
        shape = size // (context * tensor), context, tensor
        group = init_device_mesh(mine.type, shape).get_group(1) if context > 1 else None
        yield World(dist.get_rank(), size, mine, dist.new_group(backend="gloo", timeout=PATIENCE), group, tensor)
    finally:
        if not there:
            dist.destroy_process_group()


def is_distributed(config: TrainConfig, world: World) -> bool:
    """Whether the model or its batch is split over processes. FSDP runs on a single process too, if torchrun started it."""
    return world.size > 1 or (config.parallel.strategy == "fsdp" and dist.is_initialized())


def graphed(config: TrainConfig, world: World) -> bool:
    """Whether micro-steps are CUDA graphs. ValueError where they were asked for and cannot be."""
    against = config.against_graphs
    if is_distributed(config, world):
        against = "parallel.strategy fsdp" if world.size == 1 else f"{world.size} processes"
    if world.device.type != "cuda":
        against = f"device {world.device.type}"
    if config.compute.cuda_graph and against is not None:
        raise ValueError(f"compute.cuda_graph does not go with {against}: leave it out")
    return config.compute.cuda_graph is not False and against is None
