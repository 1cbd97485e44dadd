"""A model spread over ranks, in this order:

1. tensor: heads, MLP columns and vocabulary are split first, as all that follows takes a rank's piece of a parameter for the parameter;
2. context: mixers learn which ranks hold the other pieces of their sequences. Nothing moves yet, and all that follows is as for whole
   sequences, since a parameter's gradient is a sum over tokens, wherever they are;
3. activation checkpointing, within what is compiled, so that the compiler sees what is computed twice;
4. compilation, block by block: a block holds the exchanges of its own layers and nothing of 5, whose hooks stand around it;
5. DDP or FSDP over all ranks with the same piece of the parameters, those that share a sequence among them: the same gradients are summed
   in one message. FSDP has a group for each block, gathered before the block runs and freed after it. DDP does not know pieces of
   parameters: beside tensor parallelism its place takes FSDP over one process each, with copies over all the others.

Numbers in `Replica` are these. Gradient accumulation is around all of it: ranks sum gradients in the last micro-step alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from headmax.models import HeadmaxForCausalLM
from headmax.train.config import ParallelConfig, TrainConfig
from headmax.train.parallel import World, spreads


def replicated(model: nn.Module) -> list[nn.Parameter]:
    """What FSDP leaves whole and in float32: all but the matrices of linear layers and embeddings, which autocast rounds too.

    Norms, biases, A_log, dt_bias, head gates and short convolutions are few, and A_log rounded to bfloat16 is another decay.
    """
    layers = (module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding))
    matrices = {id(layer.weight) for layer in layers}
    return [p for p in model.parameters() if id(p) not in matrices]


def ranks_of(world: World, parallel: ParallelConfig) -> DeviceMesh:
    """Copies of the model, the ranks each is sharded over, and next to each other those that share its heads."""
    ranks = world.size // world.tensor
    shard = 1 if parallel.strategy == "ddp" else parallel.shard or ranks
    if ranks % shard:
        among = f" over parallel.tensor {world.tensor}" if world.tensor > 1 else ""
        raise ValueError(f"parallel.shard {shard} must divide the number of processes{among}, got {ranks}")
    return init_device_mesh(world.device.type, (ranks // shard, shard, world.tensor), mesh_dim_names=("copy", "shard", "tensor"))


class Replica:
    """A model on this rank, ready to train: what to call, and in which precision."""

    def __init__(self, model: HeadmaxForCausalLM, config: TrainConfig, world: World) -> None:
        nn.Module.to(model, world.device).train()
        self.model, self.module, self.world = model, cast(nn.Module, model), world
        self.narrow = config.compute.precision == "bfloat16"
        self.autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=self.narrow)
        self.replicated: list[nn.Parameter] = []
        """Parameters whose gradients are summed here, not by DDP or FSDP."""
        mesh = ranks_of(world, config.parallel) if spreads(config, world) else None
        if mesh is not None and world.tensor > 1:  # 1
            model.set_tensor_mesh(mesh["tensor"])
        model.model.set_context_group(world.context_group)  # 2
        if config.compute.activation_checkpointing:  # 3
            # renamed in transformers 5.23, which warns of the old name; earlier ones have that alone
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        compiled = config.compute.compile
        if world.device.type == "cuda" if compiled is None else compiled:  # 4
            model.model.compile_blocks()
        if mesh is not None and world.tensor == 1 and config.parallel.strategy == "ddp":  # 5
            self.module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif mesh is not None and (world.size > world.tensor or world.size == 1):
            self.shard(mesh)

    def shard(self, mesh: DeviceMesh) -> None:
        """FSDP's group for each block, and one for embedding and last layer.

        Blocks' matrices travel in what the products compute in, gradients are summed in float32, and autocast alone casts activations: FSDP
        would also round the angles of rotary positions. The embedding stays float32, as a bfloat16 one would have its gradient rounded,
        which autocast does not do.
        """
        policy = MixedPrecisionPolicy(torch.bfloat16 if self.narrow else None, torch.float32, cast_forward_inputs=False)
        spread = mesh["shard"] if mesh["copy"].size() == 1 else mesh["copy", "shard"]
        tensor = self.world.tensor
        self.alike = init_device_mesh(self.world.device.type, (self.world.size // tensor, tensor)).get_group(0)
        self.replicated = replicated(self.model)
        ignored = set(self.replicated)
        for block in self.model.model.layers:
            fully_shard(block, mesh=spread, mp_policy=policy, ignored_params=ignored)
        fully_shard(self.model, mesh=spread, mp_policy=replace(policy, param_dtype=None), ignored_params=ignored)

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
        """The mean of the gradients that FSDP leaves alone over the ranks with the same piece of the model, in one message."""
        given = [p.grad for p in self.replicated if p.grad is not None]
        gradients = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in given]
        if gradients:
            row = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(row, group=self.alike)
            row /= self.alike.size()
            for gradient, mean in zip(gradients, row.split([gradient.numel() for gradient in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
