"""Linear attention with any decay, or none, as an op with gradients: which kernels, in which order.

Forwards a chunk's gates and decays are folded into queries, keys and scores (scalar.py, or channel.py for a decay per key channel), and the
rest is a scan over chunks (scan.py). Saved for the backward pass are the inputs and what segments begin with; it prepares again, scans for
the states before each chunk and, with the roles of queries and keys exchanged, for the gradients of those after each, and takes both to the
gradients of queries and keys.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from headmax.ops.kernels.channel import Reader, prepare_channel, query_key_gradients_channel
from headmax.ops.kernels.common import Layout, contiguous
from headmax.ops.kernels.scalar import prepare, query_key_gradients
from headmax.ops.kernels.scan import boundaries_shape, scan, scan_and_read
from headmax.ops.kernels.tiles import chunk_length
from headmax.ops.library import define_op, once_differentiable
from headmax.ops.packing import CHUNK, Packing
from headmax.ops.sequential import per_key_head, per_value_head


def per_channel(log_decay: Tensor | None) -> TypeGuard[Tensor]:
    return log_decay is not None and log_decay.ndim == 4


def tokens_of_chunk(q: Tensor, log_decay: Tensor | None) -> int:
    return CHUNK if per_channel(log_decay) else chunk_length(q, q.shape[3])


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o, the final state, and for the backward pass what segments begin with."""
    layout = Layout(q.shape[0], q.shape[1], table, starts, tokens_of_chunk(q, log_decay))
    q, k = per_value_head(q, v), per_value_head(k, v)
    if per_channel(log_decay):
        prepared = prepare_channel([Reader(q, read_gate, scale, q.dtype)], k, log_decay, write_gate, layout)[0]
    else:
        prepared = prepare(q, k, log_decay, read_gate, write_gate, scale, layout)
    scaled_q, scaled_k, scores, decay, factored, _ = prepared
    scanned = scan_and_read(scaled_k, scaled_q, scores, v, decay, factored, initial, layout)
    return scanned.out, scanned.final, scanned.boundaries


def fake_forward(q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts):
    layout = Layout(q.shape[0], q.shape[1], table, starts, tokens_of_chunk(q, log_decay))
    final, boundaries = (q.new_empty(shape, dtype=torch.float32) for shape in (layout.states(q, v), boundaries_shape(q, v, layout)))
    return torch.empty_like(v), final, boundaries


def backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None,
    write_gate: Tensor | None, scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None, boundaries: Tensor,
    decay_gradient: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_decay (an empty tensor if it has none), the gates there are [gates, B, T, H], initial."""
    layout, d_o = Layout(q.shape[0], q.shape[1], table, starts, tokens_of_chunk(q, log_decay)), d_o.contiguous()
    d_final, given_q, given_k = None if d_final is None else d_final.contiguous(), q, k
    q, k = per_value_head(q, v), per_value_head(k, v)
    if per_channel(log_decay):
        prepared = prepare_channel([Reader(q, read_gate, scale, q.dtype)], k, log_decay, write_gate, layout, backward=True)[0]
    else:
        prepared = prepare(q, k, log_decay, read_gate, write_gate, scale, layout, backward=True)
    scaled_q, scaled_k, scores, decay, factored, _ = prepared
    states = scan(scaled_k, v, decay, factored, initial, layout, boundaries=boundaries).states
    back = scan_and_read(scaled_q, scaled_k, scores, d_o, decay, factored, d_final, layout, reverse=True)
    if per_channel(log_decay):
        d_q, d_k, d_decay, d_gates = query_key_gradients_channel(
            q, k, v, d_o, log_decay, read_gate, write_gate, scale, prepared, states, back.states, layout, decay_gradient
        )
    else:
        d_q, d_k, d_decay, d_gates = query_key_gradients(
            q, k, v, d_o, log_decay, read_gate, write_gate, scale, states, back.states, layout, decay_gradient
        )
    return [per_key_head(d_q, given_q), per_key_head(d_k, given_k), back.out, d_decay, d_gates, back.final]


def fake_backward(d_o, d_final, q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts, boundaries, decay_gradient):
    d_gates = q.new_empty((read_gate is not None) + (write_gate is not None), *v.shape[:3], dtype=torch.float32)
    d_decay = q.new_empty(0, dtype=torch.float32)
    if decay_gradient:
        d_decay = torch.empty_like(log_decay, dtype=log_decay.dtype if log_decay.ndim == 4 else torch.float32)
    d_initial = q.new_empty(Layout(q.shape[0], q.shape[1], table, starts).states(q, v), dtype=torch.float32)
    return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_decay, d_gates, d_initial]


_forward = define_op("decayed_attention", forward, fake_forward)
_backward = define_op("decayed_attention_backward", backward, fake_backward)


class DecayedAttention(torch.autograd.Function):
    """o, and the final state if `return_state`. Saves its inputs and what segments begin with."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts, return_state):
        o, final, boundaries = _forward(q, k, v, log_decay, read_gate, write_gate, scale, initial, table, starts)
        ctx.save_for_backward(q, k, v, log_decay, read_gate, write_gate, initial, table, starts, boundaries)
        ctx.scale = scale
        return (o, final) if return_state else o

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, d_final=None):
        q, k, v, log_decay, read_gate, write_gate, initial, table, starts, boundaries = ctx.saved_tensors
        decay_gradient = log_decay is not None and ctx.needs_input_grad[3]
        d_q, d_k, d_v, d_decay, d_gates, d_initial = _backward(
            d_o, d_final, q, k, v, log_decay, read_gate, write_gate, ctx.scale, initial, table, starts, boundaries, decay_gradient
        )
        d_read = None if read_gate is None else d_gates[0].to(read_gate.dtype)
        d_write = None if write_gate is None else d_gates[-1].to(write_gate.dtype)
        d_decay = d_decay.to(log_decay.dtype) if decay_gradient else None
        d_initial = None if initial is None else d_initial.to(initial.dtype)
        return d_q, d_k, d_v, d_decay, d_read, d_write, None, d_initial, None, None, None


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial_state: Tensor | None, packing: Packing | None, return_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Linear attention with log_decay None, [HV], [B,T,HV] or [B,T,H,K], where every key head has one value head."""
    if q.dtype == torch.float16 and per_channel(log_decay):  # a chunk's decays do not fit float16's range
        wide = q.float(), k.float(), v.float()
        o, state = decayed_attention(*wide, log_decay, read_gate, write_gate, scale, initial_state, packing, return_state)
        return o.half(), state
    *given, initial = contiguous(q, k, v, log_decay, read_gate, write_gate, initial_state)
    table, starts = (None, None) if packing is None else packing.chunks(tokens_of_chunk(q, log_decay))
    result = DecayedAttention.apply(*given, scale, initial, table, starts, return_state)
    return result if return_state else (result, None)
