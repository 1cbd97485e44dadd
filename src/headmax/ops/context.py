"""Context parallelism: a recurrence over sequences that are split over ranks in consecutive pieces.

A piece maps the state before it affinely: S_out = M S_in + b. Each rank runs its piece from a zero state (the first one from the given
state), the ranks exchange (M, b), and each corrects its outputs for the state that arrives from the pieces before it,

    o_t = o_t|0 + E_t S_in,     M: what is left of S_in at the end;  E_t: what token t reads of it.

There is one exchange forward and one backward, of the gradient of S_in. Their size is that of a state and its transition, whatever the
length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from headmax.ops.checks import compute_dtype
from headmax.ops.library import once_differentiable
from headmax.ops.packing import Packing
from headmax.ops.sequential import gated, per_value_head

Run = Callable[..., tuple[Tensor, Tensor]]


class Piece(NamedTuple):
    """What a rank's tokens read, and how they change the state."""

    o: Tensor
    """[B,T,HV,V] outputs from a zero state."""
    state: Tensor
    """[sequences,HV,K,V] final state from a zero state."""
    reading: Tensor
    """E [B,T,HV,K]; zero for tokens of sequences that begin here."""
    transition: Tensor
    """M [B,HV,K,K], or [B,HV,1 or K,1] where it is diagonal; of the first sequence of a packed row."""


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: every rank's x."""
    everyone = x.new_empty(group.size() * x.numel())
    dist.all_gather_into_tensor(everyone, x.flatten().contiguous(), group)
    return everyone.view(-1, *x.shape)


def apply(transition: Tensor, state: Tensor) -> Tensor:
    """M S"""
    return transition * state if transition.shape[-1] == 1 else transition @ state


class StateBefore(torch.autograd.Function):
    """(M, b) of each rank's piece → the state before this rank's, zero before the first. Saves all M and that state."""

    @staticmethod
    def forward(ctx: Any, transition: Tensor, left: Tensor, group: dist.ProcessGroup) -> Tensor:
        message = gather(torch.cat([transition.flatten(), left.flatten()]), group)
        transitions = message[:, : transition.numel()].unflatten(1, transition.shape)
        states = message[:, transition.numel() :].unflatten(1, left.shape)
        state = torch.zeros_like(left)
        for rank in range(dist.get_rank(group)):
            state = apply(transitions[rank], state) + states[rank]
        ctx.group = group
        ctx.save_for_backward(transitions, state)
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_state: Tensor) -> tuple[Tensor, Tensor, None]:
        """d_b = the gradient of the state after this piece: G_r = M_{r+1}^T G_{r+1} + d S_in_{r+1}."""
        transitions, state = ctx.saved_tensors
        gradients = gather(d_state, ctx.group)
        d_left = torch.zeros_like(d_state)
        for rank in reversed(range(dist.get_rank(ctx.group) + 1, len(gradients))):
            d_left = apply(transitions[rank].mT if transitions.shape[-1] > 1 else transitions[rank], d_left) + gradients[rank]
        if transitions.shape[-1] > 1:
            return d_left @ state.mT, d_left, None
        return (d_left * state).sum_to_size(transitions.shape[1:]), d_left, None


class FromPrevious(torch.autograd.Function):
    """The previous rank's x, zeros on the first rank; the gradient is sent back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return shifted(x, group, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        return shifted(d_x, ctx.group, -1), None


def shifted(x: Tensor, group: dist.ProcessGroup, by: int) -> Tensor:
    """The x of the rank `by` places before this one; zeros if there is none."""
    ranks, rank, there = group.size(), dist.get_rank(group), torch.zeros_like(x, memory_format=torch.contiguous_format)
    given, taken = (x.shape[0] if 0 <= rank + to < ranks else 0 for to in (by, -by))
    takes, gives = ([size if n == rank + to else 0 for n in range(ranks)] for size, to in ((taken, -by), (given, by)))
    dist.all_to_all_single(there[:taken], x[:given].contiguous(), takes, gives, group)
    return there


def from_previous(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The previous rank's x, zeros on the first rank."""
    return FromPrevious.apply(x, group)


class UpToHere(torch.autograd.Function):
    """x [B,T,...] of all ranks up to this one, [B,(rank + 1) T,...]; pieces are of one length."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather(x, group)[: dist.get_rank(group) + 1].transpose(0, 1).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        group, ranks = ctx.group, dist.get_rank(ctx.group) + 1
        parts = d_x.unflatten(1, (ranks, -1)).transpose(0, 1)
        rest = parts.new_zeros(group.size() - ranks, *parts.shape[1:])
        own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(own.view(-1), torch.cat([parts, rest]).flatten(), group=group)
        return own, None


def up_to_here(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [B,T,...] of all ranks up to this one, [B,(rank + 1) T,...]; pieces are of one length."""
    return UpToHere.apply(x, group)


def begun(packing: Packing) -> Tensor:
    """Whether the first sequence began on an earlier rank."""
    return packing.positions[0] > 0


def decaying(run: Run) -> Callable[..., Piece]:
    """A piece of `run(q, k, v, log_decay, read_gate, write_gate, scale, state, packing, return_state)`, whose transition is its decay."""

    def piece(*args: Any) -> Piece:
        q, _, v, log_decay, read_gate, _, scale, _, packing, _ = args
        o, state = run(*args)
        dtype = compute_dtype(q.dtype)
        reading = gated(per_value_head(q.to(dtype) * scale, v), read_gate)
        if log_decay is None:
            transition = reading.new_ones(len(q), v.shape[2], 1, 1)
        else:
            steps = log_decay.to(dtype).expand(v.shape[:3]) if log_decay.ndim < 4 else log_decay.to(dtype)
            if packing is not None:
                steps = steps.masked_fill(packing.sequence_ids.view(1, -1, *[1] * (steps.ndim - 2)) > 0, 0.0)
            decay = steps.cumsum(1).exp().view(*v.shape[:3], -1)
            reading, transition = reading * decay, decay[:, -1].unsqueeze(-1)
        if packing is not None:
            reading = reading * (packing.sequence_ids == 0)[None, :, None, None]
        return Piece(o, state, reading, transition)

    return piece


def erasing(run: Run) -> Callable[..., Piece]:
    """A piece of `run(q, k, v, log_decay, beta, normalize_qk, read_gate, write_gate, scale, state, packing, return_state)`.

    Its transition matrix is what the op makes of an identity state when nothing is written: K more columns, appended to those of v.
    """

    def piece(*args: Any) -> Piece:
        q, k, v, *others, initial, packing, _ = args
        key, value = q.shape[3], v.shape[3]
        count = len(q) if packing is None else packing.num_sequences
        units = torch.eye(key, dtype=compute_dtype(q.dtype), device=q.device).expand(count, v.shape[2], key, key)
        if packing is not None:  # only the first sequence may have begun before
            units = units * (torch.arange(count, device=q.device) == 0).view(-1, 1, 1, 1)
        initial = units.new_zeros(count, v.shape[2], key, value) if initial is None else initial.to(units.dtype)
        wide = torch.cat([v, v.new_zeros(*v.shape[:3], key)], -1)
        o, state = run(q, k, wide, *others, torch.cat([initial, units], -1), packing, True)
        (o, reading), (state, transition) = o.split([value, key], -1), state.split([value, key], -1)
        return Piece(o, state, reading, transition[: len(q)])

    return piece


def over_pieces(run: Run, group: dist.ProcessGroup | None, kind: Callable[[Run], Callable[..., Piece]]) -> Run:
    """`run` on this rank's piece of every sequence; `run` itself without a group.

    The initial state counts on the first rank; the final state is that at the end of each piece. In a packed row both have one entry per
    sequence of the piece, and a sequence that began on an earlier rank takes its initial state from there.
    """
    if group is None or group.size() == 1:
        return run
    run_piece = kind(run)

    @functools.wraps(run)
    def whole(*args: Any) -> tuple[Tensor, Tensor]:
        *before, initial, packing, _ = args
        if packing is None:
            initial = initial if dist.get_rank(group) == 0 else None
            o, state, reading, transition = run_piece(*before, initial, None, True)
            arriving = StateBefore.apply(transition, state, group)
            left = apply(transition, arriving)
        else:
            continued = begun(packing)
            if initial is not None:
                at = torch.arange(packing.num_sequences, device=initial.device).view(-1, 1, 1, 1)
                initial = initial.masked_fill(continued & (at == 0), 0.0)
            o, state, reading, transition = run_piece(*before, initial, packing, True)
            through = transition * (continued & (packing.sequence_ids[-1] == 0))
            arriving = StateBefore.apply(through, state.index_select(0, packing.sequence_ids[-1:]), group)
            arriving = arriving.masked_fill(~continued, 0.0)
            left = torch.cat([apply(transition, arriving), torch.zeros_like(state[1:])])
        corrected = o + torch.einsum("bthk,bhkv->bthv", reading.to(o.dtype), arriving.to(o.dtype))
        return corrected, state + left

    return whole
