"""Chunkwise-parallel gated delta rule in plain PyTorch: any device, any dtype, exact for any decay <= 0."""

from __future__ import annotations

import torch
from torch import Tensor

from headmax.ops.checks import compute_dtype
from headmax.ops.chunks import Chunks, decay_from_start, decay_to_end, in_segments, pairwise_decay, segments
from headmax.ops.gated_delta_rule.reference import unit_length
from headmax.ops.library import define_op, once_differentiable
from headmax.ops.packing import Packing
from headmax.ops.sequential import gated, per_value_head


@in_segments
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    normalize_qk: bool,
    read_gate: Tensor | None,
    write_gate: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    packing: Packing | None,
) -> tuple[Tensor, Tensor]:
    """The writes u of a chunk depend on each other and on the chunk's first state S: with D_ij the decay from j to i,

        (I + L) U = diag(β) (V - diag(D_start) K S),   L = strictly lower part of diag(β) (K K^T ⊙ D).

    One triangular solve per chunk gives U = fresh - erase S, so that only two products per chunk wait for the state.
    """
    dtype = compute_dtype(q.dtype)
    chunks = Chunks(q.shape[1], packing)
    q, k, v, in_dtype = q.to(dtype), k.to(dtype), v.to(dtype), q.dtype
    if normalize_qk:
        q, k = unit_length(q), unit_length(k)
    q, k = per_value_head(q, v), per_value_head(k, v)
    read = scale if read_gate is None else (scale * read_gate.to(dtype)).unsqueeze(-1)
    qc, kc, vc = chunks.split(q * read), chunks.split(k), chunks.split(gated(v, write_gate))
    steps, bc = chunks.split(log_decay.to(dtype)), chunks.split(beta.to(dtype))
    decay, from_start, to_end = pairwise_decay(steps), decay_from_start(steps), decay_to_end(steps)

    key_beta = gated(kc, bc)
    system = (key_beta @ kc.mT) * decay
    wanted = torch.cat([gated(vc, bc), gated(key_beta, from_start)], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    fresh, erase = solved.split([v.shape[3], q.shape[3]], -1)

    state = chunks.first_state(initial_state, qc, q.shape[3], v.shape[3])
    states, u, state = delta_scan(fresh, erase, gated(kc, to_end), steps.sum(-1).exp()[..., None, None], state, chunks.starts)
    o = torch.matmul((qc @ kc.mT) * decay, u) + torch.matmul(gated(qc, from_start), states)
    return chunks.join(o).to(in_dtype), state


def scan_forward(
    fresh: Tensor, erase: Tensor, key_to_end: Tensor, decay: Tensor, initial: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    batch, chunks, heads = decay.shape[:3]
    states = fresh.new_empty(batch, chunks, heads, erase.shape[-1], fresh.shape[-1])
    u, final = torch.empty_like(fresh), torch.empty_like(initial)
    for rows, first, end in segments(starts, chunks):
        state = initial[rows]
        for n in range(first, end):
            states[:, n] = state
            u[:, n] = fresh[:, n] - erase[:, n] @ state
            state = decay[:, n] * state + key_to_end[:, n].mT @ u[:, n]
        final[rows] = state
    return states, u, final


def fake_forward(
    fresh: Tensor, erase: Tensor, key_to_end: Tensor, decay: Tensor, initial: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    states = fresh.new_empty(*decay.shape[:3], erase.shape[-1], fresh.shape[-1])
    return states, torch.empty_like(fresh), torch.empty_like(initial)


def scan_backward(
    d_states: Tensor,
    d_u: Tensor,
    d_final: Tensor,
    states: Tensor,
    u: Tensor,
    erase: Tensor,
    key_to_end: Tensor,
    decay: Tensor,
    starts: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_fresh, d_erase, d_key = torch.empty_like(u), torch.empty_like(erase), torch.empty_like(key_to_end)
    d_decay, d_initial = torch.empty_like(decay), torch.empty_like(d_final)
    summed = [axis for axis in (2, 3) if decay.shape[axis + 1] == 1]
    for rows, first, end in segments(starts, decay.shape[1]):
        gradient = d_final[rows]
        for n in reversed(range(first, end)):
            d_fresh[:, n] = d_u[:, n] + key_to_end[:, n] @ gradient
            d_key[:, n] = u[:, n] @ gradient.mT
            d_erase[:, n] = -d_fresh[:, n] @ states[:, n].mT
            d_decay[:, n] = (gradient * states[:, n]).sum(summed, keepdim=True)
            gradient = decay[:, n] * gradient + d_states[:, n] - erase[:, n].mT @ d_fresh[:, n]
        d_initial[rows] = gradient
    return d_fresh, d_erase, d_key, d_decay, d_initial


def fake_backward(d_states, d_u, d_final, states, u, erase, key_to_end, decay, starts):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x) for x in (u, erase, key_to_end, decay, d_final))


_scan = define_op("delta_scan", scan_forward, fake_forward)
_scan_backward = define_op("delta_scan_backward", scan_backward, fake_backward)


class DeltaScan(torch.autograd.Function):
    """See `delta_scan`. Saves all inputs but `fresh`, the states, and u."""

    @staticmethod
    def forward(ctx, fresh, erase, key_to_end, decay, initial, starts):  # type: ignore[no-untyped-def]
        states, u, final = _scan(fresh, erase, key_to_end, decay, initial, starts)
        ctx.save_for_backward(states, u, erase, key_to_end, decay, starts)
        return states, u, final

    @staticmethod
    @once_differentiable
    def backward(ctx, d_states, d_u, d_final):  # type: ignore[no-untyped-def]
        return *_scan_backward(d_states, d_u, d_final, *ctx.saved_tensors), None


def delta_scan(
    fresh: Tensor, erase: Tensor, key_to_end: Tensor, decay: Tensor, initial: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """u_n = fresh_n - erase_n S_n ;  S_{n+1} = decay_n S_n + key_to_end_n^T u_n, with decay [batch, chunks, heads, 1 or key, 1].

    Returns the state before each chunk, all u, and the last state of each sequence.
    """
    return DeltaScan.apply(fresh, erase, key_to_end, decay, initial, starts)
