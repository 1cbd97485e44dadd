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

from headmax.ops.kernels.conv import convolve_next
from headmax.ops.kernels.launch import early, launch, wait_for_previous
from headmax.ops.kernels.norm import inverse_rms
from headmax.ops.kernels.tiles import cdiv, power_of_2, processors

TILE = 16_384
"""Entries of the matrices that a program for a single row holds at once."""
FEW, WIDEST = 16, 4096
"""Rows, and bytes of each, for which a program holds all weights of its outputs. More bytes of an input that is no norm's groups, or a
quarter of them of float32 weights, which have no matrix units, put 3 to 6 KB of each thread on its stack (Triton 3.6)."""
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
def matrix_of_block(block, weights, OUTPUTS: tl.constexpr, BN: tl.constexpr):
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
def load_input(x, norm, swish, o_x, m_x, o_norm, m_norm):
    """x as it is, and x times everything but the norm's own factor and the read gate; `o_norm` counts within a group of the norm."""
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)  # all of the shape of o_x
    b_y = b_x
    if norm is not None:
        b_y *= tl.load(norm + o_norm, mask=m_norm, other=0.0).to(tl.float32)
    if swish is not None:
        b_g = tl.load(swish + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_y *= b_g * tl.sigmoid(b_g)
    return b_x, b_y


@triton.jit
def store_scores(
    b_y, weight, sums, o_n, first, outputs, o_m, M, BN: tl.constexpr, BM: tl.constexpr, TIMES: tl.constexpr, HEAD: tl.constexpr,
    PART: tl.constexpr, KEY_HEADS: tl.constexpr,
):  # fmt: skip
    """Sums of the scores' terms over every PART of y [BM, BN], which are channels `first` and on of all key heads."""
    PARTS: tl.constexpr = HEAD // PART
    o_p = first + PART * tl.arange(0, BN // PART)
    for i in tl.static_range(TIMES):
        b_w = tl.load(weight + (o_n // HEAD * TIMES + i) * HEAD + o_n % HEAD, mask=o_n < outputs, other=0.0).to(tl.float32)  # [BN]
        o_sum = (o_p // HEAD * TIMES + i) * PARTS + o_p % HEAD // PART
        b_sum = tl.sum(tl.reshape(b_y * b_w[None, :], [BM, BN // PART, PART]), 2)
        p_sum = sums + o_m[:, None] * (2 * KEY_HEADS * TIMES * PARTS) + o_sum[None, :]
        tl.store(p_sum, b_sum, mask=(o_m < M)[:, None] & (o_p < outputs)[None, :])


@triton.jit
def finish(
    b_y, residual, taps, biases, past, score, sums, out, number, before, outputs, o_m, M, N,
    OUTPUTS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, TIMES: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr,
    KEY_HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What becomes of products y [BM, BN]: residual, convolution, scores. Stores them in out [M, N]."""
    o_n = number * BN + tl.arange(0, BN)
    m_y = (o_m < M)[:, None] & (o_n < outputs)[None, :]
    o_y = o_m[:, None].to(tl.int64) * N + (before + o_n)[None, :]
    if residual is not None:
        b_y += tl.load(residual + o_y, mask=m_y, other=0.0).to(tl.float32)  # [BM, BN]
    if C > 0:
        matrix_taps, bias = taps[0], biases[0]
        if before >= OUTPUTS[0]:
            matrix_taps = taps[1]
            if biases[1] is not None:
                bias = biases[1]
        if before >= OUTPUTS[0] + OUTPUTS[1]:
            matrix_taps = taps[2]
            if biases[2] is not None:
                bias = biases[2]
        m_n = (o_n < outputs) & (before + o_n < C)
        b_convolved = convolve_next(b_y, matrix_taps, bias, past, o_n, before + o_n, m_n, o_m, m_y & m_n[None, :], C, W)
        b_y = tl.where((before + o_n < C)[None, :], b_convolved, b_y)
    if score[0] is not None:
        if before < OUTPUTS[0]:
            store_scores(b_y, score[0], sums, o_n, number * BN, outputs, o_m, M, BN, BM, TIMES, HEAD, PART, KEY_HEADS)
    if score[1] is not None:
        if (before >= OUTPUTS[0]) & (before < OUTPUTS[0] + OUTPUTS[1]):
            of_keys = sums + KEY_HEADS * TIMES * (HEAD // PART)
            store_scores(b_y, score[1], of_keys, o_n, number * BN, outputs, o_m, M, BN, BM, TIMES, HEAD, PART, KEY_HEADS)
    tl.store(out + o_y, b_y.to(out.dtype.element_ty), mask=m_y)


@triton.jit
def row_kernel(
    x, norm, swish, read, w0, w1, w2, w3, w4, w5, w6, w7, residual, t0, t1, t2, b0, b1, b2, past, read_weight, write_weight, sums, out,
    N, eps,
    OUTPUTS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    TIMES: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, KEY_HEADS: tl.constexpr,
    PAIR: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN outputs of a single row, x [K], from BN rows of a matrix [outputs, K] seen as [outputs, GROUPS, K / GROUPS]."""
    if PAIR:
        weight, outputs, number, before = w0, OUTPUTS[0], tl.program_id(0), tl.program_id(0) * 0
    else:
        weight, outputs, number, before = matrix_of_block(tl.program_id(0), (w0, w1, w2, w3, w4, w5, w6, w7), OUTPUTS, BN)
    o_n = number * BN + tl.arange(0, BN)
    o_g, o_c = tl.arange(0, BG)[:, None], tl.arange(0, BC)[None, :]
    SIZE: tl.constexpr = K // GROUPS
    o_x, m_x = o_g * SIZE + o_c, (o_g < GROUPS) & (o_c < SIZE)
    o_w = o_n.to(tl.int64)[:, None, None] * K + o_x[None, :, :]
    m_w = (o_n < outputs)[:, None, None] & m_x[None, :, :]
    b_w = tl.load(weight + o_w, mask=m_w, other=0.0)  # [BN, BG, BC], first of all loads: it takes longest
    if PAIR:
        b_w2 = tl.load(w1 + o_w, mask=m_w, other=0.0)  # as b_w
    wait_for_previous(EARLY)
    b_x, b_scaled = load_input(x, norm, swish, o_x, m_x, o_c, o_c < SIZE)  # [BG, BC]
    if read is not None:
        b_scaled *= tl.load(read + o_x // (K // HEADS), mask=m_x, other=0.0)  # [BG, BC]
    if norm is not None:
        b_scaled *= inverse_rms(b_x, eps, SIZE, 1)[:, None]
    b_y = tl.sum(tl.sum(b_w.to(tl.float32) * b_scaled[None, :, :], 2), 1)
    if PAIR:
        b_y = b_y * tl.sigmoid(b_y) * tl.sum(tl.sum(b_w2.to(tl.float32) * b_scaled[None, :, :], 2), 1)
    finish(
        b_y[None, :], residual, (t0, t1, t2), (b0, b1, b2), past, (read_weight, write_weight), sums, out, number, before, outputs,
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
    """BN outputs of up to BM rows x [M, K]. Each warp multiplies its own of SPLIT parts of the channels: a norm's groups if it has
    several."""
    if PAIR:
        weight, outputs, number, before = w0, OUTPUTS[0], tl.program_id(0), tl.program_id(0) * 0
    else:
        weight, outputs, number, before = matrix_of_block(tl.program_id(0), (w0, w1, w2, w3, w4, w5, w6, w7), OUTPUTS, BN)
    o_n, o_m = number * BN + tl.arange(0, BN), tl.arange(0, BM)
    o_g, o_c = tl.arange(0, BG)[:, None, None], tl.arange(0, BC)[None, None, :]
    SIZE: tl.constexpr = K // SPLIT
    o_k, m_k = o_g * SIZE + o_c, (o_g < SPLIT) & (o_c < SIZE)
    o_w, m_w = o_n.to(tl.int64)[None, :, None] * K + o_k, (o_n < outputs)[None, :, None] & m_k
    b_w = tl.load(weight + o_w, mask=m_w, other=0.0)  # [BG, BN, BC], first of all loads: it takes longest
    if PAIR:
        b_w2 = tl.load(w1 + o_w, mask=m_w, other=0.0)  # as b_w
    wait_for_previous(EARLY)
    o_row, m_x = o_m.to(tl.int64)[None, :, None], (o_m < M)[None, :, None] & m_k
    o_norm, gates = o_k, swish
    if GROUPS > 1:
        o_norm = o_c
    if swish is not None:
        gates += o_row * swish_stride
    b_x, b_scaled = load_input(x + o_row * x_stride, norm, gates, o_k, m_x, o_norm, m_k)  # [BG, BM, BC]
    if read is not None:
        b_scaled *= tl.load(read + o_row * HEADS + o_k // (K // HEADS), mask=m_x, other=0.0)  # [BG, BM, BC]
    b_scale = tl.full([BM, 1], 1.0, tl.float32)
    if norm is not None:
        b_squares = tl.sum(b_x * b_x, 2)  # [BG, BM]
        if GROUPS > 1:
            b_scaled *= tl.rsqrt(b_squares / SIZE + eps)[:, :, None]
        else:
            b_scale = tl.rsqrt(tl.sum(b_squares, 0) / K + eps)[:, None]
    b_scaled = b_scaled.to(b_w.dtype)
    b_y = b_scale * tl.sum(tl.dot(b_scaled, tl.permute(b_w, (0, 2, 1)), input_precision="ieee"), 0)
    if PAIR:
        b_y = b_y * tl.sigmoid(b_y) * (b_scale * tl.sum(tl.dot(b_scaled, tl.permute(b_w2, (0, 2, 1)), input_precision="ieee"), 0))
    finish(
        b_y, residual, (t0, t1, t2), (b0, b1, b2), past, (read_weight, write_weight), sums, out, number, before, outputs, o_m, M, N,
        OUTPUTS, C, W, TIMES, HEAD, PART, KEY_HEADS, BM, BN,
    )  # fmt: skip


@triton.jit
def normalize_kernel(
    x, norm, swish, read, out, x_stride, swish_stride, eps, K: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One group of a norm in one row: what `row_kernel` makes of its input x [rows, K], stored in out [rows, K]."""
    row, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    SIZE: tl.constexpr = K // GROUPS
    o_c = tl.arange(0, BC)
    m_c, o_x = o_c < SIZE, group * SIZE + o_c
    wait_for_previous(EARLY)
    gates = swish
    if swish is not None:
        gates += row * swish_stride
    b_x, b_scaled = load_input(x + row * x_stride, norm, gates, o_x, m_c, o_c, m_c)  # [BC]
    if read is not None:
        b_scaled *= tl.load(read + row * HEADS + o_x // (K // HEADS), mask=m_c, other=0.0)  # [BC]
    if norm is not None:
        b_scaled *= inverse_rms(b_x, eps, SIZE, 0)
    tl.store(out + row * K + o_x, b_scaled.to(out.dtype.element_ty), mask=m_c)


@triton.jit
def prefetch(weight, o_n, outputs, K: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr):
    """Asks for rows o_n of a matrix [outputs, K], of which LINE entries are a line of the L2 cache, without waiting for them."""
    o_l = tl.arange(0, LINES)[None, :] * LINE
    m_l = (o_n < outputs)[:, None] & (o_l < K)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [weight + o_n.to(tl.int64)[:, None] * K + o_l, m_l.to(tl.int32)],
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
        weight, outputs, number, before = matrix_of_block(tl.program_id(0), (w0, w1, w2, w3, w4, w5, w6, w7), OUTPUTS, BN)
    o_n, o_m = number * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM)
    if EARLY:
        prefetch(weight, o_n, outputs, K, LINE, LINES)
        if PAIR:
            prefetch(w1, o_n, outputs, K, LINE, LINES)
    wait_for_previous(EARLY)
    b_y, b_y2 = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        o_w, m_w = o_n.to(tl.int64)[:, None] * K + o_k[None, :], (o_n < outputs)[:, None] & (o_k < K)[None, :]
        p_x = x + o_m.to(tl.int64)[:, None] * x_stride + o_k[None, :]
        b_x = tl.load(p_x, mask=(o_m < M)[:, None] & (o_k < K)[None, :], other=0.0)  # [BM, BK]
        b_w = tl.load(weight + o_w, mask=m_w, other=0.0)  # [BN, BK]
        b_y = tl.dot(b_x, tl.trans(b_w), b_y, input_precision=PRECISION)
        if PAIR:
            b_w2 = tl.load(w1 + o_w, mask=m_w, other=0.0)  # [BN, BK]
            b_y2 = tl.dot(b_x, tl.trans(b_w2), b_y2, input_precision=PRECISION)
    if PAIR:
        b_y = b_y * tl.sigmoid(b_y) * b_y2
    finish(
        b_y, residual, (t0, t1, t2), (b0, b1, b2), past, (read_weight, write_weight), sums, out, number, before, outputs, o_m, M, N,
        OUTPUTS, C, W, TIMES, HEAD, PART, KEY_HEADS, BM, BN,
    )  # fmt: skip


def row_tile(outputs: int, width: int, groups: int, pair: bool, part: int, device: torch.device) -> dict[str, int]:
    """A program or more for every processor, whose weights are all under way at once."""
    sizes = {"BG": power_of_2(groups), "BC": power_of_2(width // groups)}
    whole, share = sizes["BG"] * sizes["BC"], max(1, outputs // processors(device))
    block = max(part, 1, min(1 << round(math.log2(share)), TILE // (2 if pair else 1) // whole))
    return sizes | {"BN": block, "num_warps": 4 if block * whole <= TILE // 2 else 8}


def few_rows_tile(width: int, groups: int, part: int, bytes_: int, pair: bool) -> dict[str, int] | None:
    """A tile in which a warp has a part of the channels, weights of so many bytes; None if they are too many to be held."""
    split = groups if groups > 1 else math.gcd(width, 4)
    tile = {"SPLIT": split, "BG": power_of_2(split), "BC": max(16, power_of_2(width // split))}
    if tile["BG"] * tile["BC"] * bytes_ > (WIDEST if bytes_ < 4 else WIDEST // 4):
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
    held_whole = groups > 1 or width * x.element_size() <= WIDEST
    if rows <= FEW and held_whole and (few := few_rows_tile(width, groups, part, size, pair)) is not None:
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
