"""What the Triton kernels share: where chunks lie, and how tiles are cut."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.tiles import cdiv
from headmax.ops.packing import CHUNK


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """The tensors as kernels take them."""
    return [None if x is None else x.contiguous() for x in tensors]


def dot_precision(dtype: torch.dtype) -> str:
    """Float32 inputs get float32 products, of three of the matrix units' shorter ones; a single one would lose half the digits."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


MIN_SEGMENT = 8
"""Chunks of a sequence worth a segment of their own."""


class Layout(NamedTuple):
    """How a call's tokens lie: one sequence per batch row, or packed as the tables say."""

    batch: int
    time: int
    table: Tensor | None
    """[chunks, 2] first token and number of tokens of each chunk, for packed sequences."""
    starts: Tensor | None
    """[sequences + 1] first chunk of each sequence."""
    chunk: int = CHUNK
    """Tokens of a chunk, at most."""

    @property
    def packed(self) -> bool:
        return self.table is not None

    @property
    def length(self) -> int:
        """As kernels take it. Packed chunks say where they lie: a length would be one more reason to compile."""
        return self.time if self.table is None else 0

    @property
    def sequences(self) -> int:
        return self.batch if self.starts is None else self.starts.shape[0] - 1

    @property
    def chunks(self) -> int:
        return self.batch * cdiv(self.time, self.chunk) if self.table is None else self.table.shape[0]

    def states(self, q: Tensor, v: Tensor) -> tuple[int, ...]:
        """The shape of the sequences' states [sequences, heads, key, value]."""
        return self.sequences, v.shape[2], q.shape[3], v.shape[3]

    def segments(self, blocks: int, wanted: int) -> int:
        """Into how many segments a scan with so many blocks for each sequence cuts it, to have as many as `wanted` in all."""
        return max(1, min(wanted // (blocks * self.sequences), self.chunks // (MIN_SEGMENT * self.sequences)))


# Grids have one axis: only the first may be longer than 65,535. Programs that share inputs are neighbours.


@triton.jit
def channel_block(H: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """First channel, chunk (or run) and head of this program: blocks of `BLOCK` channels first, then heads."""
    n = tl.program_id(0)
    blocks = tl.cdiv(WIDTH, BLOCK)
    return n % blocks * BLOCK, n // blocks // H, n // blocks % H


@triton.jit
def state_block(H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """First key and value channel, run and head of this program."""
    k_blocks = tl.cdiv(K, BK)
    n = tl.program_id(0) // k_blocks
    v_blocks = tl.cdiv(V, BV)
    return tl.program_id(0) % k_blocks * BK, n % v_blocks * BV, n // v_blocks // H, n // v_blocks % H


@triton.jit
def chunk_span(chunk, table, T, C: tl.constexpr, PACKED: tl.constexpr):
    """First token (counted through the whole batch) and number of tokens of a chunk."""
    if PACKED:
        return tl.load(table + 2 * chunk).to(tl.int64), tl.load(table + 2 * chunk + 1).to(tl.int32)
    else:
        per_row = tl.cdiv(T, C)
        row, n = chunk // per_row, chunk % per_row
        return row.to(tl.int64) * T + n * C, tl.minimum(C, T - n * C).to(tl.int32)


@triton.jit
def sequence_span(sequence, table, starts, T, C: tl.constexpr, PACKED: tl.constexpr):
    """First chunk, number of chunks, first token and end token of a sequence."""
    if PACKED:
        first_chunk = tl.load(starts + sequence).to(tl.int32)
        chunks = tl.load(starts + sequence + 1).to(tl.int32) - first_chunk
        last, there = first_chunk + chunks - 1, chunks > 0  # an empty sequence has no row in the table
        end = tl.load(table + 2 * last, mask=there, other=0).to(tl.int64) + tl.load(table + 2 * last + 1, mask=there, other=0).to(tl.int64)
        return first_chunk, chunks, tl.load(table + 2 * first_chunk, mask=there, other=0).to(tl.int64), end
    else:
        chunks = tl.cdiv(T, C)
        token = sequence.to(tl.int64) * T
        return sequence * chunks, chunks, token, token + T


@triton.jit
def segment_span(run, segments, table, starts, T, C: tl.constexpr, PACKED: tl.constexpr):
    """First chunk, number of chunks and first token of a segment, and the end token of its sequence; `run` counts all segments."""
    first_chunk, chunks, token, end = sequence_span(run // segments, table, starts, T, C, PACKED)
    span = tl.cdiv(chunks, segments)
    low = (run % segments) * span
    return first_chunk + low, tl.maximum(tl.minimum(span, chunks - low), 0), token + low.to(tl.int64) * C, end


@triton.jit
def nth(n, count, REVERSE: tl.constexpr):
    """The n-th of `count`, counted from the last one if REVERSE."""
    if REVERSE:
        return count - 1 - n
    else:
        return n


@triton.jit
def beside(tensors, x):
    """A tuple of tensors, and one more."""
    return tensors + (x,)  # noqa: RUF005


LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def base_2(log_decay):
    """A log-decay as a power of two, as kernels keep them: tl.exp2 takes a quarter of tl.exp's instructions.

    At least that of -100, whose exponential is 0 in float32: -inf would leave nothing to tell two tokens apart by. NaN stays NaN.
    """
    return tl.where(log_decay < -100.0, -100.0, log_decay) * LOG2_E


@triton.jit
def values_at(gate, start, at, there, C: tl.constexpr, GATED: tl.constexpr):
    """A gate's values [C] at these places from `start` on, 1 without a gate and where there is none."""
    if GATED:
        return tl.load(gate + start + at, mask=there, other=1.0).to(tl.float32)
    else:
        return tl.full([C], 1.0, tl.float32)


@triton.jit
def row_values(gate, first, count, head, H: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr):
    """A gate's value for each token of the chunk, 1 without a gate and for slots beyond its end, where all else is 0."""
    rows = tl.arange(0, C)
    return values_at(gate, first * H + head, rows * H, rows < count, C, GATED)


@triton.jit
def tile(base, first, count, head, start, H: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers and mask of channels start to start + BLOCK of a chunk of [tokens, heads, width]."""
    rows, columns = tl.arange(0, C), start + tl.arange(0, BLOCK)
    pointers = base + (first * H + head) * WIDTH + (rows[:, None] * (H * WIDTH) + columns[None, :])
    return pointers, (rows[:, None] < count) & (columns[None, :] < WIDTH)


@triton.jit
def state_tile(base, index, k_start, v_start, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers and mask of a [BK, BV] block of state number `index` in [..., K, V]."""
    rows, columns = k_start + tl.arange(0, BK), v_start + tl.arange(0, BV)
    pointers = base + index * K * V + rows[:, None] * V + columns[None, :]
    return pointers, (rows[:, None] < K) & (columns[None, :] < V)


@triton.jit
def settled(total, count):
    """`total` as it is, which the compiler does not know: so a product that is added to it is over before the loop goes on.

    For loops whose tiles meet other arithmetic beside a product. On Hopper a product may still be under way when the next tiles are
    fetched, for which Triton (3.6, 3.7) then has one buffer too few: it would fill the one that is being read. `python -m lab bench fit`
    looks for such loops.
    """
    return total * tl.where(count > 0, 1.0, 0.0)


SIGNALLING = tl.constexpr(0x7F800001)
"""The bits of a float32 NaN that no arithmetic gives."""


@triton.jit
def laid_like(x, product):
    """`x` as it is, which the compiler does not know: so it lies as a float32 `product` does from here on, and not what is made of it."""
    return tl.where(product.to(tl.int32, bitcast=True) != SIGNALLING, x, 0.0)


@triton.jit
def causal_mask(count, C: tl.constexpr):
    rows = tl.arange(0, C)
    return (rows[:, None] >= rows[None, :]) & (rows[:, None] < count)


@triton.jit
def decay_sums(log_decay, first, count, head, H: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """The running sums b [C] of a chunk's log-decays, base 2, what is left of them after each token, b_C - b, and b_C."""
    rows = tl.arange(0, C)
    if DECAY == "none":
        zeros = tl.zeros([C], tl.float32)
        return zeros, zeros, tl.sum(zeros, 0)
    elif DECAY == "head":
        step = base_2(tl.load(log_decay + head).to(tl.float32))
        return (rows + 1) * step, (count - 1 - rows) * step, count * step
    else:
        step = base_2(tl.load(log_decay + (first * H + head) + rows * H, mask=rows < count, other=0.0).to(tl.float64))
        b, total = tl.cumsum(step, 0), tl.sum(step, 0)
        return b, total - b, total


@triton.jit
def decay_rows(sums, count, C: tl.constexpr):
    """2^sums per token, 0 beyond the end."""
    return tl.exp2(tl.where(tl.arange(0, C) < count, sums.to(tl.float32), -float("inf")))


@triton.jit
def decay_matrix(b, log_decay, count, head, C: tl.constexpr, DECAY: tl.constexpr):
    """D [C, C] = 2^(b_i - b_j) below and on the diagonal, 0 above."""
    if DECAY == "none":
        between = tl.zeros([C, C], tl.float32)
    elif DECAY == "head":
        rows = tl.arange(0, C).to(tl.float32)
        between = (rows[:, None] - rows[None, :]) * base_2(tl.load(log_decay + head).to(tl.float32))
    else:
        high = b.to(tl.float32)
        low = (b - high).to(tl.float32)  # differences of two float32 parts, since [C, C] in float64 takes its time
        between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp2(tl.where(causal_mask(count, C), between, -float("inf")))


@triton.jit
def unit_lower_inverse(lower, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower [C, C] tile: its 16 x 16 diagonal blocks by substitution, all at once; then, with D the inverse
    of the block diagonal and N = D (what lies below it), (I + N)^-1 D = (I - N)(I + N^2) D, exact since N^4 = 0 for four blocks.
    """
    tl.static_assert(C == 64)
    rows = tl.arange(0, C)
    same = (rows[:, None] // 16) == (rows[None, :] // 16)
    small = tl.arange(0, 16)
    solved = tl.sum(tl.reshape(tl.where(same, -lower, 0.0), (4, 16, 4, 16)), 2)
    for i in range(1, 16):
        row = tl.sum(tl.where(small[None, :, None] == i, solved, 0.0), 1)
        row += tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where(small[None, :, None] == i, row[:, None, :], solved)
    solved += tl.where(small[None, :, None] == small[None, None, :], 1.0, 0.0)
    blocks = tl.reshape(tl.broadcast_to(solved[:, :, None, :], (4, 16, 4, 16)), (C, C))
    blocks = tl.where(same, blocks, 0.0)
    below = tl.dot(blocks, tl.where(same, 0.0, lower), input_precision=PRECISION)
    inverse = blocks + tl.dot(below, tl.dot(below, blocks, input_precision=PRECISION), input_precision=PRECISION)
    return inverse - tl.dot(below, inverse, input_precision=PRECISION)
