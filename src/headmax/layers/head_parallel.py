"""Tensor parallelism of a block: each rank runs a slice of the mixer's heads and of the MLP's columns, and their outputs are summed.

Parameters are DTensors, so that optimizer, checkpoint and FSDP see their full shapes. Mixer and MLP run on this rank's shards as if they
had been built that small. Their outputs, the gradients of their inputs, and those of the few parameters that all heads share are summed
over the ranks.
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
    """number / ranks, which must be whole."""
    if number % ranks:
        raise ValueError(f"parallel.tensor {ranks} must divide {name}, got {number}")
    return number // ranks


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int | None) -> None:
    """Shards a parameter over the mesh along `dim`, or replicates it if that is None. All ranks must hold the same values."""
    whole = module.get_parameter(name)
    owner, _, last = name.rpartition(".")
    placement = Replicate() if dim is None else Shard(dim)
    piece = nn.Parameter(distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None), whole.requires_grad)
    setattr(module.get_submodule(owner), last, piece)


def shard_part(part: nn.Module, mesh: DeviceMesh, last: str, shared: tuple[str, ...]) -> None:
    """Shards a mixer's heads or an MLP's columns. `last` names the projection that consumes them, `shared` what is replicated."""
    for name, _ in list(part.named_parameters()):
        first = name.split(".")[0]
        shard_parameter(part, name, mesh, 1 if first == last else None if first in shared else 0)


def local_parameters(part: nn.Module, group: ProcessGroup) -> dict[str, Tensor]:
    """This rank's shards by name; gradients of replicated parameters are summed over the ranks."""
    pieces = {name: p for name, p in part.named_parameters() if isinstance(p, DTensor)}
    shared = [name for name, p in pieces.items() if isinstance(p.placements[0], Replicate)]
    local = {name: p.to_local() for name, p in pieces.items()}
    if shared:
        local |= zip(shared, copied([local[name] for name in shared], group), strict=True)
    return local


def on_own_piece(part: nn.Module, group: ProcessGroup, x: Tensor, *arguments: Any, **options: Any) -> Any:
    """Calls `part` with this rank's shards as its parameters."""
    return functional_call(part, local_parameters(part, group), (*copied([x], group), *arguments), options)


def run_mixer(mixer: nn.Module, group: ProcessGroup, x: Tensor, return_gates: bool, **options: Any) -> Any:
    """The mixer on x [B,T,E], with the gates of all heads if requested."""
    output = on_own_piece(mixer, group, x, **options)
    gates = None
    if return_gates and output.gates is not None:
        gates = tuple(gate if gate is None else gathered(gate, group) for gate in output.gates)
    return output._replace(hidden=summed(output.hidden, group), gates=gates)


def embed(embedding: nn.Embedding, group: ProcessGroup | None, ids: Tensor) -> Tensor:
    """Embeddings of tokens [B,T], the vocabulary being sharded over the group."""
    if group is None:
        return embedding(ids)
    weight = cast(DTensor, embedding.weight).to_local()
    first, rows = group.rank() * len(weight), len(weight)
    own, padding = ids - first, embedding.padding_idx
    at, mine = own.clamp(0, rows - 1), (own >= 0) & (own < rows)
    padding = padding - first if padding is not None and 0 <= padding - first < rows else None  # its row has no gradient
    return summed(F.embedding(at, weight, padding) * mine.unsqueeze(-1).to(weight.dtype), group)


def all_logits(last: nn.Linear, group: ProcessGroup | None, x: Tensor) -> Tensor:
    """Logits of x [B,T,E] over the whole vocabulary, which is sharded over the group."""
    if group is None:
        return last(x)
    (x,) = copied([x], group)
    return gathered(F.linear(x, cast(DTensor, last.weight).to_local()), group)


def run_mlp(mlp: nn.Module, group: ProcessGroup | None, x: Tensor, fused: bool) -> Tensor:
    """The MLP on x [B,T,E]."""
    return mlp(x, fused) if group is None else summed(on_own_piece(mlp, group, x, fused), group)
