"""The recurrences one token at a time, in Triton: on a tile of the state, and as the kernel of `headmax.ops.step`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.checks import check_recurrence, check_shape
from headmax.ops.kernels.common import add_both
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, power_of_2, processors
from headmax.ops.kernels.unit_length import inverse_length

EPS = tl.constexpr(1e-6)
"""Of unit lengths, as `gated_delta_rule` has it."""
KINDS = {"linear_attention": "token", "gla": "channel", "gated_delta_rule": "delta", "kda": "channel delta"}
"""The decays of each op that the kernel knows; those of linear attention may also be of a head, or none."""


@triton.jit
def advance(b_s, b_q, b_k, b_v, decay, beta, read, write, DECAY: tl.constexpr):
    """The state [K, V] after one token, and what it reads, o [V]; q and k [K], v [V], decay [K] per channel, else numbers.

    "none", "head", "token": S ← decay S + (write k)^T v ;  o = (read q) S.  "channel": the same with diag(decay).
    "delta": S' = decay S ;  S ← S' + k^T u, u = beta (write v - k S') ;  o = (read q) S = read (q S' + <q, k> u), so that both sums over
    the state are taken at once, and the gates are not waited for.  "channel delta": the same with diag(decay).
    """
    if DECAY == "delta" or DECAY == "channel delta":
        if DECAY == "delta":
            b_s *= decay
        else:
            b_s *= decay[:, None]
        b_ks, b_qs = tl.reduce((b_k[:, None] * b_s, b_q[:, None] * b_s), 0, add_both)
        b_u = beta * (write * b_v - b_ks)
        return b_s + b_k[:, None] * b_u[None, :], read * (b_qs + tl.sum(b_q * b_k, 0) * b_u)
    else:
        if DECAY == "channel":
            b_s = decay[:, None] * b_s + (write * b_k)[:, None] * b_v[None, :]
        else:
            b_s = decay * b_s + (write * b_k)[:, None] * b_v[None, :]
        return b_s, read * tl.sum(b_q[:, None] * b_s, 0)


@triton.jit
def step_kernel(
    q, k, v, log_decay, beta, read_gate, write_gate, state, out, scale, T,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, UNIT_LENGTH: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV value channels of one head of one sequence, token after token: out [B,T,H,V], and state [B,H,K,V] in place.

    In: q, k [B,T,KEY_HEADS,K], v [B,T,H,V], log_decay, beta and gates as the ops take them, or None.
    """
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_k, o_v = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    m_k, m_v, key_head = o_k < K, o_v < V, head // (H // KEY_HEADS)
    p_s = state + ((sequence * H + head) * K + o_k[:, None]) * V + o_v[None, :]
    b_s = tl.load(p_s, mask=m_k[:, None] & m_v[None, :], other=0.0).to(tl.float32)  # [BK, BV]
    for t in range(T):
        token = sequence * T + t
        o_h, o_q = token * H + head, (token * KEY_HEADS + key_head) * K + o_k
        b_q = tl.load(q + o_q, mask=m_k, other=0.0).to(tl.float32)  # [BK]
        b_k = tl.load(k + o_q, mask=m_k, other=0.0).to(tl.float32)  # [BK]
        b_v = tl.load(v + o_h * V + o_v, mask=m_v, other=0.0).to(tl.float32)  # [BV]
        read, write, decay, beta_t = scale, 1.0, 1.0, 1.0
        if UNIT_LENGTH:
            b_q, b_k = b_q * inverse_length(b_q, EPS), b_k * inverse_length(b_k, EPS)
        if read_gate is not None:
            read *= tl.load(read_gate + o_h).to(tl.float32)
        if write_gate is not None:
            write = tl.load(write_gate + o_h).to(tl.float32)
        if DECAY == "head":
            decay = tl.exp(tl.load(log_decay + head).to(tl.float32))
        elif DECAY == "channel" or DECAY == "channel delta":
            decay = tl.exp(tl.load(log_decay + o_h * K + o_k, mask=m_k, other=0.0).to(tl.float32))  # [BK]
        elif DECAY != "none":
            decay = tl.exp(tl.load(log_decay + o_h).to(tl.float32))
        if beta is not None:
            beta_t = tl.load(beta + o_h).to(tl.float32)
        b_s, b_o = advance(b_s, b_q, b_k, b_v, decay, beta_t, read, write, DECAY)
        tl.store(out + o_h * V + o_v, b_o.to(out.dtype.element_ty), mask=m_v)
    tl.store(p_s, b_s.to(state.dtype.element_ty), mask=m_k[:, None] & m_v[None, :])


def value_tile(states: int, value: int, device: torch.device) -> tuple[int, int]:
    """Value channels of a program, and its warps: as many channels as leave every processor two programs."""
    width = min(64, max(16, power_of_2(value)))
    while width > 16 and states * cdiv(value, width) < 2 * processors(device):
        width //= 2
    return width, 1 if width == 16 else 4


def step(
    op: Any,
    inputs: tuple[Tensor, ...],
    state: Tensor,
    scale: float,
    read_gate: Tensor | None = None,
    write_gate: Tensor | None = None,
    normalize_qk: bool = False,
) -> Tensor:
    """See `headmax.ops.step`. A state that is not contiguous is copied, moved on, and copied back."""
    name, (q, k, v), (log_decay, beta) = op.__name__, inputs[:3], (*inputs[3:], None, None)[:2]
    check_recurrence(
        name, q, k, v, read_gate=read_gate, write_gate=write_gate, initial_state=state, cu_seqlens=None,
        value_heads=name != "gla",
    )  # fmt: skip
    (batch, time, key_heads, key), (heads, value) = q.shape, v.shape[2:]
    kind = KINDS[name]
    if name == "linear_attention" and (log_decay is None or log_decay.ndim == 1):
        kind = "none" if log_decay is None else "head"
    if kind == "head":
        check_shape(name, "log_decay", log_decay, "heads", (heads,), q.device)
    elif kind in ("channel", "channel delta"):
        check_shape(name, "log_decay", log_decay, "batch, time, heads, key", (batch, time, heads, key), q.device)
    elif kind != "none":
        check_shape(name, "log_decay", log_decay, "batch, time, heads", (batch, time, heads), q.device)
    if kind in ("delta", "channel delta"):
        check_shape(name, "beta", beta, "batch, time, heads", (batch, time, heads), q.device)
    tensors = (x if x is None else x.contiguous() for x in (q, k, v, log_decay, beta, read_gate, write_gate))
    memory, out = state.contiguous(), torch.empty_like(v, memory_format=torch.contiguous_format)
    width, warps = value_tile(batch * heads, value, q.device)
    launch(
        step_kernel, (cdiv(value, width), heads, batch), (*tensors, memory, out, scale, time),
        {"H": heads, "KEY_HEADS": key_heads, "K": key, "V": value, "DECAY": kind, "UNIT_LENGTH": normalize_qk,
         "BK": max(16, power_of_2(key)), "BV": width, "num_warps": warps},
    )  # fmt: skip
    if memory is not state:
        state.copy_(memory)
    return out
