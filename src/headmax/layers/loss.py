"""The last layer and its loss in one: the logits of all tokens never exist at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax.ops.registry import has_kernels

LOGITS_AT_ONCE = 2**28
"""How many logits are held at a time: 8,192 tokens at a vocabulary of 32k, enough to keep the matrix units busy."""
IGNORED = -100


def _rows(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row [N]; `logits` become their gradient, in place."""
    if has_kernels(logits.device.type):
        from headmax.layers.triton_loss import cross_entropy_rows

        return cross_entropy_rows(logits, labels)
    losses = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
    counted = (labels != IGNORED).unsqueeze(-1)
    gradient = logits.float().softmax(-1)
    gradient.scatter_add_(-1, labels.clamp_min(0).unsqueeze(-1), -counted.float())
    logits.copy_(gradient * counted)
    return losses


def _wide_mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b as `dtype`; a GPU's matrix units sum in float32 anyway, and need not round it."""
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and a.dtype != dtype else torch.mm(a, b).to(dtype)


@torch.library.custom_op("headmax::linear_cross_entropy", mutates_args=())
def _forward(x: Tensor, weight: Tensor, labels: Tensor, gradients: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss of x [N,E] @ weight.T [E,V], and its gradients, which cost least while the logits are there."""
    narrow = weight.to(x.dtype)
    loss = x.new_zeros((), dtype=torch.float32)
    d_x = torch.empty_like(x) if gradients else x.new_empty(0)
    d_weight = torch.zeros_like(weight) if gradients else weight.new_empty(0)
    for rows in torch.arange(x.shape[0]).split(max(1, LOGITS_AT_ONCE // weight.shape[0])):
        piece = slice(int(rows[0]), int(rows[-1]) + 1)
        logits = x[piece] @ narrow.T
        loss += _rows(logits, labels[piece]).sum()
        if gradients:
            torch.mm(logits, narrow, out=d_x[piece])
            d_weight += _wide_mm(logits.T, x[piece], d_weight.dtype)
    return loss, d_x, d_weight


@_forward.register_fake
def _(x, weight, labels, gradients):  # type: ignore[no-untyped-def]
    made = [torch.empty_like(x), torch.empty_like(weight)] if gradients else [x.new_empty(0), weight.new_empty(0)]
    return x.new_empty((), dtype=torch.float32), *made


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradient(ctx, d_loss, *_):  # type: ignore[no-untyped-def]
    d_x, d_weight = ctx.saved_tensors
    return (d_x * d_loss).to(d_x.dtype), d_weight * d_loss, None, None


_forward.register_autograd(_gradient, setup_context=_save)


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Σ cross_entropy(x @ weight.T, labels) over the tokens whose label is not -100. x [..., E], weight [V, E], labels [...]."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _forward(x.flatten(0, -2), weight, labels.flatten(), wanted)[0]
