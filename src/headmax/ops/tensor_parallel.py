"""Tensor parallelism: differentiable exchanges between ranks that hold some heads, or some columns of a matrix, each.

All ranks of a group hold the same tokens and run the same steps. A value that is replicated has the same gradient on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headmax.ops.context import gather
from headmax.ops.library import once_differentiable


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' x."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class Copied(torch.autograd.Function):
    """Replicated tensors used by each rank for its own part: their gradients are summed over the ranks, in one message."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if len(gradients) == 1:
            return None, total(gradients[0], ctx.group)
        sums = total(torch.cat([d.flatten() for d in gradients]), ctx.group).split([d.numel() for d in gradients])
        return None, *(row.view(d.shape).to(d.dtype) for row, d in zip(sums, gradients, strict=True))


class Summed(torch.autograd.Function):
    """The sum of all ranks' x; replicated from here on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return total(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor, None]:
        return d_sum, None


class Gathered(torch.autograd.Function):
    """The concatenation [..., ranks * n] of all ranks' x [..., n]; replicated from here on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.width, ctx.rank = x.shape[-1], dist.get_rank(group)
        return gather(x, group).movedim(0, -2).flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_all: Tensor) -> tuple[Tensor, None]:
        return d_all.narrow(-1, ctx.rank * ctx.width, ctx.width).contiguous(), None


class Softmax(torch.autograd.Function):
    """exp(s) / Σ exp(s) over the last axis of all ranks' s [..., n]. Saves the result.

    Two numbers a row forward, the maximum and the sum of exp(s - maximum), and one backward, the sum of p d_p.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, group: dist.ProcessGroup) -> Tensor:
        top = scores.amax(-1, keepdim=True)
        powers = (scores - top).exp()
        tops, sums = gather(torch.stack([top, powers.sum(-1, keepdim=True)]), group).unbind(1)
        highest = tops.amax(0)
        p = powers * ((top - highest).exp() / (sums * (tops - highest).exp()).sum(0))
        ctx.group = group
        ctx.save_for_backward(p)
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_p: Tensor) -> tuple[Tensor, None]:
        (p,) = ctx.saved_tensors
        return p * (d_p - total((p * d_p).sum(-1, keepdim=True), ctx.group)), None


def copied(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Replicated tensors, for use in each rank's own part: gradients are summed over the ranks."""
    return Copied.apply(group, *tensors)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' x. Ranks that then use it differently must take it through `copied`."""
    return Summed.apply(x, group)


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The concatenation of all ranks' x [..., n]. Ranks that then use it differently must take it through `copied`."""
    return Gathered.apply(x, group)


def softmax(scores: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the softmax over the last axis of all ranks' scores [..., n]."""
    return Softmax.apply(scores, group)
