"""Causal attention on packed sequences, and within a sliding window, without a [T, T] mask."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax.ops.library import define_op, once_differentiable
from headmax.ops.packing import Packing

BLOCK = 256
"""Least queries per block under a sliding window."""


class Bounds(NamedTuple):
    """Boundaries of the sequences among the queries, and among the keys, of which there may be earlier ones."""

    at: Tensor
    """[2, sequences + 1]: among the queries, and among the keys."""
    most_queries: int
    """In a sequence."""
    most_keys: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, packing: Packing | None) -> Bounds:
        """k [B,S,...] starts with S - T keys before the tokens of q [B,T,...]; of a packing, they belong to the first sequence."""
        (batch, time), seen = q.shape[:2], k.shape[1]
        if packing is None:
            queries, keys = (torch.arange(0, batch * size + 1, size, device=q.device) for size in (time, seen))
            return cls(torch.stack([queries, keys]), time, seen)
        if seen == time:
            return cls(packing.cu_seqlens.expand(2, -1), packing.longest, packing.longest)
        keys = torch.cat([seen - time - packing.positions[:1], packing.cu_seqlens[1:] + (seen - time)])
        return cls(torch.stack([packing.cu_seqlens, keys]), packing.longest, seen)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, window: int | None) -> Tensor:
    """Causal attention of queries q [B,T,H,D] to keys and values [B,S,G,D] of their sequence, at most the last `window` of them.

    Without a packing every row is a sequence. Query head h uses key head h * G // H. The last T keys belong to the queries' tokens; those
    before them continue the rows, or the packing's first sequence.
    """
    batch, time = q.shape[:2]
    bounds = Bounds.of(q, k, packing)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    o = flash(q, k, v, bounds, window) if flash_can(q) else PackedAttention.apply(q, k, v, bounds.at, window)
    return o.unflatten(0, (batch, time))


def flash_can(q: Tensor) -> bool:
    """Whether PyTorch's flash attention supports these queries, without padding their heads."""
    width = q.shape[-1]
    return q.is_cuda and torch.version.hip is None and q.dtype in (torch.float16, torch.bfloat16) and width <= 256 and width % 8 == 0


def flash(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, window: int | None) -> Tensor:
    """PyTorch's variable-length kernel, with boundaries on the device; the last query of a sequence is aligned with its last key."""
    queries, keys = bounds.at.to(torch.int32)
    limits = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
    return torch.ops.aten._flash_attention_forward(
        q, k, v, queries, keys, bounds.most_queries, bounds.most_keys, 0.0, True, False, **limits
    )[0]


def pieces(queries: list[int], keys: list[int], window: int | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries and the keys they may see: a sequence each, or under a window several blocks of it."""
    for (start, end), (oldest, newest) in zip(pairwise(queries), pairwise(keys), strict=True):
        size, later = max(1, end - start) if window is None else max(window, BLOCK), newest - end
        for first in range(start, end, size):
            last = min(first + size, end)
            yield slice(first, last), slice(oldest if window is None else max(oldest, first + later - window + 1), last + later)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention of the last n of m tokens: q [n,H,D], keys and values [m,G,D]."""
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
    """Block by block, where there is no kernel; the backward pass recomputes each block."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int | None) -> Tensor:
        ctx.save_for_backward(q, k, v, bounds)
        ctx.window = window
        return _forward_op(q, k, v, bounds, window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward_op(do, *ctx.saved_tensors, ctx.window), None, None
