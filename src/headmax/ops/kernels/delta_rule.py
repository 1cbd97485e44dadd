"""The gated delta rule as an op with gradients, with a decay per head or per key channel (KDA): which kernels, in which order.

Once the writes u are known it is linear attention with values u, and shares its kernels: queries and keys are prepared as there (scalar.py,
channel.py), the writes as far as they do not wait for the state (delta_writes.py); then a scan over chunks (delta_scan.py). Saved for the
backward pass are the inputs, the triangular inverses and what segments begin with; all else is computed again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headmax.ops.gated_delta_rule.reference import EPS
from headmax.ops.kernels.channel import Reader, prepare_channel, query_key_gradients_channel
from headmax.ops.kernels.common import Layout, Prepared, contiguous
from headmax.ops.kernels.delta_scan import delta_boundaries_shape, delta_scan, delta_scan_back
from headmax.ops.kernels.delta_writes import (
    Writes,
    channel_write_gradients,
    channel_writes,
    delta_write_gradients,
    delta_writes,
    empty_inverse,
)
from headmax.ops.kernels.scalar import prepare, query_key_gradients
from headmax.ops.kernels.scan import combine
from headmax.ops.kernels.tiles import reads_in_scan
from headmax.ops.kernels.unit_length import unit_length, unit_length_gradient
from headmax.ops.library import define_op, once_differentiable
from headmax.ops.packing import CHUNK, Packing
from headmax.ops.sequential import per_key_head, per_value_head


def keys_for(x: Tensor, v: Tensor, normalize: bool) -> Tensor:
    """Queries or keys as the recurrence takes them: of unit length if `normalize`, one for each value head."""
    return per_value_head(unit_length(x, EPS) if normalize else x, v)


def keys_gradient(d_x: Tensor, x: Tensor, normalize: bool) -> Tensor:
    """The gradient of x from that of `keys_for` of it."""
    d_x = per_key_head(d_x, x)
    return unit_length_gradient(x, d_x, EPS) if normalize else d_x


def prepare_writes(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, read_gate: Tensor | None, write_gate: Tensor | None, scale: float,
    layout: Layout, inverse: Tensor | None = None,
) -> tuple[Prepared, Prepared | None, Writes]:  # fmt: skip
    """What queries read with, what keys times β do if the decay is per channel, and the writes; for the backward pass with the inverses."""
    backward = inverse is not None
    if log_decay.ndim == 3:
        prepared = prepare(q, k, log_decay, read_gate, None, scale, layout, backward)
        return prepared, None, delta_writes(k, v, log_decay, beta, write_gate, layout, inverse)
    readers = Reader(q, read_gate, scale, q.dtype), Reader(k, beta, 1.0, q.dtype if backward else torch.float32)  # L is inverted in float32
    prepared, erasing = prepare_channel(readers, k, log_decay, None, layout, backward)
    return prepared, erasing, channel_writes(erasing, v, beta, write_gate, layout, inverse)


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, the final state, and for the backward pass the inverses and what segments begin with."""
    layout = Layout(q.shape[0], q.shape[1], table, starts)
    q, k = keys_for(q, v, normalize), keys_for(k, v, normalize)
    prepared, _, writes = prepare_writes(q, k, v, log_decay, beta, read_gate, write_gate, scale, layout)
    read = reads_in_scan(k, "delta_read_scan")
    scanned = delta_scan(prepared, writes, initial, layout, read=read)
    o = scanned.out if read else combine(prepared.scaled_q, prepared.scores, scanned.out, scanned.states, layout)
    return o, scanned.final, writes.inverse, scanned.boundaries


def fake_forward(q, k, v, log_decay, beta, read_gate, write_gate, scale, initial, table, starts, normalize):
    layout = Layout(q.shape[0], q.shape[1], table, starts)
    final, boundaries = (q.new_empty(shape, dtype=torch.float32) for shape in (layout.states(q, v), delta_boundaries_shape(k, v, layout)))
    return torch.empty_like(v), final, empty_inverse(v), boundaries


def backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, read_gate: Tensor | None,
    write_gate: Tensor | None, scale: float, initial: Tensor | None, table: Tensor | None, starts: Tensor | None, normalize: bool,
    inverse: Tensor, boundaries: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_decay, beta, read_gate, write_gate, initial; an empty tensor where there is none."""
    layout, d_o = Layout(q.shape[0], q.shape[1], table, starts), d_o.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    given_q, given_k = q, k
    q, k = keys_for(q, v, normalize), keys_for(k, v, normalize)
    prepared, erasing, writes = prepare_writes(q, k, v, log_decay, beta, read_gate, write_gate, scale, layout, inverse)
    states, u, _, _ = delta_scan(prepared, writes, initial, layout, boundaries)
    d_u = combine(prepared.scaled_k, prepared.scores, d_o, None, layout)
    d_states, d_initial = delta_scan_back(prepared, writes, boundaries, d_o, d_u, d_final, layout)
    inputs = (q, k, u, d_o, log_decay, read_gate, None, scale)
    if erasing is None:
        d_q, d_k, d_decay, d_gates = query_key_gradients(*inputs, states, d_states, layout, decay_gradient=True)
        d_v, d_beta, d_write = delta_write_gradients(k, v, log_decay, beta, write_gate, inverse, states, d_u, d_k, d_decay, layout)
    else:
        d_q, d_k, d_decay, d_gates = query_key_gradients_channel(*inputs, prepared, states, d_states, layout, decay_gradient=True)
        d_v, d_beta, d_write, further_k, further_decay = channel_write_gradients(
            erasing, k, v, log_decay, beta, write_gate, inverse, states, u, d_u, layout
        )
        d_k, d_decay = d_k + further_k, d_decay.float() + further_decay
    d_read = q.new_empty(0, dtype=torch.float32) if read_gate is None else d_gates[0]
    d_q, d_k = keys_gradient(d_q, given_q, normalize), keys_gradient(d_k, given_k, normalize)
    return [d_q, d_k, d_v, d_decay, d_beta, d_read, d_write, d_initial]


def fake_backward(
    d_o, d_final, q, k, v, log_decay, beta, read_gate, write_gate, scale, initial, table, starts, normalize, inverse, boundaries
):
    nothing = q.new_empty(0, dtype=torch.float32)
    rows = [torch.empty_like(x, dtype=torch.float32) if x is not None else nothing for x in (log_decay, beta, read_gate, write_gate)]
    d_initial = q.new_empty(Layout(q.shape[0], q.shape[1], table, starts).states(q, v), dtype=torch.float32)
    return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *rows, d_initial]


_forward = define_op("gated_delta_rule", forward, fake_forward)
_backward = define_op("gated_delta_rule_backward", backward, fake_backward)


class GatedDeltaRule(torch.autograd.Function):
    """o, and the final state if `return_state`. Saves its inputs, the inverses and what segments begin with."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, beta, read_gate, write_gate, scale, initial, table, starts, normalize, return_state):
        o, final, inverse, boundaries = _forward(q, k, v, log_decay, beta, read_gate, write_gate, scale, initial, table, starts, normalize)
        ctx.save_for_backward(q, k, v, log_decay, beta, read_gate, write_gate, initial, table, starts, inverse, boundaries)
        ctx.scale, ctx.normalize = scale, normalize
        return (o, final) if return_state else o

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, d_final=None):
        q, k, v, log_decay, beta, read_gate, write_gate, initial, table, starts, inverse, boundaries = ctx.saved_tensors
        inputs = q, k, v, log_decay, beta, read_gate, write_gate, ctx.scale, initial, table, starts, ctx.normalize
        d_q, d_k, d_v, d_decay, d_beta, d_read, d_write, d_initial = _backward(d_o, d_final, *inputs, inverse, boundaries)
        d_read = None if read_gate is None else d_read.to(read_gate.dtype)
        d_write = None if write_gate is None else d_write.to(write_gate.dtype)
        d_initial = None if initial is None else d_initial.to(initial.dtype)
        d_decay, d_beta = d_decay.to(log_decay.dtype), d_beta.to(beta.dtype)
        return d_q, d_k, d_v, d_decay, d_beta, d_read, d_write, None, d_initial, None, None, None, None


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, normalize_qk: bool, read_gate: Tensor | None,
    write_gate: Tensor | None, scale: float, initial_state: Tensor | None, packing: Packing | None, return_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """With log_decay [B,T,H], or [B,T,H,K] for KDA."""
    if q.dtype == torch.float16 and log_decay.ndim == 4:  # a chunk's decays do not fit float16's range
        wide = q.float(), k.float(), v.float()
        o, state = gated_delta_rule(
            *wide, log_decay, beta, normalize_qk, read_gate, write_gate, scale, initial_state, packing, return_state
        )
        return o.half(), state
    *given, initial = contiguous(q, k, v, log_decay, beta, read_gate, write_gate, initial_state)
    table, starts = (None, None) if packing is None else packing.chunks(CHUNK)
    result = GatedDeltaRule.apply(*given, scale, initial, table, starts, normalize_qk, return_state)
    return result if return_state else (result, None)
