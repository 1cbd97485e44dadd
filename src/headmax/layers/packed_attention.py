"""Causal attention on sequences laid end to end, and within a window, without a mask of all pairs of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headmax.ops.library import define_op
from headmax.ops.packing import Packing

BLOCK = 256
"""Queries that are read together where a window is narrower than this."""


class Bounds(NamedTuple):
    """Where sequences lie in rows of queries, and in rows of keys, which may begin earlier."""

    at: Tensor
    """[2, sequences + 1]: of queries, and of keys."""
    most_queries: int
    """Of a sequence."""
    most_keys: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, packing: Packing | None) -> Bounds:
        """k [B,S,...] has S - T tokens before those of q [B,T,...]: of each row, or of the packing's first sequence as many as it has."""
        (batch, time), seen = q.shape[:2], k.shape[1]
        if packing is None:
            queries, keys = (torch.arange(0, batch * size + 1, size, device=q.device) for size in (time, seen))
            return cls(torch.stack([queries, keys]), time, seen)
        if seen == time:
            return cls(packing.cu_seqlens.expand(2, -1), packing.longest, packing.longest)
        keys = torch.cat([seen - time - packing.positions[:1], packing.cu_seqlens[1:] + (seen - time)])
        return cls(torch.stack([packing.cu_seqlens, keys]), packing.longest, seen)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, window: int | None) -> Tensor:
    """What queries q [B,T,H,D] read, [B,T,H,D], from keys and values [B,S,G,D] of their sequence: their own and those before it, at most
    `window` of them. Without a packing every row is a sequence. Query head h reads with key head h * G // H.

    The last T keys are those of the queries' tokens; keys before them belong to rows, or to the packing's first sequence, begun earlier."""
    batch, time = q.shape[:2]
    bounds = Bounds.of(q, k, packing)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    o = flash(q, k, v, bounds, window) if flash_can(q) else PackedAttention.apply(q, k, v, bounds.at, window)
    return o.unflatten(0, (batch, time))


def flash_can(q: Tensor) -> bool:
    """Whether PyTorch's flash attention takes such queries."""
    return q.is_cuda and torch.version.hip is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256


def flash(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, window: int | None) -> Tensor:
    """The kernel that reads boundaries on the device; the last query of a sequence sees its last key."""
    queries, keys = bounds.at.to(torch.int32)
    limits = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
    return torch.ops.aten._flash_attention_forward(
        q, k, v, queries, keys, bounds.most_queries, bounds.most_keys, 0.0, True, False, **limits
    )[0]


def pieces(queries: list[int], keys: list[int], window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries, and the keys that one of them may see: sequence by sequence, with a window in blocks."""
    for (start, end), (oldest, newest) in zip(pairwise(queries), pairwise(keys), strict=True):
        size, later = max(1, end - start) if window is None else max(window, BLOCK), newest - end
        for first in range(start, end, size):
            last = min(first + size, end)
            yield slice(first, last), slice(oldest if window is None else max(oldest, first + later - window + 1), last + later)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """What the last n of m tokens read: q [n,H,D], keys and values [m,G,D]."""
    mask = None
    if window is not None or len(k) > len(q):
        age = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
        mask = (age >= 0) & (age < (len(k) if window is None else window))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).squeeze(0).transpose(0, 1)


def _forward(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int | None) -> Tensor:
    o, ends = torch.empty_like(q), bounds.tolist()
    for queries, keys in pieces(ends[0], ends[1], window):
        o[queries] = attend(q[queries], k[keys], v[keys], window)
    return o


def _backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    ends = bounds.tolist()
    for queries, keys in pieces(ends[0], ends[1], window):
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
