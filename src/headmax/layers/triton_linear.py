"""Products of a few rows with a matrix, at the speed of reading it: norm and gates on the way in, residual, convolution on the way out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.layers.triton_launch import after_the_last, early
from headmax.ops.triton_common import dot_precision
from headmax.ops.triton_tiles import processors

FEW_ROWS = 16
"""Up to here one kernel does all; above, the matrix library is faster, between kernels of our own."""
TILE = 16_384
"""Entries of the matrix a program holds at once for a single row."""


@dataclass(frozen=True)
class Input:
    """What is multiplied: x [rows, width], normalised, times silu(swish), times a gate per head."""

    x: Tensor
    norm: Tensor | None = None
    """Weight of an RMS norm over `groups` equal parts, which share it: [width / groups]."""
    eps: float = 1e-6
    groups: int = 1
    swish: Tensor | None = None
    """[rows, width]"""
    read: Tensor | None = None
    """[rows, heads], a factor for each of as many equal parts."""

    def arguments(self) -> dict[str, object]:
        """As every kernel here takes them."""
        return {
            "x": self.x,
            "norm": self.norm,
            "swish": self.swish,
            "read": self.read,
            "x_stride": self.x.stride(0),
            "swish_stride": 0 if self.swish is None else self.swish.stride(0),
            "eps": self.eps,
            "K": self.x.shape[1],
            "GROUPS": 1 if self.norm is None else self.groups,
            "HEADS": 1 if self.read is None else self.read.shape[1],
        }


@dataclass(frozen=True)
class Convolution:
    """A short causal convolution and its silu over the first channels of a product."""

    taps: Tensor
    """[channels, width]"""
    past: Tensor
    """[rows, width - 1, channels] the last inputs, moved on in place."""


@triton.jit
def entries(x, norm, swish, read, row, column, channel, inside, x_stride, swish_stride, K: tl.constexpr, HEADS: tl.constexpr):
    """x as it is, and x times everything but the norm's own factor; `channel` counts within a group of the norm."""
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    made = value
    if norm is not None:
        made *= tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32)
    if swish is not None:
        gate = tl.load(swish + row * swish_stride + column, mask=inside, other=0.0).to(tl.float32)
        made *= gate * tl.sigmoid(gate)
    if read is not None:
        made *= tl.load(read + row * HEADS + column // (K // HEADS), mask=inside, other=0.0)
    return value, made


@triton.jit
def convolved(y, taps, past, row, channel, inside, C: tl.constexpr, W: tl.constexpr):
    """silu(Σ_i taps_i input_i) with y as the last input; the past moves on by one, each slot read by all before one writes it."""
    slots = past + row.to(tl.int64) * (W - 1) * C + channel
    total = y * tl.load(taps + channel * W + W - 1, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(W - 1):
        before = tl.load(slots + i * C, mask=inside, other=0.0).to(tl.float32)
        total += before * tl.load(taps + channel * W + i, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()
    for i in tl.static_range(W - 2):
        later = tl.load(slots + (i + 1) * C, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(slots + i * C, later, mask=inside)
    tl.store(slots + (W - 2) * C, y.to(past.dtype.element_ty), mask=inside)
    return total * tl.sigmoid(total)


@triton.jit
def finish(y, residual, taps, past, out, row, column, inside, N: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Stores y, with the residual added or the first C channels convolved."""
    if residual is not None:
        y += tl.load(residual + row * N + column, mask=inside, other=0.0).to(tl.float32)
    if taps is not None:
        y = tl.where(column < C, convolved(y, taps, past, row, column, inside & (column < C), C, W), y)
    tl.store(out + row * N + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def linear_row_kernel(
    x, norm, swish, read, weight, residual, taps, past, out, x_stride, swish_stride, eps,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    PAIR: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN outputs of one row from BN rows of the matrix [N, K] seen as [N, GROUPS, K / GROUPS]; as a pair, silu(first half) * second."""
    row, n = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    group, channel = tl.arange(0, BG)[:, None], tl.arange(0, BC)[None, :]
    SIZE: tl.constexpr = K // GROUPS
    column, inside = group * SIZE + channel, (group < GROUPS) & (channel < SIZE)
    at = n.to(tl.int64)[:, None, None] * K + column[None, :, :]
    whole = (n < N)[:, None, None] & inside[None, :, :]
    first = tl.load(weight + at, mask=whole, other=0.0)  # asked for before anything else: it comes from farthest
    if PAIR:
        second = tl.load(weight + N * K + at, mask=whole, other=0.0)
    after_the_last(EARLY)
    value, made = entries(x, norm, swish, read, row, column, channel, inside, x_stride, swish_stride, K, HEADS)
    if norm is not None:
        made *= tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
    y = tl.sum(tl.sum(first.to(tl.float32) * made[None, :, :], 2), 1)
    if PAIR:
        y = y * tl.sigmoid(y) * tl.sum(tl.sum(second.to(tl.float32) * made[None, :, :], 2), 1)
    finish(y, residual, taps, past, out, row, n, n < N, N, C, W)


@triton.jit
def linear_rows_kernel(
    x, norm, swish, read, weight, residual, taps, past, out, x_stride, swish_stride, eps, rows,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    PAIR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same for up to BM rows at once, on matrix units: block by block along the width, a group at a time where there are several."""
    row, n = tl.arange(0, BM)[:, None], tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    STEP: tl.constexpr = BK if GROUPS == 1 else K // GROUPS
    y, other = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    after_the_last(EARLY)
    for start in range(0, K, STEP):
        within = tl.arange(0, BK)
        inside = (within < STEP) & (start + within < K)
        at = n.to(tl.int64) * K + start + within[:, None]
        whole = (n < N) & inside[:, None]
        first = tl.load(weight + at, mask=whole, other=0.0)
        column = start + within[None, :]
        channel = column if GROUPS == 1 else within[None, :]
        there = (row < rows) & inside[None, :]
        value, made = entries(x, norm, swish, read, row, column, channel, there, x_stride, swish_stride, K, HEADS)
        if GROUPS == 1:
            squares += tl.sum(value * value, 1)
        else:
            made *= tl.rsqrt(tl.sum(value * value, 1) / STEP + eps)[:, None]
        made = made.to(first.dtype)
        y = tl.dot(made, first, y, input_precision=PRECISION)
        if PAIR:
            other = tl.dot(made, tl.load(weight + N * K + at, mask=whole, other=0.0), other, input_precision=PRECISION)
    if norm is not None:
        if GROUPS == 1:
            factor = tl.rsqrt(squares / K + eps)[:, None]
            y *= factor
            other *= factor
    if PAIR:
        y = y * tl.sigmoid(y) * other
    finish(y, residual, taps, past, out, row, n, (row < rows) & (n < N), N, C, W)


@triton.jit
def input_kernel(
    x, norm, swish, read, out, x_stride, swish_stride, eps,
    K: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One row of the input by itself, for the matrix library."""
    row, group, channel = tl.program_id(0), tl.arange(0, BG)[:, None], tl.arange(0, BC)[None, :]
    SIZE: tl.constexpr = K // GROUPS
    column, inside = group * SIZE + channel, (group < GROUPS) & (channel < SIZE)
    value, made = entries(x, norm, swish, read, row, column, channel, inside, x_stride, swish_stride, K, HEADS)
    if norm is not None:
        made *= tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
    tl.store(out + row * K + column, made.to(out.dtype.element_ty), mask=inside)


@triton.jit
def convolution_kernel(y, taps, past, y_stride, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr):
    """The convolution of one row's first channels by itself, in place."""
    row, channel = tl.program_id(1), tl.program_id(0) * BC + tl.arange(0, BC)
    inside, at = channel < C, y + row * y_stride + channel
    made = convolved(tl.load(at, mask=inside, other=0.0).to(tl.float32), taps, past, row, channel, inside, C, W)
    tl.store(at, made.to(y.dtype.element_ty), mask=inside)


def prepare(source: Input, dtype: torch.dtype) -> Tensor:
    """The input by itself, [rows, width]."""
    x, arguments = source.x, source.arguments()
    out = x.new_empty(x.shape, dtype=dtype)
    groups: int = arguments["GROUPS"]  # type: ignore[assignment]
    sizes = {"BG": triton.next_power_of_2(groups), "BC": triton.next_power_of_2(x.shape[1] // groups)}
    input_kernel[(x.shape[0],)](out=out, **arguments, **sizes, num_warps=4 if x.shape[1] <= 4096 else 8)
    return out


def linear(
    source: Input,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    convolution: Convolution | None = None,
    pair: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """source @ weight.T [rows, N] in `dtype` (the matrix's unless given), plus `residual`, or convolved.

    A `pair` is silu(first half) * second half.
    """
    rows, width = source.x.shape
    dtype = weight.dtype if dtype is None else dtype
    if rows > FEW_ROWS:
        return _by_library(source, weight, residual, convolution, pair, dtype)
    outputs = weight.shape[0] // (2 if pair else 1)
    out = source.x.new_empty(rows, outputs, dtype=dtype)
    arguments = source.arguments() | {"weight": weight, "residual": residual, "taps": None, "past": None, "out": out}
    arguments |= {"N": outputs, "C": 0, "W": 0, "PAIR": pair} | early(weight.device)
    if convolution is not None:
        taps, past = convolution.taps, convolution.past
        arguments |= {"taps": taps, "past": past, "C": taps.shape[0], "W": taps.shape[1]}
    groups: int = arguments["GROUPS"]  # type: ignore[assignment]
    size = triton.next_power_of_2(width // groups)
    if rows == 1:
        whole = triton.next_power_of_2(groups) * size
        share = max(1, outputs // (2 * processors(weight.device)))  # two programs or more for every processor
        block = max(1, min(1 << round(math.log2(share)), TILE // (2 if pair else 1) // whole))
        tiles = {"BN": block, "BG": triton.next_power_of_2(groups), "BC": size, "num_warps": 4 if block * whole <= TILE // 2 else 8}
        linear_row_kernel[(triton.cdiv(outputs, block), rows)](**arguments, **tiles)
    else:
        block, wide = 16 if outputs <= 8192 else 64, weight.element_size() == 4
        tiles = {"BM": 16, "BN": block, "BK": max(16, size) if groups > 1 else max(16, min(128, size))}
        tiles |= {"num_warps": 4, "num_stages": 1 if wide or tiles["BK"] > 256 else 2 if groups > 1 else 4}  # what shared memory holds
        linear_rows_kernel[(triton.cdiv(outputs, block),)](**arguments, rows=rows, PRECISION=dot_precision(weight.dtype), **tiles)
    return out


def _by_library(
    source: Input, weight: Tensor, residual: Tensor | None, convolution: Convolution | None, pair: bool, dtype: torch.dtype
) -> Tensor:
    bare = source.norm is source.swish is source.read is None and source.x.dtype == weight.dtype
    made = source.x if bare else prepare(source, weight.dtype)
    if residual is not None:
        return residual.addmm_(made, weight.T)  # in place: nobody reads it again
    widen = dtype != weight.dtype and made.is_cuda  # the matrix units sum in float32 anyway, and need not round it
    out = torch.mm(made, weight.T, out_dtype=dtype) if widen else torch.mm(made, weight.T).to(dtype)
    if pair:
        half = weight.shape[0] // 2
        return prepare(Input(out[:, half:], swish=out[:, :half]), dtype)
    if convolution is not None:
        channels, width = convolution.taps.shape
        grid = (triton.cdiv(channels, 256), out.shape[0])
        convolution_kernel[grid](out, convolution.taps, convolution.past, out.stride(0), C=channels, W=width, BC=256)
    return out
