"""Products with a matrix in decoding: norm and gates on the way in, residual, convolution on the way out.

For a single row one kernel does all while it reads the matrix. For more, the matrix library does the product, between kernels of ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.layers.triton_launch import after_the_last, early
from headmax.ops.triton_tiles import processors

TILE = 16_384
"""Entries of the matrix a program holds at once."""


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

    @property
    def arguments(self) -> dict[str, Any]:
        """As every kernel here takes them."""
        return {
            "x": self.x,
            "norm": self.norm,
            "swish": self.swish,
            "read": self.read,
            "eps": self.eps,
            "K": self.x.shape[1],
            "GROUPS": 1 if self.norm is None else self.groups,
            "HEADS": 1 if self.read is None else self.read.shape[1],
        }


@dataclass(frozen=True)
class Scores:
    """Scores of the gates from convolved queries and keys: sums over a part of a head's channels each, which their reader adds up."""

    weight: Tensor
    """[value heads to a key head, channels of all queries and keys]"""
    head: int
    """Channels of a head."""
    sums: Tensor
    """[rows, 2 * value heads, head / part]: of queries, then of keys."""

    @property
    def arguments(self) -> dict[str, Any]:
        """As every kernel here takes them."""
        (times, scored), part = self.weight.shape, self.head // self.sums.shape[2]
        return {"score": self.weight, "sums": self.sums, "TIMES": times, "HEAD": self.head, "SCORED": scored, "PART": part}


NO_SCORES = {"score": None, "sums": None, "TIMES": 1, "HEAD": 1, "SCORED": 0, "PART": 1}


def score_part(head: int, width: int) -> int:
    """How many channels are summed up where they are made, from inputs of `width`: a power of two, heads being made of whole parts."""
    return max(1, min(16, head & -head, TILE // triton.next_power_of_2(width)))


@dataclass(frozen=True)
class Convolution:
    """A short causal convolution and its silu over the first channels of a product."""

    taps: Tensor
    """[channels, width]"""
    past: Tensor
    """[rows, width - 1, channels] the last inputs, moved on in place."""
    scores: Scores | None = None

    @property
    def scoring(self) -> dict[str, Any]:
        """What every kernel here takes of the scores."""
        return NO_SCORES if self.scores is None else self.scores.arguments


@triton.jit
def entries(x, norm, swish, read, column, channel, inside, K: tl.constexpr, HEADS: tl.constexpr):
    """x as it is, and x times everything but the norm's own factor; `channel` counts within a group of the norm."""
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    made = value
    if norm is not None:
        made *= tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32)
    if swish is not None:
        gate = tl.load(swish + column, mask=inside, other=0.0).to(tl.float32)
        made *= gate * tl.sigmoid(gate)
    if read is not None:
        made *= tl.load(read + column // (K // HEADS), mask=inside, other=0.0)
    return value, made


@triton.jit
def convolved(y, taps, past, channel, inside, C: tl.constexpr, W: tl.constexpr):
    """silu(Σ_i taps_i input_i) with y as the last input; the past moves on by one, each slot read by all before one writes it."""
    slots = past + channel
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
def score_sums(
    y, first, score, sums, TIMES: tl.constexpr, HEAD: tl.constexpr, SCORED: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr
):
    """Sums of the scores' terms over every PART of y [WIDTH], which are channels `first` and on."""
    channel = first + tl.arange(0, WIDTH)
    start = first + PART * tl.arange(0, WIDTH // PART)
    for i in tl.static_range(TIMES):
        terms = y * tl.load(score + i * SCORED + channel, mask=channel < SCORED, other=0.0).to(tl.float32)
        at = (start // HEAD * TIMES + i) * (HEAD // PART) + start % HEAD // PART
        tl.store(sums + at, tl.sum(tl.reshape(terms, [WIDTH // PART, PART]), 1), mask=start < SCORED)


@triton.jit
def linear_row_kernel(
    x, norm, swish, read, weight, residual, taps, past, score, sums, out, eps,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    TIMES: tl.constexpr, HEAD: tl.constexpr, SCORED: tl.constexpr, PART: tl.constexpr,
    PAIR: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN outputs of the row from BN rows of the matrix [N, K] seen as [N, GROUPS, K / GROUPS]; as a pair, silu(first half) * second."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    group, channel = tl.arange(0, BG)[:, None], tl.arange(0, BC)[None, :]
    SIZE: tl.constexpr = K // GROUPS
    column, inside = group * SIZE + channel, (group < GROUPS) & (channel < SIZE)
    at = n.to(tl.int64)[:, None, None] * K + column[None, :, :]
    whole = (n < N)[:, None, None] & inside[None, :, :]
    first = tl.load(weight + at, mask=whole, other=0.0)  # asked for before anything else: it comes from farthest
    if PAIR:
        second = tl.load(weight + N * K + at, mask=whole, other=0.0)
    after_the_last(EARLY)
    value, made = entries(x, norm, swish, read, column, channel, inside, K, HEADS)
    if norm is not None:
        made *= tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
    y = tl.sum(tl.sum(first.to(tl.float32) * made[None, :, :], 2), 1)
    if PAIR:
        y = y * tl.sigmoid(y) * tl.sum(tl.sum(second.to(tl.float32) * made[None, :, :], 2), 1)
    if residual is not None:
        y += tl.load(residual + n, mask=n < N, other=0.0).to(tl.float32)
    if taps is not None:
        y = tl.where(n < C, convolved(y, taps, past, n, n < C, C, W), y)
    if score is not None:
        score_sums(y, tl.program_id(0) * BN, score, sums, TIMES, HEAD, SCORED, BN, PART)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def input_kernel(
    x, norm, swish, read, out, x_stride, swish_stride, eps,
    K: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One row of the input by itself, for the matrix library."""
    row, group, channel = tl.program_id(0), tl.arange(0, BG)[:, None], tl.arange(0, BC)[None, :]
    SIZE: tl.constexpr = K // GROUPS
    column, inside = group * SIZE + channel, (group < GROUPS) & (channel < SIZE)
    if swish is not None:
        swish += row * swish_stride
    if read is not None:
        read += row * HEADS
    value, made = entries(x + row * x_stride, norm, swish, read, column, channel, inside, K, HEADS)
    if norm is not None:
        made *= tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
    tl.store(out + row * K + column, made.to(out.dtype.element_ty), mask=inside)


@triton.jit
def convolution_kernel(
    y, taps, past, score, sums, y_stride, sums_stride,
    C: tl.constexpr, W: tl.constexpr, TIMES: tl.constexpr, HEAD: tl.constexpr, SCORED: tl.constexpr, PART: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The convolution of one row's first channels by itself, in place."""
    row, channel = tl.program_id(1), tl.program_id(0) * BC + tl.arange(0, BC)
    inside, at = channel < C, y + row * y_stride + channel
    past += row.to(tl.int64) * (W - 1) * C
    made = convolved(tl.load(at, mask=inside, other=0.0).to(tl.float32), taps, past, channel, inside, C, W)
    tl.store(at, made.to(y.dtype.element_ty), mask=inside)
    if score is not None:
        score_sums(made, tl.program_id(0) * BC, score, sums + row * sums_stride, TIMES, HEAD, SCORED, BC, PART)


def prepare(source: Input, dtype: torch.dtype) -> Tensor:
    """The input by itself, [rows, width]."""
    x, arguments = source.x, source.arguments
    out = x.new_empty(x.shape, dtype=dtype)
    groups: int = arguments["GROUPS"]
    sizes = {"BG": triton.next_power_of_2(groups), "BC": triton.next_power_of_2(x.shape[1] // groups)}
    strides = {"x_stride": x.stride(0), "swish_stride": 0 if source.swish is None else source.swish.stride(0)}
    input_kernel[(x.shape[0],)](out=out, **arguments, **strides, **sizes, num_warps=4 if x.shape[1] <= 4096 else 8)
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
    if rows > 1:
        return _by_library(source, weight, residual, convolution, pair, dtype)
    outputs = weight.shape[0] // (2 if pair else 1)
    out = source.x.new_empty(1, outputs, dtype=dtype)
    arguments = source.arguments | {"weight": weight, "residual": residual, "taps": None, "past": None, "out": out}
    arguments |= {"N": outputs, "C": 0, "W": 0, "PAIR": pair} | NO_SCORES
    if convolution is not None:
        taps, past = convolution.taps, convolution.past
        arguments |= {"taps": taps, "past": past, "C": taps.shape[0], "W": taps.shape[1]} | convolution.scoring
    groups: int = arguments["GROUPS"]
    sizes = {"BG": triton.next_power_of_2(groups), "BC": triton.next_power_of_2(width // groups)}
    whole = sizes["BG"] * sizes["BC"]
    share = max(1, outputs // processors(weight.device))  # a program or more for every processor
    block = max(1, min(1 << round(math.log2(share)), TILE // (2 if pair else 1) // whole))
    block = max(block, arguments["PART"])
    warps = 4 if block * whole <= TILE // 2 else 8
    grid = (triton.cdiv(outputs, block),)
    linear_row_kernel[grid](**arguments, **sizes, BN=block, num_warps=warps, **early(weight.device, rows))
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
        (channels, width), sums = convolution.taps.shape, convolution.scoring["sums"]
        strides = {"y_stride": out.stride(0), "sums_stride": 0 if sums is None else sums.stride(0)}
        grid = (triton.cdiv(channels, 256), out.shape[0])
        convolution_kernel[grid](out, convolution.taps, convolution.past, **convolution.scoring, **strides, C=channels, W=width, BC=256)
    return out
