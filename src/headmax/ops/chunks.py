"""The chunked layout of the pure-PyTorch backends: split time into chunks, scan over them, join again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax.ops.library import define_op, once_differentiable
from headmax.ops.packing import CHUNK, Packing
from headmax.ops.sequential import split_time

SEGMENT = 4096
"""Longer sequences run in pieces of this many steps, so that temporary memory is bounded and stays in the caches."""


class _ContiguousGradient(torch.autograd.Function):
    """x itself. Its gradient leaves the chunked layout permuted, and PyTorch 2.13 traces those of softplus, logsigmoid and F.pad with
    dynamic shapes as if they were contiguous: `aot_eager` then fails at a second length.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> Tensor:
        return d_x.contiguous()


class Chunks:
    """Splits [batch, time, heads, ...] into [batch, chunks, heads, C, ...] and back; empty slots hold zeros.

    Packed sequences each start a chunk of their own. `starts` tells a scan where: it is empty for one sequence per batch row.
    """

    def __init__(self, time: int, packing: Packing | None) -> None:
        self.time = time
        self.packing = packing
        self.size = CHUNK if packing is None else packing.size
        self.starts = torch.empty(0, dtype=torch.int64) if packing is None else packing.slot_starts

    def split(self, x: Tensor) -> Tensor:
        x = _ContiguousGradient.apply(x)
        flat = x.flatten(3) if x.ndim > 3 else x.unsqueeze(-1)
        if self.packing is None:
            batch, _, heads, width = flat.shape
            extra = (self.time + self.size - 1) // self.size * self.size - self.time
            flat = torch.cat([flat, flat.new_zeros(batch, extra, heads, width)], dim=1)  # F.pad: see _ContiguousGradient
        else:
            flat = F.pad(flat, (0, 0, 0, 0, 0, 1)).index_select(1, self.packing.slot_tokens)
        chunked = flat.unflatten(1, (-1, self.size)).transpose(2, 3)
        return chunked if x.ndim > 3 else chunked.squeeze(-1)

    def join(self, x: Tensor) -> Tensor:
        flat = x.transpose(2, 3).flatten(1, 2)
        return flat[:, : self.time] if self.packing is None else flat.index_select(1, self.packing.token_slots)

    def first_state(self, initial: Tensor | None, like: Tensor, key: int, value: int) -> Tensor:
        """The initial state in the dtype of `like` ([batch, chunks, heads, ...]), zero if there is none."""
        if initial is not None:
            return initial.to(like.dtype)
        count = like.shape[0] if self.packing is None else self.packing.num_sequences
        return like.new_zeros(count, like.shape[2], key, value)


def in_segments(run: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Runs `run(q, k, v, *per_token, scale, state, packing)` on a long sequence piece by piece, passing the state on.

    The state is always returned: it costs nothing.
    """

    @functools.wraps(run)
    def segmented(*args: Any) -> tuple[Tensor, Tensor]:
        *tokens, scale, state, packing, _ = args
        if packing is not None or tokens[0].shape[1] <= SEGMENT:
            return run(*args[:-1])
        outputs = []
        for piece in split_time(tokens, SEGMENT):
            o, state = run(*piece, scale, state, None)
            outputs.append(o)
        return torch.cat(outputs, dim=1), state

    return segmented


def pairwise_decay(log_decay: Tensor) -> Tensor:
    """[..., C] → [..., C, C]: exp(Σ_{l=j+1..i} log_decay_l) for i >= j, else 0.

    Each sum starts at its own j. A difference of two cumulative sums would cancel: after one step of -100 it is good to 1e-5 only.
    """
    size = log_decay.shape[-1]
    ones = torch.ones(size, size, dtype=torch.bool, device=log_decay.device)
    steps = log_decay.unsqueeze(-1).masked_fill(~ones.tril(-1), 0.0)
    return steps.cumsum(-2).masked_fill(~ones.tril(), float("-inf")).exp()


def decay_from_start(log_decay: Tensor) -> Tensor:
    """[..., C] → exp(Σ_{l<=i} log_decay_l): what is left of the chunk's first state when token i reads it."""
    return log_decay.cumsum(-1).exp()


def decay_to_end(log_decay: Tensor) -> Tensor:
    """[..., C] → exp(Σ_{l>i} log_decay_l): what is left of token i's write at the chunk's end."""
    later = F.pad(log_decay[..., 1:], (0, 1))
    return later.flip(-1).cumsum(-1).flip(-1).exp()


def segments(starts: Tensor, chunks: int) -> list[tuple[slice, int, int]]:
    """(rows of the initial state, first chunk, end chunk) of each independent scan."""
    if starts.numel() == 0:
        return [(slice(None), 0, chunks)]
    bounds = starts.tolist()
    return [(slice(s, s + 1), bounds[s], bounds[s + 1]) for s in range(len(bounds) - 1)]


def scan_forward(update: Tensor, decay: Tensor, initial: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    states, final = torch.empty_like(update), torch.empty_like(initial)
    for rows, first, end in segments(starts, update.shape[1]):
        state = initial[rows]
        for n in range(first, end):
            states[:, n] = state
            state = torch.addcmul(update[:, n], decay[:, n], state)
        final[rows] = state
    return states, final


def scan_backward(d_states: Tensor, d_final: Tensor, states: Tensor, decay: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d_update, d_decay, d_initial = torch.empty_like(states), torch.empty_like(decay), torch.empty_like(d_final)
    summed = [axis for axis in (2, 3) if decay.shape[axis + 1] == 1]
    for rows, first, end in segments(starts, states.shape[1]):
        gradient = d_final[rows]
        for n in reversed(range(first, end)):
            d_update[:, n] = gradient
            d_decay[:, n] = (gradient * states[:, n]).sum(summed, keepdim=True)
            gradient = torch.addcmul(d_states[:, n], decay[:, n], gradient)
        d_initial[rows] = gradient
    return d_update, d_decay, d_initial


_scan = define_op("chunk_scan", scan_forward, lambda update, decay, initial, starts: (torch.empty_like(update), torch.empty_like(initial)))
_scan_backward = define_op(
    "chunk_scan_backward",
    scan_backward,
    lambda d_states, d_final, states, decay, starts: (torch.empty_like(states), torch.empty_like(decay), torch.empty_like(d_final)),
)


class ChunkScan(torch.autograd.Function):
    """See `chunk_scan`. Saves decays and the states."""

    @staticmethod
    def forward(ctx: Any, update: Tensor, decay: Tensor, initial: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        states, final = _scan(update, decay, initial, starts)
        ctx.save_for_backward(states, decay, starts)
        return states, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        return *_scan_backward(d_states, d_final, *ctx.saved_tensors), None


def chunk_scan(update: Tensor, decay: Tensor, initial: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """S_{n+1} = decay_n S_n + update_n over chunks. Returns the state before each chunk and the last state of each sequence.

    update [batch, chunks, heads, key, value]; decay broadcasts against it ([..., 1 or key, 1]).
    """
    return ChunkScan.apply(update, decay, initial, starts)
