"""Causal attention on sequences laid end to end, and within a window, without a mask of all pairs of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headmax.ops.library import define_op
from headmax.ops.packing import Packing

BLOCK = 256
"""Queries that are read together where a window is narrower than this."""


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, window: int | None) -> Tensor:
    """What queries q [B,T,H,D] read, [B,T,H,D], from keys and values [B,T,G,D] of their sequence: their own and those before it, at most
    `window` of them. Without a packing every row is a sequence. Query head h reads with key head h * G // H."""
    batch, time = q.shape[:2]
    if packing is None:
        bounds, longest = torch.arange(0, batch * time + 1, time, device=q.device), time
    else:
        bounds, longest = packing.cu_seqlens, packing.longest
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    o = flash(q, k, v, bounds, longest, window) if flash_can(q) else PackedAttention.apply(q, k, v, bounds, window)
    return o.unflatten(0, (batch, time))


def flash_can(q: Tensor) -> bool:
    """Whether PyTorch's flash attention takes such queries."""
    return q.is_cuda and torch.version.hip is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256


def flash(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int | None) -> Tensor:
    """The kernel that reads boundaries on the device."""
    bounds, before = bounds.to(torch.int32), -1 if window is None else window - 1
    limits = {"window_size_left": before, "window_size_right": 0}
    return torch.ops.aten._flash_attention_forward(q, k, v, bounds, bounds, longest, longest, 0.0, True, False, **limits)[0]


def pieces(bounds: list[int], window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries, and the keys that one of them may see: sequence by sequence, with a window in blocks."""
    for start, end in pairwise(bounds):
        size = max(1, end - start) if window is None else max(window, BLOCK)
        for first in range(start, end, size):
            last = min(first + size, end)
            yield slice(first, last), slice(start if window is None else max(start, first - window + 1), last)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """What the last n of m tokens read: q [n,H,D], keys and values [m,G,D]."""
    mask = None
    if window is not None:
        age = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
        mask = (age >= 0) & (age < window)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).squeeze(0).transpose(0, 1)


def _forward(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int | None) -> Tensor:
    o = torch.empty_like(q)
    for queries, keys in pieces(bounds.tolist(), window):
        o[queries] = attend(q[queries], k[keys], v[keys], window)
    return o


def _backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in pieces(bounds.tolist(), window):
        with torch.enable_grad():
            given = tuple(x.detach().requires_grad_() for x in (q[queries], k[keys], v[keys]))
            o = attend(given[0], given[1], given[2], window)
        of_q, of_k, of_v = torch.autograd.grad(o, given, do[queries])
        dq[queries] = of_q
        dk[keys] += of_k
        dv[keys] += of_v
    return dq, dk, dv


_forward_op = define_op("packed_attention", _forward, lambda q, *_: torch.empty_like(q))
_backward_op = define_op(
    "packed_attention_backward", _backward, lambda do, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
)


class PackedAttention(torch.autograd.Function):
    """Piece by piece, where there is no kernel for it; the backward pass reads each piece again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int | None) -> Tensor:
        ctx.save_for_backward(q, k, v, bounds)
        ctx.window = window
        return _forward_op(q, k, v, bounds, window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward_op(do, *ctx.saved_tensors, ctx.window), None, None
