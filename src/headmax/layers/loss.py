"""Output projection and cross entropy in one: the logits of all tokens never exist at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from headmax.ops.checks import check_shape, compute_dtype
from headmax.ops.library import once_differentiable
from headmax.ops.registry import Lazy, dispatch, no_autocast, register

LOGITS_AT_ONCE = 2**28
"""Logits held at a time: 8,192 tokens for a vocabulary of 32k, enough to keep tensor cores busy."""
IGNORED = -100


def _reference(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row [N]; `logits` are overwritten with their gradient."""
    log_p = logits.to(compute_dtype(logits.dtype)).log_softmax(-1)
    at, ignored = labels.clamp_min(0).unsqueeze(-1), (labels == IGNORED).unsqueeze(-1)
    losses = -log_p.gather(-1, at)
    logits.copy_(log_p.exp_().scatter_add_(-1, at, -torch.ones_like(losses)).masked_fill_(ignored, 0))
    return losses.masked_fill_(ignored, 0).squeeze(-1)


register(
    "cross_entropy",
    {"reference": _reference, "triton": Lazy("headmax.ops.kernels.loss", "cross_entropy_rows", needs="triton", interpreted=True)},
)


def _check_labels(labels: Tensor, size: int) -> None:
    """Refuses labels outside the vocabulary; on a GPU by a device-side assertion, so that the host does not wait."""
    known = (labels == IGNORED) | ((labels >= 0) & (labels < size))
    expected = f"linear_cross_entropy: labels must be {IGNORED} or 0 to {size - 1}, the vocabulary"
    if labels.is_cuda:
        torch._assert_async(known.all(), expected)
    elif not known.all():
        raise ValueError(f"{expected}, got {labels[~known][0].item()}")


def _wide_mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b accumulated and returned in `dtype`; a GPU does this without casting narrower operands."""
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and a.dtype != dtype else torch.mm(a.to(dtype), b.to(dtype))


def _results(
    x: Tensor, weight: Tensor, labels: Tensor, wants_x: bool, wants_weight: bool, backend: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty loss, d_x and d_weight to accumulate into; a gradient that is not needed has no elements."""
    dtype = compute_dtype(x.dtype)
    d_weight = torch.zeros_like(weight, dtype=dtype) if wants_weight else weight.new_empty(0)
    return x.new_zeros((), dtype=dtype), torch.empty_like(x) if wants_x else x.new_empty(0), d_weight


def _by_pieces(
    x: Tensor, weight: Tensor, labels: Tensor, wants_x: bool, wants_weight: bool, rows: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, d_x and d_weight. `rows` computes the loss of a piece's logits and overwrites them with their gradient."""
    loss, d_x, d_weight = _results(x, weight, labels, wants_x, wants_weight)
    narrow, step = weight.to(x.dtype), max(1, LOGITS_AT_ONCE // weight.shape[0])
    with no_autocast(x.device):
        for start in range(0, x.shape[0], step):
            piece = slice(start, start + step)
            logits = x[piece] @ narrow.T
            loss += rows(logits, labels[piece]).sum()
            if wants_x:
                torch.mm(logits, narrow, out=d_x[piece])
            if wants_weight:
                d_weight += _wide_mm(logits.T, x[piece], d_weight.dtype)
    return loss, d_x, d_weight


@torch.library.custom_op("headmax::linear_cross_entropy", mutates_args=())
def _forward(x: Tensor, weight: Tensor, labels: Tensor, wants_x: bool, wants_weight: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss of x [N,E] @ weight.T [E,V] and its gradients, computed while the logits exist."""
    _check_labels(labels, weight.shape[0])
    return _by_pieces(x, weight, labels, wants_x, wants_weight, dispatch("cross_entropy", backend, x))


_forward.register_fake(_results)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, _, wants_x, wants_weight, _ = inputs
    ctx.dtypes = x.dtype if wants_x else None, weight.dtype if wants_weight else None
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


@once_differentiable
def loss_gradient(ctx, d_loss, *_):  # type: ignore[no-untyped-def]
    gradients = (dtype and (d * d_loss).to(dtype) for d, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
    return *gradients, None, None, None, None


_forward.register_autograd(loss_gradient, setup_context=_save)


def _rows_over_ranks(logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
    """`_reference` with this rank's part of the vocabulary; three numbers per token are exchanged."""
    wide, tokens = logits.to(compute_dtype(logits.dtype)), logits.shape[-1]
    top = wide.amax(-1, keepdim=True)
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    at = (labels - group.rank() * tokens).unsqueeze(-1)
    mine, at, ignored = (at >= 0) & (at < tokens), at.clamp(0, tokens - 1), (labels == IGNORED).unsqueeze(-1)
    powers = (wide - top).exp()
    sums = torch.cat([powers.sum(-1, keepdim=True), wide.gather(-1, at) * mine], -1)
    dist.all_reduce(sums, group=group)
    total, predicted = sums.split(1, -1)
    logits.copy_(powers.div_(total).scatter_add_(-1, at, -mine.to(powers.dtype)).masked_fill_(ignored, 0))
    return (total.log() + top - predicted).masked_fill_(ignored, 0).squeeze(-1)


class OverRanks(torch.autograd.Function):
    """The summed loss with the weight's rows sharded evenly over the ranks. Saves the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
        rows = functools.partial(_rows_over_ranks, group=group)
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        loss, d_x, d_weight = _by_pieces(x, weight, labels, wants_x, wants_weight, rows)
        if wants_x:
            dist.all_reduce(d_x, group=group)
        ctx.dtypes = x.dtype if wants_x else None, weight.dtype if wants_weight else None
        ctx.save_for_backward(d_x, d_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        return loss_gradient(ctx, d_loss)[:4]


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, backend: str = "auto", tensor_group: ProcessGroup | None = None
) -> Tensor:
    """Σ cross_entropy(x @ weight.T, labels) over the tokens whose label is not -100. x [..., E], weight [V, E], labels [...].

    Computed in float32 (float64 for float64 x). Labels are moved to x's device. With a `tensor_group`, weight holds this rank's share of
    the vocabulary, of the same size on every rank.
    """
    check_shape("linear_cross_entropy", "weight", weight, "vocabulary, hidden", (weight.shape[0], x.shape[-1]))
    if labels.shape != x.shape[:-1] or labels.is_floating_point():
        raise ValueError(
            f"linear_cross_entropy: labels must be integers of shape {list(x.shape[:-1])}, as x has it, "
            f"got {labels.dtype} of shape {list(labels.shape)}"
        )
    wants = torch.is_grad_enabled()
    labels = labels.to(x.device, torch.int64).reshape(-1).contiguous()
    if tensor_group is not None:
        _check_labels(labels, weight.shape[0] * tensor_group.size())
        return OverRanks.apply(x.reshape(-1, x.shape[-1]), weight, labels, tensor_group)
    return _forward(x.reshape(-1, x.shape[-1]), weight, labels, wants and x.requires_grad, wants and weight.requires_grad, backend)[0]
