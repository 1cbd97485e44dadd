"""One process or many: who takes part, on which device, and how a model is spread over them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from headmax.models import HeadmaxForCausalLM
from headmax.train.config import TrainConfig


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started, or alone."""

    rank: int
    size: int
    device: torch.device
    host_group: dist.ProcessGroup | None
    """For messages, beside the training."""
    context_group: dist.ProcessGroup | None = None
    """The ranks that hold the pieces of the same sequences, next to each other; None where each holds whole ones."""

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
        return self.rank % self.pieces

    @property
    def data_size(self) -> int:
        """How many shares of a batch there are."""
        return self.size // self.pieces

    @property
    def data_rank(self) -> int:
        """Which of them is this rank's."""
        return self.rank // self.pieces

    def sum(self, x: Tensor) -> Tensor:
        """x added up over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def share(self, message: Any) -> Any:
        """The first rank's message, on all ranks."""
        if self.size == 1:
            return message
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def gather(self, message: Any) -> list[Any]:
        """Every rank's message, on all ranks."""
        if self.size == 1:
            return [message]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, message, group=self.host_group)
        return box


def find_device(name: str | None, source: str = "") -> torch.device:
    """The device of that name for this process, its own GPU where there are several; an error begins with `source` of the name."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if name in (None, "auto") else str(name)
    if kind.split(":")[0] not in ("cpu", "cuda") or (kind.startswith("cuda") and not torch.cuda.is_available()):
        devices = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(f"{source or f'--device {kind}'}: this machine has {devices}")
    if kind == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device(kind)


def check_pieces(size: int, context: int) -> None:
    """Raises where the processes are not a multiple of those that share a sequence."""
    if size % context:
        raise ValueError(f"parallel.context {context} must divide the number of processes, got {size}: start them with torchrun")


@contextlib.contextmanager
def join(device: str | None, context: int = 1) -> Iterator[World]:
    """The world that torchrun's environment describes; its process group ends with the block unless it was there before.

    `context` ranks share each sequence."""
    mine = find_device(device)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    there = dist.is_initialized()
    if not there and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if mine.type == "cuda" else "gloo")
    if not dist.is_initialized():
        check_pieces(1, context)
        yield World(0, 1, mine, None)
        return
    try:
        size = dist.get_world_size()
        check_pieces(size, context)
        group = init_device_mesh(mine.type, (size // context, context)).get_group(1) if context > 1 else None
        yield World(dist.get_rank(), size, mine, dist.new_group(backend="gloo"), group)
    finally:
        if not there:
            dist.destroy_process_group()


def graphed(config: TrainConfig, world: World) -> bool:
    """Whether micro-steps are CUDA graphs."""
    return world.device.type == "cuda" and world.size == 1 and config.compute.cuda_graph is not False and not config.against_graphs


def replicated(model: nn.Module) -> list[nn.Parameter]:
    """What FSDP leaves whole and in float32: all but the matrices of linear layers and embeddings, which autocast rounds too.

    Norms, biases, A_log, dt_bias, head gates and short convolutions are few, and A_log rounded to bfloat16 is another decay.
    """
    layers = (module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding))
    matrices = {id(layer.weight) for layer in layers}
    return [p for p in model.parameters() if id(p) not in matrices]


class Replica:
    """A model on this rank, ready to train: what to call, and in which precision."""

    def __init__(self, model: HeadmaxForCausalLM, config: TrainConfig, world: World) -> None:
        nn.Module.to(model, world.device).train()
        model.model.set_context_group(world.context_group)
        self.model, self.module, self.world = model, cast(nn.Module, model), world
        narrow = config.compute.precision == "bfloat16"
        self.autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=narrow)
        self.replicated: list[nn.Parameter] = []
        """Parameters whose gradients are summed here, not by DDP or FSDP."""
        if config.compute.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        compiled = config.compute.compile
        if world.device.type == "cuda" if compiled is None else compiled:
            model.model.compile_blocks()
        if world.size > 1 and config.parallel.strategy == "ddp":
            self.module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif world.size > 1:
            # Blocks' matrices travel in what the products compute in, gradients are summed in float32, and autocast alone casts
            # activations: FSDP would also round the angles of rotary positions. The embedding stays float32, as a bfloat16 one
            # would have its gradient rounded, which autocast does not do.
            policy = MixedPrecisionPolicy(torch.bfloat16 if narrow else None, torch.float32, cast_forward_inputs=False)
            mesh = init_device_mesh(world.device.type, (world.size,))
            self.replicated = replicated(model)
            ignored = set(self.replicated)
            for block in model.model.layers:
                fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=ignored)
            fully_shard(model, mesh=mesh, mp_policy=replace(policy, param_dtype=None), ignored_params=ignored)

    @contextlib.contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-step: gradients are summed over ranks in the last one alone."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        with self.module.no_sync() if isinstance(self.module, DistributedDataParallel) and not last else contextlib.nullcontext():
            yield
        if last:
            self.average_replicated()

    def average_replicated(self) -> None:
        """The mean over ranks of the gradients that FSDP leaves alone, in one message."""
        gradients = [p.grad for p in self.replicated if p.grad is not None]
        if gradients:
            row = self.world.sum(torch.cat([gradient.flatten() for gradient in gradients])) / self.world.size
            for gradient, mean in zip(gradients, row.split([gradient.numel() for gradient in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
