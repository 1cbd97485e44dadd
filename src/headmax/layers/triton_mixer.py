"""One decoding step of a recurrent mixer in one kernel: from a token's projections to what its heads read, the state moved on in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.layers.rotary import Rotary
from headmax.layers.triton_launch import after_the_last, early
from headmax.ops.gated_delta_rule.triton_step import add_both, gated_delta_rule_step
from headmax.ops.gla.triton_step import gla_step
from headmax.ops.linear_attention.triton_step import linear_attention_step
from headmax.ops.triton_tiles import processors


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
        return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)
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
    projected, sums, state, out, read_out, cos, sin, decay_weight, decay_bias,
    stride, temperature, gate_scale, normalizer, scale,
    Q: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DECAYS: tl.constexpr, BETAS: tl.constexpr,
    READS: tl.constexpr, WRITES: tl.constexpr,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    DECAY: tl.constexpr, FEATURE: tl.constexpr, KIND: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BV value channels of one head of one sequence. `projected` has a row per sequence; Q, KEYS, ... say where each part of it starts."""
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, column = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    inside, key_head = channel < K, head // (H // KEY_HEADS)
    tile = state + ((sequence * H + head) * K + channel[:, None]) * V + column[None, :]
    there = inside[:, None] & (column[None, :] < V)
    at, other = key_head * K + channel, key_head * K + (channel + K // 2) % K
    # what no kernel of this step writes is asked for first, since it comes from farthest, and not touched yet
    memory = tl.load(tile, mask=there, other=0.0)
    if DECAY == "channel":
        ranks = tl.arange(0, BR)
        bias = tl.load(decay_bias + at, mask=inside, other=0.0)
        rise = tl.load(
            decay_weight + ranks[:, None] * KEY_HEADS * K + at[None, :], mask=(ranks[:, None] < RANK) & inside[None, :], other=0.0
        )
    elif DECAY != "none":
        bias = tl.load(decay_bias + head)
        if DECAY == "delta":
            rise = tl.load(decay_weight + head)
    after_the_last(EARLY)
    row = projected + sequence * stride
    v = tl.load(row + VALUES + head * V + column, mask=column < V, other=0.0).to(tl.float32)
    q = tl.load(row + Q + at, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(row + KEYS + at, mask=inside, other=0.0).to(tl.float32)
    q_other, k_other = q, k
    if cos is not None:
        cos += sequence * (K // 2)
        sin += sequence * (K // 2)
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
    read *= scale
    memory = memory.to(tl.float32)

    if DECAY == "none":
        memory, o = linear_attention_step(memory, q, k, v, 1.0, read, write)
    elif DECAY == "head":
        memory, o = linear_attention_step(memory, q, k, v, tl.exp(bias.to(tl.float32)), read, write)
    elif DECAY == "channel":
        low = tl.load(row + DECAYS + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
        x = bias.to(tl.float32) + tl.sum(low[:, None] * rise.to(tl.float32), 0)
        log_sigmoid = tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))
        memory, o = gla_step(memory, q, k, v, tl.exp(log_sigmoid / normalizer), read, write)
    else:
        x = tl.load(row + DECAYS + head).to(tl.float32) + bias.to(tl.float32)
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        beta = tl.sigmoid(tl.load(row + BETAS + head).to(tl.float32))
        memory, o = gated_delta_rule_step(memory, q, k, v, tl.exp(-tl.exp(rise.to(tl.float32)) * softplus), beta, read, write)
    tl.store(tile, memory.to(state.dtype.element_ty), mask=there)
    tl.store(out + (sequence * H + head) * V + column, o, mask=column < V)


def tiles(states: int, value: int, device: torch.device) -> tuple[int, int]:
    """Value channels of a program, and its warps: as many channels as leave every processor two programs."""
    width = min(64, max(16, triton.next_power_of_2(value)))
    while width > 16 and states * triton.cdiv(value, width) < 2 * processors(device):
        width //= 2
    return width, 1 if width == 16 else 4


def mixer_step(
    projected: Tensor,
    sums: Tensor | None,
    state: Tensor,
    key_heads: int,
    rotary: Rotary | None,
    starts: dict[str, int],
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """What every head reads [rows, H * V] in float32, and the read gates [rows, H] where they come after the norm.

    `projected` [rows, ...] holds the parts of a row where `starts` says, `sums` [rows, 2 H, parts] the gates' scores if that does not;
    `state` [rows, H, K, V] moves on in place.
    """
    rows, heads, key, value = state.shape
    out = projected.new_empty(rows, heads * value, dtype=torch.float32)
    read = out.new_empty(rows, heads) if arguments["READ"] == "after_norm" else None
    parts = 1 if sums is None else sums.shape[2]
    width, warps = tiles(rows * heads, value, state.device)
    mixer_step_kernel[(triton.cdiv(value, width), heads, rows)](
        projected,
        sums,
        state,
        out,
        read,
        cos=None if rotary is None else rotary.cos,
        sin=None if rotary is None else rotary.sin,
        stride=projected.stride(0),
        H=heads,
        KEY_HEADS=key_heads,
        K=key,
        V=value,
        BK=max(16, triton.next_power_of_2(key)),
        BV=width,
        BH=triton.next_power_of_2(heads),
        PARTS=parts,
        BP=triton.next_power_of_2(parts),
        BR=triton.next_power_of_2(arguments["RANK"]),
        num_warps=warps,
        **early(state.device, rows),
        **starts,
        **arguments,
    )
    return out, read
