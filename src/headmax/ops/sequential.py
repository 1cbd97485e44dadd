"""What the token-by-token oracles share: one sequence at a time, in the accumulation dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from headmax.ops.checks import compute_dtype

Recurrence = Callable[..., tuple[Tensor, Tensor]]


def gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else x * gate.to(x.dtype).unsqueeze(-1)


def per_value_head(x: Tensor, v: Tensor) -> Tensor:
    """x [B,T,H,K] for each head of v [B,T,HV,V]: the value heads that share a key head follow each other."""
    groups = v.shape[2] // x.shape[2]
    return x if groups == 1 else x.repeat_interleave(groups, dim=2)


def per_key_head(d_x: Tensor, x: Tensor) -> Tensor:
    """The gradient of x [B,T,H,K] from that of `per_value_head` of it."""
    return d_x if d_x.shape == x.shape else d_x.unflatten(2, (x.shape[2], -1)).sum(3)


def split_time(tokens: Sequence[Any], sizes: int | list[int]) -> Iterable[tuple[Any, ...]]:
    """The arguments of each piece: [batch, time, ...] tensors are cut along time, the others (None, flags, [heads]) go to all."""
    return zip(*[x.split(sizes, dim=1) if isinstance(x, Tensor) and x.ndim > 1 else repeat(x) for x in tokens], strict=False)


def per_sequence(recurrence: Recurrence) -> Recurrence:
    """Runs `recurrence(q, k, v, *per_token, scale, state)` on each packed sequence by itself; the state is given even if not asked for.

    Casts every tensor to the accumulation dtype, the output back to q's, and starts from zeros where there is no initial state.
    """

    @functools.wraps(recurrence)
    def run(*args: Any) -> tuple[Tensor, Tensor]:
        *tokens, scale, initial, packing, _ = args
        q, v = tokens[0], tokens[2]
        dtype = compute_dtype(q.dtype)
        tokens = [x.to(dtype) if isinstance(x, Tensor) else x for x in tokens]
        count = q.shape[0] if packing is None else packing.num_sequences
        initial = q.new_zeros(count, v.shape[2], q.shape[3], v.shape[3], dtype=dtype) if initial is None else initial.to(dtype)
        if packing is None:
            o, state = recurrence(*tokens, scale, initial)
        else:
            pieces = split_time(tokens, packing.cu_seqlens.diff().tolist())
            states = initial.split(1)
            outputs = [
                recurrence(*piece, scale, state) if piece[0].shape[1] else (piece[2], state)  # an empty sequence
                for piece, state in zip(pieces, states, strict=True)
            ]
            o, state = torch.cat([o for o, _ in outputs], dim=1), torch.cat([state for _, state in outputs])
        return o.to(q.dtype), state

    return run
