"""Products of decoding: a few rows times several matrices, with norm and gates on the way in; residual, convolution and scores on the way
out.

For a single row a program multiplies and adds; for more it uses the matrix units: up to FEW rows as a single row does, with the weights
loaded before the input is there, beyond that on an input that a kernel of its own has normalised. Weights are read where the modules
have them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.launch import early, launch, wait_for_previous
from headmax.ops.kernels.tiles import cdiv, power_of_2, processors

TILE = 16_384
"""Entries of the matrices that a program for a single row holds at once."""
FEW, WIDEST = 16, 4096
"""Rows, and bytes of each, for which a program holds all weights of its outputs."""
MOST_MATRICES = 8
SHARED = 96 * 1024
"""Bytes of shared memory that a program's tiles may take."""


@dataclass(frozen=True)
class LinearInput:
    """What is multiplied: x [rows, width], normalised, times silu(swish), times a gate per head."""

    x: Tensor
    norm: Tensor | None = None
    """Weight of an RMS norm over `groups` equal parts, which share it: [width / groups]."""
    eps: float = 1e-6
    groups: int = 1
    swish: Tensor | None = None
    """[rows, width], rows of any stride."""
    read: Tensor | None = None
    """[rows, heads], a factor for each head's part of x."""


@dataclass(frozen=True)
class Convolution:
    """Short causal convolutions and their silu over the first products."""

    taps: Sequence[Tensor]
    """[channels, width] for each of queries, keys and values."""
    biases: Sequence[Tensor | None]
    """[channels], if they have them."""
    past: Tensor
    """[rows, width - 1, channels of all] the last inputs, moved on in place."""


@dataclass(frozen=True)
class Scores:
    """Scores of the head gates from queries and keys, the first two products: sums over parts of a head, which their reader adds up."""

    read: Tensor | None
    """[value heads, channels of a head]"""
    write: Tensor | None
    key_heads: int
    sums: Tensor
    """[rows, 2, value heads, parts]: of queries, then of keys."""


def score_part(head: int) -> int:
    """How many channels of a head are summed up where they are made: a power of two that divides its width."""
    return min(16, head & -head)


@triton.jit
def pick(block, weights, OUTPUTS: tl.constexpr, BN: tl.constexpr):
    """Of a block of BN outputs: its matrix, that one's outputs, the block's number in it, and how many outputs come before the matrix."""
    weight, outputs, number, before = weights[0], block * 0 + OUTPUTS[0], block, block * 0
    FIRST: tl.constexpr = (OUTPUTS[0] + BN - 1) // BN
    BEFORE: tl.constexpr = OUTPUTS[0]
    for i in tl.static_range(1, len(OUTPUTS)):
        if block >= FIRST:
            weight, outputs, number, before = weights[i], block * 0 + OUTPUTS[i], block - FIRST, block * 0 + BEFORE
        FIRST += (OUTPUTS[i] + BN - 1) // BN
        BEFORE += OUTPUTS[i]
    return weight, outputs, number, before


@triton.jit
def factors(x, norm, swish, column, inside, channel, in_norm):
    """x as it is, and x times everything but the norm's own factor and the read gate; `channel` counts within a group of the norm."""
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    product = value
    if norm is not None:
        product *= tl.load(norm + channel, mask=in_norm, other=0.0).to(tl.float32)
    if swish is not None:
        gate = tl.load(swish + column, mask=inside, other=0.0).to(tl.float32)
        product *= gate * tl.sigmoid(gate)
    return value, product


@triton.jit
def convolve(y, taps, bias, past, n, channel, there, rows, inside, C: tl.constexpr, W: tl.constexpr):
    """silu(bias + Σ_i taps_i input_i) with y [rows, outputs] as the last input; the past moves on by one."""
    slots = past + rows[:, None].to(tl.int64) * ((W - 1) * C) + channel[None, :]
    total = y * tl.load(taps + n * W + W - 1, mask=there, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        total += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(W - 1):
        earlier = tl.load(slots + i * C, mask=inside, other=0.0)
        total += earlier.to(tl.float32) * tl.load(taps + n * W + i, mask=there, other=0.0).to(tl.float32)[None, :]
        tl.debug_barrier()  # every thread has read a slot before one writes it
        if i > 0:
            tl.store(slots + (i - 1) * C, earlier, mask=inside)
    tl.store(slots + (W - 2) * C, y.to(past.dtype.element_ty), mask=inside)
    return total * tl.sigmoid(total)


@triton.jit
def store_scores(
    y, weight, sums, n, first, outputs, rows, M, BN: tl.constexpr, BM: tl.constexpr, TIMES: tl.constexpr, HEAD: tl.constexpr,
    PART: tl.constexpr, KEY_HEADS: tl.constexpr,
):  # fmt: skip
    """Sums of the scores' terms over every PART of y [BM, BN], which are channels `first` and on of all key heads."""
    PARTS: tl.constexpr = HEAD // PART
    start = first + PART * tl.arange(0, BN // PART)
    for i in tl.static_range(TIMES):
        score = tl.load(weight + (n // HEAD * TIMES + i) * HEAD + n % HEAD, mask=n < outputs, other=0.0).to(tl.float32)
        at = (start // HEAD * TIMES + i) * PARTS + start % HEAD // PART
        terms = tl.sum(tl.reshape(y * score[None, :], [BM, BN // PART, PART]), 2)
        where = sums + rows[:, None] * (2 * KEY_HEADS * TIMES * PARTS) + at[None, :]
        tl.store(where, terms, mask=(rows < M)[:, None] & (start < outputs)[None, :])


@triton.jit
def finish(
    y, residual, taps, biases, past, score, sums, out, number, before, outputs, rows, M, N,
    OUTPUTS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, TIMES: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr,
    KEY_HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What becomes of products y [BM, BN]: residual, convolution, scores. Stores them in out [M, N]."""
    n = number * BN + tl.arange(0, BN)
    inside = (rows < M)[:, None] & (n < outputs)[None, :]
    at = rows[:, None].to(tl.int64) * N + (before + n)[None, :]
    if residual is not None:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if C > 0:
        own, bias = taps[0], biases[0]
        if before >= OUTPUTS[0]:
            own = taps[1]
            if biases[1] is not None:
                bias = biases[1]
        if before >= OUTPUTS[0] + OUTPUTS[1]:
            own = taps[2]
            if biases[2] is not None:
                bias = biases[2]
        there = (n < outputs) & (before + n < C)
        convolved = convolve(y, own, bias, past, n, before + n, there, rows, inside & there[None, :], C, W)
        y = tl.where((before + n < C)[None, :], convolved, y)
    if score[0] is not None:
        if before < OUTPUTS[0]:
            store_scores(y, score[0], sums, n, number * BN, outputs, rows, M, BN, BM, TIMES, HEAD, PART, KEY_HEADS)
    if score[1] is not None:
        if (before >= OUTPUTS[0]) & (before < OUTPUTS[0] + OUTPUTS[1]):
            keys = sums + KEY_HEADS * TIMES * (HEAD // PART)
            store_scores(y, score[1], keys, n, number * BN, outputs, rows, M, BN, BM, TIMES, HEAD, PART, KEY_HEADS)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_kernel(
    x, norm, swish, read, w0, w1, w2, w3, w4, w5, w6, w7, residual, t0, t1, t2, b0, b1, b2, past, read_weight, write_weight, sums, out,
    N, eps,
    OUTPUTS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    TIMES: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, KEY_HEADS: tl.constexpr,
    PAIR: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN outputs of a single row from BN rows of a matrix [outputs, K] seen as [outputs, GROUPS, K / GROUPS]."""
    if PAIR:
        weight, outputs, number, before = w0, OUTPUTS[0], tl.program_id(0), tl.program_id(0) * 0
    else:
        weight, outputs, number, before = pick(tl.program_id(0), (w0, w1, w2, w3, w4, w5, w6, w7), OUTPUTS, BN)
    n = number * BN + tl.arange(0, BN)
    group, channel = tl.arange(0, BG)[:, None], tl.arange(0, BC)[None, :]
    SIZE: tl.constexpr = K // GROUPS
    column, inside = group * SIZE + channel, (group < GROUPS) & (channel < SIZE)
    at = n.to(tl.int64)[:, None, None] * K + column[None, :, :]
    whole = (n < outputs)[:, None, None] & inside[None, :, :]
    first = tl.load(weight + at, mask=whole, other=0.0)  # first of all loads: it takes longest
    if PAIR:
        second = tl.load(w1 + at, mask=whole, other=0.0)
    wait_for_previous(EARLY)
    value, product = factors(x, norm, swish, column, inside, channel, channel < SIZE)
    if read is not None:
        product *= tl.load(read + column // (K // HEADS), mask=inside, other=0.0)
    if norm is not None:
        product *= tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
    y = tl.sum(tl.sum(first.to(tl.float32) * product[None, :, :], 2), 1)
    if PAIR:
        y = y * tl.sigmoid(y) * tl.sum(tl.sum(second.to(tl.float32) * product[None, :, :], 2), 1)
    finish(
        y[None, :], residual, (t0, t1, t2), (b0, b1, b2), past, (read_weight, write_weight), sums, out, number, before, outputs,
        tl.arange(0, 1), 1, N, OUTPUTS, C, W, TIMES, HEAD, PART, KEY_HEADS, 1, BN,
    )  # fmt: skip


@triton.jit
def few_rows_kernel(
    x, norm, swish, read, w0, w1, w2, w3, w4, w5, w6, w7, residual, t0, t1, t2, b0, b1, b2, past, read_weight, write_weight, sums, out,
    N, eps, x_stride, swish_stride, M,
    OUTPUTS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    TIMES: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, KEY_HEADS: tl.constexpr,
    PAIR: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN outputs of up to BM rows. Each warp multiplies its own of SPLIT parts of the channels: a norm's groups if it has several."""
    if PAIR:
        weight, outputs, number, before = w0, OUTPUTS[0], tl.program_id(0), tl.program_id(0) * 0
    else:
        weight, outputs, number, before = pick(tl.program_id(0), (w0, w1, w2, w3, w4, w5, w6, w7), OUTPUTS, BN)
    n, rows = number * BN + tl.arange(0, BN), tl.arange(0, BM)
    part, channel = tl.arange(0, BG)[:, None, None], tl.arange(0, BC)[None, None, :]
    SIZE: tl.constexpr = K // SPLIT
    column, inside = part * SIZE + channel, (part < SPLIT) & (channel < SIZE)
    at, whole = n.to(tl.int64)[None, :, None] * K + column, (n < outputs)[None, :, None] & inside
    t_w = tl.load(weight + at, mask=whole, other=0.0)  # [BG, BN, BC], first of all loads: it takes longest
    if PAIR:
        t_w2 = tl.load(w1 + at, mask=whole, other=0.0)
    wait_for_previous(EARLY)
    row, there = rows.to(tl.int64)[None, :, None], (rows < M)[None, :, None] & inside
    of_norm, gates = column, swish
    if GROUPS > 1:
        of_norm = channel
    if swish is not None:
        gates += row * swish_stride
    value, product = factors(x + row * x_stride, norm, gates, column, there, of_norm, inside)  # [BG, BM, BC]
    if read is not None:
        product *= tl.load(read + row * HEADS + column // (K // HEADS), mask=there, other=0.0)
    scale = tl.full([BM, 1], 1.0, tl.float32)
    if norm is not None:
        squares = tl.sum(value * value, 2)  # [BG, BM]
        if GROUPS > 1:
            product *= tl.rsqrt(squares / SIZE + eps)[:, :, None]
        else:
            scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)[:, None]
    product = product.to(t_w.dtype)
    y = scale * tl.sum(tl.dot(product, tl.permute(t_w, (0, 2, 1)), input_precision="ieee"), 0)
    if PAIR:
        y = y * tl.sigmoid(y) * (scale * tl.sum(tl.dot(product, tl.permute(t_w2, (0, 2, 1)), input_precision="ieee"), 0))
    finish(
        y, residual, (t0, t1, t2), (b0, b1, b2), past, (read_weight, write_weight), sums, out, number, before, outputs, rows, M, N,
        OUTPUTS, C, W, TIMES, HEAD, PART, KEY_HEADS, BM, BN,
    )  # fmt: skip


@triton.jit
def normalize_kernel(
    x, norm, swish, read, out, x_stride, swish_stride, eps, K: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One group of a norm in one row: what `row_kernel` makes of its input, stored in out [rows, K]."""
    row, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    SIZE: tl.constexpr = K // GROUPS
    channel = tl.arange(0, BC)
    inside, column = channel < SIZE, group * SIZE + channel
    wait_for_previous(EARLY)
    gates = swish
    if swish is not None:
        gates += row * swish_stride
    value, product = factors(x + row * x_stride, norm, gates, column, inside, channel, inside)
    if read is not None:
        product *= tl.load(read + row * HEADS + column // (K // HEADS), mask=inside, other=0.0)
    if norm is not None:
        product *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    tl.store(out + row * K + column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def prefetch(weight, n, outputs, K: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr):
    """Asks for rows n of a matrix [outputs, K], of which LINE entries are a line of the L2 cache, without waiting for them."""
    line = tl.arange(0, LINES)[None, :] * LINE
    inside = (n < outputs)[:, None] & (line < K)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [weight + n.to(tl.int64)[:, None] * K + line, inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def rows_kernel(
    x, w0, w1, w2, w3, w4, w5, w6, w7, residual, t0, t1, t2, b0, b1, b2, past, read_weight, write_weight, sums, out, N, x_stride, M,
    OUTPUTS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    TIMES: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, KEY_HEADS: tl.constexpr,
    PAIR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN outputs of BM rows of x [M, K]."""
    if PAIR:
        weight, outputs, number, before = w0, OUTPUTS[0], tl.program_id(0), tl.program_id(0) * 0
    else:
        weight, outputs, number, before = pick(tl.program_id(0), (w0, w1, w2, w3, w4, w5, w6, w7), OUTPUTS, BN)
    n, rows = number * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM)
    if EARLY:
        prefetch(weight, n, outputs, K, LINE, LINES)
        if PAIR:
            prefetch(w1, n, outputs, K, LINE, LINES)
    wait_for_previous(EARLY)
    y, y_2 = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        channel = start + tl.arange(0, BK)
        at, inside = n.to(tl.int64)[:, None] * K + channel[None, :], (n < outputs)[:, None] & (channel < K)[None, :]
        p_x = x + rows.to(tl.int64)[:, None] * x_stride + channel[None, :]
        t_x = tl.load(p_x, mask=(rows < M)[:, None] & (channel < K)[None, :], other=0.0)  # [BM, BK]
        t_w = tl.load(weight + at, mask=inside, other=0.0)  # [BN, BK]
        y = tl.dot(t_x, tl.trans(t_w), y, input_precision=PRECISION)
        if PAIR:
            t_w2 = tl.load(w1 + at, mask=inside, other=0.0)  # [BN, BK]
            y_2 = tl.dot(t_x, tl.trans(t_w2), y_2, input_precision=PRECISION)
    if PAIR:
        y = y * tl.sigmoid(y) * y_2
    finish(
        y, residual, (t0, t1, t2), (b0, b1, b2), past, (read_weight, write_weight), sums, out, number, before, outputs, rows, M, N,
        OUTPUTS, C, W, TIMES, HEAD, PART, KEY_HEADS, BM, BN,
    )  # fmt: skip


def row_tile(outputs: int, width: int, groups: int, pair: bool, part: int, device: torch.device) -> dict[str, int]:
    """A program or more for every processor, whose weights are all under way at once."""
    sizes = {"BG": power_of_2(groups), "BC": power_of_2(width // groups)}
    whole, share = sizes["BG"] * sizes["BC"], max(1, outputs // processors(device))
    block = max(part, 1, min(1 << round(math.log2(share)), TILE // (2 if pair else 1) // whole))
    return sizes | {"BN": block, "num_warps": 4 if block * whole <= TILE // 2 else 8}


def few_rows_tile(width: int, groups: int, part: int, bytes_: int, pair: bool) -> dict[str, int] | None:
    """A tile in which a warp has a part of the channels; None if they are too many to be held."""
    split = groups if groups > 1 else math.gcd(width, 4)
    tile = {"SPLIT": split, "BG": power_of_2(split), "BC": max(16, power_of_2(width // split))}
    if tile["BG"] * tile["BC"] * bytes_ > WIDEST:
        return None
    warps = 8 if pair or groups > 1 else 4  # as few as registers allow, so that the next kernel's programs find room
    return tile | {"BM": FEW, "BN": max(16, part), "num_warps": warps}


def rows_tile(rows: int, outputs: int, width: int, part: int, bytes_: int, pair: bool, device: torch.device) -> dict[str, int]:
    """Tiles for the matrix units: few rows of small tiles that are deep, so that all processors read at once."""
    height = min(64, max(16, power_of_2(rows)))
    columns = max(part, 16 if rows <= 16 else 32 if rows <= 64 else 64)
    depth = min(max(16, power_of_2(width)), 256 if height == 16 else 128)
    tile = (height + columns * (1 + pair)) * bytes_
    while depth > 16 and 2 * depth * tile > SHARED:
        depth //= 2
    return {"BM": height, "BN": columns, "BK": depth, "num_warps": 4, "num_stages": max(1, min(4, SHARED // (depth * tile)))}


def normalized(source: LinearInput, dtype: torch.dtype) -> Tensor:
    """What is multiplied, [rows, width] in `dtype`."""
    (rows, width), device = source.x.shape, source.x.device
    out = source.x.new_empty(rows, width, dtype=dtype)
    strides = (source.x.stride(0), 0 if source.swish is None else source.swish.stride(0))
    heads = 1 if source.read is None else source.read.shape[1]
    shape = {"K": width, "GROUPS": source.groups, "HEADS": heads, "BC": power_of_2(width // source.groups)}
    launch(
        normalize_kernel, (rows * source.groups,), (source.x, source.norm, source.swish, source.read, out, *strides, source.eps),
        shape | {"num_warps": 4} | early(device),
    )  # fmt: skip
    return out


def linear(
    source: LinearInput,
    weights: Sequence[Tensor],
    *,
    residual: Tensor | None = None,
    convolution: Convolution | None = None,
    scores: Scores | None = None,
    pair: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """source @ weight.T for each of up to MOST_MATRICES weights [outputs, width], side by side: [rows, all outputs] in `dtype` (the
    weights' unless given), plus `residual`, or convolved and scored. A `pair` of weights gives silu(first) * second.
    """
    x, (rows, width), device = source.x, source.x.shape, weights[0].device
    outputs = tuple(len(weight) for weight in weights[: 1 if pair else None])
    out = x.new_empty(rows, sum(outputs), dtype=weights[0].dtype if dtype is None else dtype)
    constants: dict[str, Any] = {"OUTPUTS": outputs, "K": width}
    taps: Sequence[Tensor | None] = (None, None, None)
    biases: Sequence[Tensor | None] = taps
    past, shape = None, {"C": 0, "W": 0}
    if convolution is not None:
        taps, biases, past = convolution.taps, convolution.biases, convolution.past
        shape = {"C": past.shape[2], "W": past.shape[1] + 1}
    scorers: tuple[Tensor | None, Tensor | None] = (None, None)
    sums, part = None, 1
    shape |= {"TIMES": 1, "HEAD": 1, "PART": 1, "KEY_HEADS": 1}
    if scores is not None:
        scorers, sums = (scores.read, scores.write), scores.sums
        part = score_part(outputs[0] // scores.key_heads)
        head = {"TIMES": sums.shape[2] // scores.key_heads, "HEAD": outputs[0] // scores.key_heads}
        shape |= head | {"PART": part, "KEY_HEADS": scores.key_heads}
    matrices = (*weights, *[None] * (MOST_MATRICES - len(weights)))
    after = (residual, *taps, *biases, past, *scorers, sums, out, sum(outputs))
    size, groups = weights[0].element_size(), 1 if source.norm is None else source.groups
    before = (x, source.norm, source.swish, source.read, *matrices, *after, source.eps)
    held = constants | {"GROUPS": groups, "HEADS": 1 if source.read is None else source.read.shape[1]} | shape | {"PAIR": pair}
    if rows == 1:
        tile = row_tile(sum(outputs), width, groups, pair, part, device)
        launch(row_kernel, (sum(cdiv(n, tile["BN"]) for n in outputs),), before, held | tile | early(device))
        return out
    if rows <= FEW and (few := few_rows_tile(width, groups, part, size, pair)) is not None:
        strides = (x.stride(0), 0 if source.swish is None else source.swish.stride(0))
        launch(few_rows_kernel, (sum(cdiv(n, few["BN"]) for n in outputs),), (*before, *strides, rows), held | few | early(device))
        return out
    if any(factor is not None for factor in (source.norm, source.swish, source.read)) or x.dtype != weights[0].dtype:
        x = normalized(source, weights[0].dtype)
    tile = rows_tile(rows, sum(outputs), width, part, size, pair, device)
    line = 128 // size
    how = shape | {"PAIR": pair, "LINE": line, "LINES": power_of_2(cdiv(width, line)), "PRECISION": "ieee"}
    grid = (sum(cdiv(n, tile["BN"]) for n in outputs), cdiv(rows, tile["BM"]))
    launch(rows_kernel, grid, (x, *matrices, *after, x.stride(0), rows), constants | how | tile | early(device))
    return out
