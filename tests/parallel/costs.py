"""Bytes that a rank sends in a training step, counted at the collectives and foretold by `headmax plan`."""

import contextlib
import functools
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from headmax import HeadmaxForCausalLM
from headmax.layers.mixers.gla import GLAConfig
from headmax.plan.mesh import Mesh, messages
from headmax.plan.work import Work
from headmax.train.feed import micro_batches, piece_of
from headmax.train.parallel import join
from headmax.train.parallelize import Replica
from tests.train.small import Walks, model_config, train_config

FSDP = {"parallel_strategy": "fsdp"}
CONTEXT, TENSOR = {"parallel_context": 2}, {"parallel_tensor": 2}
AGAIN = {"compute_activation_checkpointing": True}
NARROW = {"compute_precision": "bfloat16"}
HYBRID = {"mixer": ["gated_deltanet", "attention"]}
TWO: dict[str, tuple[dict, dict]] = {
    "ddp": ({}, {}),
    "fsdp": ({}, FSDP | NARROW),
    "context": ({"conv_size": 4}, CONTEXT),
    "context-fsdp-hybrid": (HYBRID, CONTEXT | FSDP),
    "tensor": ({}, TENSOR),
    "tensor-joint": ({"mixer": GLAConfig(output_norm="joint")}, TENSOR | FSDP),
}
FOUR: dict[str, tuple[dict, dict]] = {
    "copies": ({"mixer": "retnet"}, FSDP | {"parallel_shard": 2}),
    "accumulated": ({"mixer": "mamba2", "head_k_dim": 8}, FSDP | {"compute_micro_batch": 1}),
    "context-kda": ({"mixer": "kda"}, {"parallel_context": 4} | NARROW),
    "context-tensor-gdn": ({"mixer": "gated_deltanet"}, CONTEXT | TENSOR),
    "context-tensor-hybrid": (HYBRID, CONTEXT | TENSOR | FSDP | AGAIN | {"compute_micro_batch": 4}),
    "tensor-ddp": ({"mixer": "retnet", "conv_size": 4}, TENSOR),
    "tensor-fsdp": ({"mixer": "kda", "tie_word_embeddings": True}, TENSOR | FSDP),
    "tensor-4": ({}, {"parallel_tensor": 4}),
}


COLLECTIVES = {
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), lambda ranks: ranks - 1),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), lambda ranks: 1 - 1 / ranks),
    "all_reduce": lambda ranks: 2 - 2 / ranks,
    "all_to_all_single": lambda _: 1,
}
"""What a rank sends in a ring, over the bytes that it puts in. FSDP calls PyTorch 2.13's names."""


@contextlib.contextmanager
def counting(model: HeadmaxForCausalLM, module: nn.Module) -> Iterator[dict[str, float]]:
    """What this rank sends, by direction: of parameters, or of what the ops exchange."""
    sent: dict[str, float] = defaultdict(float)

    def direction(name: str, group: dist.ProcessGroup) -> str:
        if sys._getframe(2).f_globals["__name__"].startswith(("headmax.ops", "headmax.layers")):
            return "tensor" if group == model.model.tensor_group else "context"
        return "data" if name == "all_reduce" else "shard"

    def counted(plain: Any, *given: Any, **options: Any) -> Any:
        name, groups = plain.__name__, [x for x in (*given, *options.values()) if isinstance(x, dist.ProcessGroup)]
        group = groups[0] if groups else dist.group.WORLD
        tensors = [x for x in (*given, *options.values()) if isinstance(x, torch.Tensor)]
        if group.size() > 1:
            sent[direction(name, group)] += COLLECTIVES[name](group.size()) * tensors[-1].nbytes
        return plain(*given, **options)

    with contextlib.ExitStack() as patches:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                patches.enter_context(mock.patch.object(dist, name, functools.partial(counted, getattr(dist, name))))
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, allreduce_hook)  # what it does by itself, in Python
        yield sent


def measure(settings: dict[str, Any], changes: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """(counted on this rank, foretold) of one step."""
    config, shape = train_config(**changes), model_config(**settings)
    with join("cpu", config.parallel.context, config.parallel.tensor) as world:
        torch.manual_seed(0)
        model = HeadmaxForCausalLM(shape)
        replica = Replica(model, config, world)
        parts = micro_batches(0, config.batch_size, world, config.compute.micro_batch)
        with counting(model, replica.module) as sent:
            for n, part in enumerate(parts):
                batch = piece_of(Walks().batch(part), world)
                pieces = {} if batch.shift_labels is None else {"position_ids": batch.position_ids, "shift_labels": batch.shift_labels}
                with replica.micro_step(last=n == len(parts) - 1), replica.autocast:
                    replica.module(input_ids=batch.input_ids, labels=batch.labels, num_items_in_batch=184, **pieces).loss.backward()
        counted = dict(sent)
        model.model.set_context_group(None)
    spread, given = config.parallel, SimpleNamespace(model=shape)
    mesh = Mesh(world.size, spread.strategy, spread.shard, spread.context, spread.tensor)
    width = 2 if config.compute.precision == "bfloat16" else 4
    again = config.compute.activation_checkpointing
    foretold: dict[str, float] = defaultdict(float)
    for message in messages(Work.of(cast(Any, given), 24), mesh, 24, len(parts[0]), len(parts), again, width):
        foretold[message.direction] += message.sent
    return counted, {name: sent for name, sent in foretold.items() if sent}


def main() -> dict[str, Any]:
    ranks, found = dist.get_world_size(), {}
    for name, case in (TWO if ranks == 2 else FOUR).items():
        counted, foretold = measure(*case)
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, counted)
        found[name] = {direction: sum(sent[direction] for sent in everyone) / ranks for direction in counted}, foretold
    return found
