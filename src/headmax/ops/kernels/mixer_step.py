"""One decoding step of a recurrent mixer in one kernel: from a token's projections to what its heads read, the state moved on in place;
and, where a mixer has it, norm and gate of what was read in a second.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.gate import load_gates_of_head
from headmax.ops.kernels.launch import early, launch, wait_for_previous
from headmax.ops.kernels.norm import inverse_rms
from headmax.ops.kernels.step import EPS, advance, value_tile
from headmax.ops.kernels.tiles import cdiv, power_of_2
from headmax.ops.kernels.unit_length import inverse_length

GATED = 4096
"""Entries of a gate's matrix that a program holds."""


@triton.jit
def feature(b_x, m_x, FEATURE: tl.constexpr):
    """The feature map of a query or key [K]."""
    if FEATURE == "relu":
        return tl.maximum(b_x, 0.0)
    elif FEATURE == "elu":
        return tl.where(m_x, tl.where(b_x > 0, b_x + 1.0, tl.exp(tl.minimum(b_x, 0.0))), 0.0)
    elif FEATURE == "silu":
        return b_x * tl.sigmoid(b_x)
    elif FEATURE == "softmax":
        b_x = tl.where(m_x, b_x, -float("inf"))
        b_powers = tl.exp(b_x - tl.max(b_x, 0))
        return b_powers / tl.sum(b_powers, 0)
    elif FEATURE == "unit_length":
        return b_x * inverse_length(b_x, EPS)
    else:
        return b_x


@triton.jit
def rotated_feature(b_x, b_other, o_k, m_k, cos, sin, K: tl.constexpr, FEATURE: tl.constexpr):
    """The feature map of a query or key [K], then its rotation with the other half's features, if there are angles."""
    b_x = feature(b_x, m_k, FEATURE)
    if cos is not None:
        b_other = feature(b_other, m_k, FEATURE)
        b_sin = tl.load(sin + o_k % (K // 2), mask=m_k, other=0.0).to(tl.float32)  # [BK]
        b_turned = tl.where(o_k < K // 2, -b_other, b_other) * b_sin
        b_x = b_x * tl.load(cos + o_k % (K // 2), mask=m_k, other=0.0) + b_turned  # [BK]
    return b_x


@triton.jit
def mixer_step_kernel(
    projected, sums, state, out, read_out, cos, sin, decays, decay_weight, decay_bias, skip,
    stride, angle_stride, decay_stride, temperature, gate_scale, normalizer, scale,
    Q: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SWISH: tl.constexpr, BETAS: tl.constexpr,
    READS: tl.constexpr, WRITES: tl.constexpr,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    DECAY: tl.constexpr, FEATURE: tl.constexpr, KIND: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BV value channels of one head of one sequence: gates, feature maps, rotation and decay, then `advance` (step.py).

    In: projected [rows, ...], a row per sequence; Q, KEYS, ... say where each part of it starts, SWISH where a gate that comes before the
    norm does, or -1; `sums` [rows, 2, H, PARTS] the head gates' scores, if they are not in it. Out: out [rows, H V], state [rows, H, K, V]
    in place, read_out [rows, H] a read gate that comes after the norm.
    """
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_k, o_v = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    m_k, key_head = o_k < K, head // (H // KEY_HEADS)
    p_s = state + ((sequence * H + head) * K + o_k[:, None]) * V + o_v[None, :]
    m_s = m_k[:, None] & (o_v[None, :] < V)
    o_q, o_other = key_head * K + o_k, key_head * K + (o_k + K // 2) % K
    # what no kernel of this step writes is loaded first, since it takes longest, and not used yet
    b_s = tl.load(p_s, mask=m_s, other=0.0)  # [BK, BV]
    if DECAY == "channel":
        o_r = tl.arange(0, BR)
        b_bias = tl.load(decay_bias + o_q, mask=m_k, other=0.0)  # [BK]
        m_w = (o_r[:, None] < RANK) & m_k[None, :]
        b_w = tl.load(decay_weight + o_q[None, :] * RANK + o_r[:, None], mask=m_w, other=0.0)  # [BR, BK]
    elif DECAY == "channel delta":
        b_bias, b_w = tl.load(decay_bias + o_q, mask=m_k, other=0.0), tl.load(decay_weight + head)  # [BK], a number
    elif DECAY == "delta" or DECAY == "step":
        b_bias, b_w = tl.load(decay_bias + head), tl.load(decay_weight + head)
    wait_for_previous(EARLY)
    p_row = projected + sequence * stride
    b_v = tl.load(p_row + VALUES + head * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)  # [BV]
    b_q = tl.load(p_row + Q + o_q, mask=m_k, other=0.0).to(tl.float32)  # [BK]
    b_k = tl.load(p_row + KEYS + o_q, mask=m_k, other=0.0).to(tl.float32)  # [BK]
    b_q_other, b_k_other = b_q, b_k
    if cos is not None:
        cos += sequence * angle_stride
        sin += sequence * angle_stride
        b_q_other = tl.load(p_row + Q + o_other, mask=m_k, other=0.0).to(tl.float32)  # [BK]
        b_k_other = tl.load(p_row + KEYS + o_other, mask=m_k, other=0.0).to(tl.float32)  # [BK]
    read, write = 1.0, 1.0
    if READ != "none" or WRITE:
        p_reads, p_writes = p_row + READS, p_row + WRITES
        if sums is not None:
            p_reads, p_writes = sums + sequence * (2 * H * PARTS), sums + (sequence * 2 + 1) * (H * PARTS)
        head_read, head_write = load_gates_of_head(p_reads, p_writes, head, temperature, gate_scale, H, KIND, PARTS, BH, BP)
        if READ != "none":
            read = head_read
        if WRITE:
            write = head_write
    if READ == "after_norm":
        tl.store(read_out + sequence * H + head, read, mask=tl.program_id(0) == 0)
        read = 1.0
    b_q = rotated_feature(b_q, b_q_other, o_k, m_k, cos, sin, K, FEATURE)
    b_k = rotated_feature(b_k, b_k_other, o_k, m_k, cos, sin, K, FEATURE)
    decay, beta = 1.0, 1.0
    if DECAY == "retnet":
        decay = 1.0 - tl.exp2(-5.0 - head)
    elif DECAY == "channel":
        b_low = tl.load(decays + sequence * decay_stride + o_r, mask=o_r < RANK, other=0.0).to(tl.float32)  # [BR]
        b_x = b_bias.to(tl.float32) + tl.sum(b_low[:, None] * b_w.to(tl.float32), 0)
        log_sigmoid = tl.minimum(b_x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(b_x)))
        decay = tl.exp(log_sigmoid / normalizer)
    elif DECAY == "delta" or DECAY == "channel delta" or DECAY == "step":
        if DECAY == "channel delta":
            b_x = tl.load(decays + sequence * decay_stride + o_q, mask=m_k, other=0.0)  # [BK]
        else:
            b_x = tl.load(decays + sequence * decay_stride + head)
        b_x = b_x.to(tl.float32) + b_bias.to(tl.float32)
        softplus = tl.maximum(b_x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_x)))
        decay = tl.exp(-tl.exp(b_w.to(tl.float32)) * softplus)
        if DECAY == "step":
            write *= softplus
        else:
            beta = tl.sigmoid(tl.load(p_row + BETAS + head).to(tl.float32))
    b_s, b_o = advance(b_s.to(tl.float32), b_q, b_k, b_v, decay, beta, read * scale, write, DECAY)
    if skip is not None:
        b_o += tl.load(skip + head).to(tl.float32) * b_v
    if SWISH >= 0:
        b_g = tl.load(p_row + SWISH + head * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)  # [BV]
        b_o *= b_g * tl.sigmoid(b_g)
    tl.store(p_s, b_s.to(state.dtype.element_ty), mask=m_s)
    tl.store(out + (sequence * H + head) * V + o_v, b_o, mask=o_v < V)


class Decay(NamedTuple):
    """What a decay is made from."""

    x: Tensor | None
    """[rows, ...], of the token."""
    weight: Tensor | None
    bias: Tensor | None


def mixer_step(
    projected: Tensor,
    sums: Tensor | None,
    state: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    decay: Decay,
    skip: Tensor | None,
    numbers: tuple[float, float, float, float],
    constants: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """What every head reads [rows, H * V] in float32, and the read gates [rows, H] where they come after the norm.

    Args:
        projected: [rows, ...], the parts of a row where the constants say.
        sums: [rows, 2, H, parts], the gates' scores, if `projected` does not hold them.
        state: [rows, H, K, V], moved on in place.
        angles: cosine and sine of each row's position, [rows or 1, 1, 1, K / 2].
        skip: [H], what a head reads of its value directly.
        numbers: temperature and scale of the gates, what divides log-decays, and the scale of queries.
    """
    rows, heads, key, value = state.shape
    width, warps = value_tile(rows * heads, value, state.device)
    blocks, parts = cdiv(value, width), 1 if sums is None else sums.shape[3]
    out = projected.new_empty(rows, heads * value, dtype=torch.float32)
    read = out.new_empty(rows, heads) if constants["READ"] == "after_norm" else None
    angle_stride = 0 if angles is None or len(angles[0]) == 1 else key // 2  # all rows may share their position
    strides = projected.stride(0), angle_stride, 0 if decay.x is None else decay.x.stride(0)
    sizes = {"H": heads, "K": key, "V": value, "PARTS": parts, "BK": max(16, power_of_2(key)), "BV": width,
             "BH": power_of_2(heads), "BR": power_of_2(constants["RANK"]), "BP": power_of_2(parts), "num_warps": warps}  # fmt: skip
    launch(
        mixer_step_kernel, (blocks, heads, rows),
        (projected, sums, state, out, read, *(angles or (None, None)), *decay, skip, *strides, *numbers),
        constants | sizes | early(state.device),
    )  # fmt: skip
    return out, read


@triton.jit
def gated_norm_kernel(
    o, low, weight, norm, read, out, low_stride, eps,
    H: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, GROUP: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BV channels of one head of one row: norm(o) sigmoid(weight low), times a read gate. GROUP channels are normalised together.

    In: o [rows, H V], low [rows, RANK], weight [H V, RANK], norm [GROUP], read [rows, H] or None. Out: out [rows, H V].
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_v, o_r, o_g = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, BR), tl.arange(0, BG)
    m_v, o_x = o_v < V, head * V + o_v
    m_w = m_v[:, None] & (o_r[None, :] < RANK)
    b_w = tl.load(weight + o_x[:, None] * RANK + o_r[None, :], mask=m_w, other=0.0)  # [BV, BR]
    wait_for_previous(EARLY)
    b_low = tl.load(low + row * low_stride + o_r, mask=o_r < RANK, other=0.0)  # [BR]
    b_x = tl.load(o + row * (H * V) + o_x, mask=m_v, other=0.0)  # [BV]
    b_x *= tl.sigmoid(tl.sum(b_w.to(tl.float32) * b_low.to(tl.float32)[None, :], 1))
    if norm is not None:
        first = head * V // GROUP * GROUP
        b_group = tl.load(o + row * (H * V) + first + o_g, mask=o_g < GROUP, other=0.0)  # [BG]
        b_x *= inverse_rms(b_group, eps, GROUP, 0) * tl.load(norm + o_x - first, mask=m_v, other=0.0).to(tl.float32)
    if read is not None:
        b_x *= tl.load(read + row * H + head)
    tl.store(out + row * (H * V) + o_x, b_x.to(out.dtype.element_ty), mask=m_v)


def gated_norm(
    o: Tensor, low: Tensor, weight: Tensor, heads: int, read: Tensor | None, norm: Tensor | None = None, eps: float = 0.0, groups: int = 1
) -> Tensor:
    """What heads read, o [rows, H * V] in float32, normalised in `groups` parts, times sigmoid(low @ weight.T) and read gates [rows, H];
    [rows, H * V] in the dtype of weight."""
    (rows, width), rank = o.shape, weight.shape[1]
    out, value, ranks = o.new_empty(rows, width, dtype=weight.dtype), width // heads, power_of_2(rank)
    block = max(1, min(power_of_2(value), GATED // ranks))
    sizes = {"H": heads, "V": value, "RANK": rank, "GROUP": width // groups, "BV": block, "BR": ranks, "BG": power_of_2(width // groups)}
    launch(
        gated_norm_kernel, (cdiv(value, block), heads, rows), (o, low, weight, norm, read, out, low.stride(0), eps),
        sizes | {"num_warps": 4} | early(o.device),
    )  # fmt: skip
    return out
