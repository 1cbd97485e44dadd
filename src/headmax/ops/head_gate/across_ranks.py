"""The gate over the heads of all ranks, each of which scores its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from headmax.ops.checks import compute_dtype
from headmax.ops.head_gate.reference import scores_of
from headmax.ops.tensor_parallel import softmax


def split_gates(scores: Tensor, number: int, temperature: float, scale: float, kind: str, group: ProcessGroup) -> list[Tensor]:
    """As the reference's, of this rank's scores [B,T,number*H]: two numbers a token and gate are sent, one backward; none for sigmoids."""
    score = temperature * scores.to(compute_dtype(scores.dtype)).unflatten(-1, (number, -1))
    if kind == "sigmoid":
        gates = (2 * scale / (score.shape[-1] * group.size())) * torch.sigmoid(score)
    else:
        gates = softmax(score, group) / (1 / scale)
    return [gate.contiguous() for gate in gates.unbind(-2)]


def head_gate(x: Tensor, weight: Tensor, temperature: float, scale: float, kind: str, group: ProcessGroup) -> Tensor:
    return split_gates(scores_of(x, weight), 1, temperature, scale, kind, group)[0]
