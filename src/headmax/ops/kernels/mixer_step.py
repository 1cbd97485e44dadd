"""One decoding step of a recurrent mixer in one kernel: from a token's projections to what its heads read, the state moved on in place;
and, where a mixer has it, norm and gate of what was read in a second.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.launch import early, launch, wait_for_previous
from headmax.ops.kernels.step import add_both, advance, unit_length, value_tile
from headmax.ops.kernels.tiles import cdiv, power_of_2

GATED = 4096
"""Entries of a gate's matrix that a program holds."""


@triton.jit
def featured(x, channel, inside, cos, sin, partner, K: tl.constexpr, FEATURE: tl.constexpr):
    """The feature map of a query or key [K], then its rotation with the other half's features, if there are angles."""
    x = feature(x, inside, FEATURE)
    if cos is not None:
        other = feature(partner, inside, FEATURE)
        turn = tl.load(sin + channel % (K // 2), mask=inside, other=0.0).to(tl.float32)
        x = x * tl.load(cos + channel % (K // 2), mask=inside, other=0.0) + tl.where(channel < K // 2, -other, other) * turn
    return x


@triton.jit
def feature(x, inside, FEATURE: tl.constexpr):
    if FEATURE == "relu":
        return tl.maximum(x, 0.0)
    elif FEATURE == "elu":
        return tl.where(inside, tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0))), 0.0)
    elif FEATURE == "silu":
        return x * tl.sigmoid(x)
    elif FEATURE == "softmax":
        x = tl.where(inside, x, -float("inf"))
        powers = tl.exp(x - tl.max(x, 0))
        return powers / tl.sum(powers, 0)
    elif FEATURE == "unit_length":
        return unit_length(x)
    else:
        return x


@triton.jit
def larger_both(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def own_gates(
    reads, writes, head, temperature, scale, H: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr
):
    """This head's two gates from where all heads' scores are, in parts [H, PARTS]; both at once, since every sum makes the program wait."""
    if KIND == "uniform":
        return scale / H, scale / H
    else:
        heads, parts = tl.arange(0, BH), tl.arange(0, BP)
        at, there = heads[:, None] * PARTS + parts[None, :], (heads[:, None] < H) & (parts[None, :] < PARTS)
        reads, writes = tl.load(reads + at, mask=there, other=0.0), tl.load(writes + at, mask=there, other=0.0)
        reads, writes = tl.reduce((reads.to(tl.float32), writes.to(tl.float32)), 1, add_both)
        reads *= temperature
        writes *= temperature
        if KIND == "softmax":
            reads, writes = tl.where(heads < H, reads, -float("inf")), tl.where(heads < H, writes, -float("inf"))
            most_read, most_written = tl.reduce((reads, writes), 0, larger_both)
            reads, writes = tl.exp(reads - most_read), tl.exp(writes - most_written)
            own_read, own_write = tl.where(heads == head, reads, 0.0), tl.where(heads == head, writes, 0.0)
            read, write, all_read, all_written = tl.reduce((own_read, own_write, reads, writes), 0, add_four)
            return scale * read / all_read, scale * write / all_written
        else:
            read, write = tl.reduce((tl.where(heads == head, reads, 0.0), tl.where(heads == head, writes, 0.0)), 0, add_both)
            return 2 * scale / H * tl.sigmoid(read), 2 * scale / H * tl.sigmoid(write)


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
    """BV value channels of one head of one sequence. `projected` has a row per sequence; Q, KEYS, ... say where each part of it starts,
    SWISH where a gate that comes before the norm does, or -1.
    """
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, column = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    inside, key_head = channel < K, head // (H // KEY_HEADS)
    tile = state + ((sequence * H + head) * K + channel[:, None]) * V + column[None, :]
    there = inside[:, None] & (column[None, :] < V)
    at, other = key_head * K + channel, key_head * K + (channel + K // 2) % K
    # what no kernel of this step writes is loaded first, since it takes longest, and not used yet
    memory = tl.load(tile, mask=there, other=0.0)  # [BK, BV]
    if DECAY == "channel":
        ranks = tl.arange(0, BR)
        bias = tl.load(decay_bias + at, mask=inside, other=0.0)  # [BK]
        in_rank = (ranks[:, None] < RANK) & inside[None, :]
        rise = tl.load(decay_weight + at[None, :] * RANK + ranks[:, None], mask=in_rank, other=0.0)  # [BR, BK]
    elif DECAY == "channel delta":
        bias, rise = tl.load(decay_bias + at, mask=inside, other=0.0), tl.load(decay_weight + head)  # [BK], a number
    elif DECAY == "delta" or DECAY == "step":
        bias, rise = tl.load(decay_bias + head), tl.load(decay_weight + head)
    wait_for_previous(EARLY)
    row = projected + sequence * stride
    v = tl.load(row + VALUES + head * V + column, mask=column < V, other=0.0).to(tl.float32)
    q = tl.load(row + Q + at, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(row + KEYS + at, mask=inside, other=0.0).to(tl.float32)
    q_other, k_other = q, k
    if cos is not None:
        cos += sequence * angle_stride
        sin += sequence * angle_stride
        q_other = tl.load(row + Q + other, mask=inside, other=0.0).to(tl.float32)
        k_other = tl.load(row + KEYS + other, mask=inside, other=0.0).to(tl.float32)
    read, write = 1.0, 1.0
    if READ != "none" or WRITE:
        reads, writes = row + READS, row + WRITES
        if sums is not None:
            reads, writes = sums + sequence * (2 * H * PARTS), sums + (sequence * 2 + 1) * (H * PARTS)
        own_read, own_write = own_gates(reads, writes, head, temperature, gate_scale, H, KIND, PARTS, BH, BP)
        if READ != "none":
            read = own_read
        if WRITE:
            write = own_write
    if READ == "after_norm":
        tl.store(read_out + sequence * H + head, read, mask=tl.program_id(0) == 0)
        read = 1.0
    q = featured(q, channel, inside, cos, sin, q_other, K, FEATURE)
    k = featured(k, channel, inside, cos, sin, k_other, K, FEATURE)
    decay, beta = 1.0, 1.0
    if DECAY == "retnet":
        decay = 1.0 - tl.exp2(-5.0 - head)
    elif DECAY == "channel":
        low = tl.load(decays + sequence * decay_stride + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
        x = bias.to(tl.float32) + tl.sum(low[:, None] * rise.to(tl.float32), 0)
        log_sigmoid = tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))
        decay = tl.exp(log_sigmoid / normalizer)
    elif DECAY == "delta" or DECAY == "channel delta" or DECAY == "step":
        if DECAY == "channel delta":
            x = tl.load(decays + sequence * decay_stride + at, mask=inside, other=0.0)  # [BK]
        else:
            x = tl.load(decays + sequence * decay_stride + head)
        x = x.to(tl.float32) + bias.to(tl.float32)
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        decay = tl.exp(-tl.exp(rise.to(tl.float32)) * softplus)
        if DECAY == "step":
            write *= softplus
        else:
            beta = tl.sigmoid(tl.load(row + BETAS + head).to(tl.float32))
    memory, o = advance(memory.to(tl.float32), q, k, v, decay, beta, read * scale, write, DECAY)
    if skip is not None:
        o += tl.load(skip + head).to(tl.float32) * v
    if SWISH >= 0:
        gate = tl.load(row + SWISH + head * V + column, mask=column < V, other=0.0).to(tl.float32)
        o *= gate * tl.sigmoid(gate)
    tl.store(tile, memory.to(state.dtype.element_ty), mask=there)
    tl.store(out + (sequence * H + head) * V + column, o, mask=column < V)


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
    """BV channels of one head of one row: norm(o) sigmoid(weight low), times a read gate. GROUP channels are normalised together."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column, ranks, channel = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, BR), tl.arange(0, BG)
    there, at = column < V, head * V + column
    inside = there[:, None] & (ranks[None, :] < RANK)
    t_w = tl.load(weight + at[:, None] * RANK + ranks[None, :], mask=inside, other=0.0)  # [BV, BR]
    wait_for_previous(EARLY)
    t_l = tl.load(low + row * low_stride + ranks, mask=ranks < RANK, other=0.0)  # [BR]
    x = tl.load(o + row * (H * V) + at, mask=there, other=0.0)  # [BV]
    x *= tl.sigmoid(tl.sum(t_w.to(tl.float32) * t_l.to(tl.float32)[None, :], 1))
    if norm is not None:
        first = head * V // GROUP * GROUP
        group = tl.load(o + row * (H * V) + first + channel, mask=channel < GROUP, other=0.0)  # [BG]
        x *= tl.rsqrt(tl.sum(group * group, 0) / GROUP + eps) * tl.load(norm + at - first, mask=there, other=0.0).to(tl.float32)
    if read is not None:
        x *= tl.load(read + row * H + head)
    tl.store(out + row * (H * V) + at, x.to(out.dtype.element_ty), mask=there)


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
