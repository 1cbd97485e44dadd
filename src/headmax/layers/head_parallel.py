"""Tensor parallelism of a block: each rank has a run of the mixer's heads and of the MLP's columns, and all add up what these give.

Parameters are DTensors, so that optimizer, checkpoint and FSDP know the whole. A part runs on this rank's pieces of them as if it were
built that small: the gradient of its input, and of the few parameters that all heads share, is summed over the ranks, and so is its output.
"""

from __future__ import annotations

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from headmax.ops.tensor_parallel import copied, gathered, summed


def divide(name: str, number: int, ranks: int) -> int:
    """A rank's part of a number."""
    if number % ranks:
        raise ValueError(f"parallel.tensor {ranks} must divide {name}, got {number}")
    return number // ranks


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int | None) -> None:
    """A parameter split over the mesh along `dim`; None leaves a whole one on each rank. All ranks have the same values before."""
    whole = module.get_parameter(name)
    owner, _, last = name.rpartition(".")
    placement = Replicate() if dim is None else Shard(dim)
    piece = nn.Parameter(distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None), whole.requires_grad)
    setattr(module.get_submodule(owner), last, piece)


def shard_part(part: nn.Module, mesh: DeviceMesh, last: str, shared: tuple[str, ...]) -> None:
    """A mixer's heads or an MLP's columns over the mesh. The projection named `last` takes them; `shared` name what belongs to all."""
    for name, _ in list(part.named_parameters()):
        first = name.split(".")[0]
        shard_parameter(part, name, mesh, 1 if first == last else None if first in shared else 0)


def local_parameters(part: nn.Module, group: ProcessGroup) -> dict[str, Tensor]:
    """This rank's pieces by name; the gradient of what is whole on each rank is summed."""
    pieces = {name: p for name, p in part.named_parameters() if isinstance(p, DTensor)}
    shared = [name for name, p in pieces.items() if isinstance(p.placements[0], Replicate)]
    local = {name: p.to_local() for name, p in pieces.items()}
    if shared:
        local |= zip(shared, copied([local[name] for name in shared], group), strict=True)
    return local


def on_own_piece(part: nn.Module, group: ProcessGroup, x: Tensor, *arguments: Any, **options: Any) -> Any:
    """What `part` gives on this rank's piece of its parameters."""
    return functional_call(part, local_parameters(part, group), (*copied([x], group), *arguments), options)


def run_mixer(mixer: nn.Module, group: ProcessGroup, x: Tensor, return_gates: bool, **options: Any) -> Any:
    """The mixer on x [B,T,E]; gates that are requested are those of all heads."""
    output = on_own_piece(mixer, group, x, **options)
    gates = None
    if return_gates and output.gates is not None:
        gates = tuple(gate if gate is None else gathered(gate, group) for gate in output.gates)
    return output._replace(hidden=summed(output.hidden, group), gates=gates)


def embed(embedding: nn.Embedding, group: ProcessGroup | None, ids: Tensor) -> Tensor:
    """The embeddings of tokens [B,T], of which each rank has a run of the vocabulary."""
    if group is None:
        return embedding(ids)
    weight = cast(DTensor, embedding.weight).to_local()
    own, padding = ids - group.rank() * len(weight), embedding.padding_idx
    at, mine = own.clamp(0, len(weight) - 1), (own >= 0) & (own < len(weight))
    if padding is not None:  # it has no gradient
        mine = mine & (ids != padding)
    return summed(F.embedding(at, weight) * mine.unsqueeze(-1).to(weight.dtype), group)


def all_logits(last: nn.Linear, group: ProcessGroup | None, x: Tensor) -> Tensor:
    """The logits of x [B,T,E] for the whole vocabulary, of which each rank has a run."""
    if group is None:
        return last(x)
    (x,) = copied([x], group)
    return gathered(F.linear(x, cast(DTensor, last.weight).to_local()), group)


def run_mlp(mlp: nn.Module, group: ProcessGroup | None, x: Tensor, fused: bool) -> Tensor:
    """The MLP on x [B,T,E]."""
    return mlp(x, fused) if group is None else summed(on_own_piece(mlp, group, x, fused), group)
