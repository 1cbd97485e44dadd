"""What the Triton kernels share: where chunks lie, how tiles are addressed, decays within a chunk.

Names in kernels: `p_x` pointers, `b_x` a block in registers, `m_x` a mask, `o_x` offsets; capitals are compile-time constants. T tokens lie
in chunks of C; a chunk is known by the `first` token, counted through the whole batch, and the `count` of its tokens. H heads, K key and V
value channels, of which a block has BK and BV. A tensor that a call does not have is None, and what depends on it is not compiled.

Of a chunk's log-decays g, which kernels take as powers of two, b_i = g_1 + ... + g_i are the running sums (`b_cum`).
"""

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


def shape_arguments(q: Tensor, layout: Layout) -> dict[str, Any]:
    """What all kernels of a recurrence are specialised to."""
    _, _, heads, key = q.shape
    return {"H": heads, "K": key, "C": layout.chunk, "PRECISION": dot_precision(q.dtype)}


class Prepared(NamedTuple):
    """What a chunk's gates and decays are folded into, see scalar.py and channel.py; the gates and decays are not needed after that."""

    scaled_q: Tensor
    """What queries read the chunk's first state with [B,T,H,K]."""
    scaled_k: Tensor
    """What keys write to the chunk's last state [B,T,H,K]."""
    scores: Tensor
    """[B,T,H,tokens of a chunk]; transposed for the backward pass: a token's row has what later ones read of it."""
    chunk_decay: Tensor
    """b_C, [chunks, H], or [chunks, H, K] for a decay per channel."""
    factored: Tensor | None
    """For a decay per channel [chunks, H]: whether scores are one product of scaled_q and scaled_k, each with half of the chunk's decay."""
    sums: Tensor | None
    """For a decay per channel [B,T,H,K]: b, or of a factored chunk b - b_C / 2, which only the backward pass has."""


# Grids have one axis: only the first may be longer than 65,535. Programs that share inputs are neighbours.


@triton.jit
def channel_block(H: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """First channel, chunk (or segment) and head of this program: blocks of `BLOCK` channels first, then heads."""
    n = tl.program_id(0)
    blocks = tl.cdiv(WIDTH, BLOCK)
    return n % blocks * BLOCK, n // blocks // H, n // blocks % H


@triton.jit
def state_block(H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """First key and value channel, segment and head of this program."""
    k_blocks = tl.cdiv(K, BK)
    n = tl.program_id(0) // k_blocks
    v_blocks = tl.cdiv(V, BV)
    return tl.program_id(0) % k_blocks * BK, n % v_blocks * BV, n // v_blocks // H, n // v_blocks % H


@triton.jit
def chunk_span(chunk, table, T, C: tl.constexpr):
    """First token and number of tokens of a chunk."""
    if table is not None:
        return tl.load(table + 2 * chunk).to(tl.int64), tl.load(table + 2 * chunk + 1).to(tl.int32)
    else:
        per_row = tl.cdiv(T, C)
        row, n = chunk // per_row, chunk % per_row
        return row.to(tl.int64) * T + n * C, tl.minimum(C, T - n * C).to(tl.int32)


@triton.jit
def sequence_span(sequence, table, starts, T, C: tl.constexpr):
    """First chunk, number of chunks, first token and end token of a sequence."""
    if table is not None:
        first_chunk = tl.load(starts + sequence).to(tl.int32)
        chunks = tl.load(starts + sequence + 1).to(tl.int32) - first_chunk
        last, m_any = first_chunk + chunks - 1, chunks > 0  # an empty sequence has no row in the table
        end = tl.load(table + 2 * last, mask=m_any, other=0).to(tl.int64) + tl.load(table + 2 * last + 1, mask=m_any, other=0).to(tl.int64)
        return first_chunk, chunks, tl.load(table + 2 * first_chunk, mask=m_any, other=0).to(tl.int64), end
    else:
        chunks = tl.cdiv(T, C)
        first = sequence.to(tl.int64) * T
        return sequence * chunks, chunks, first, first + T


@triton.jit
def segment_span(segment, segments, table, starts, T, C: tl.constexpr):
    """First chunk, number of chunks and first token of a segment, and the end token of its sequence. Every sequence has `segments` of them;
    `segment` counts those of all sequences."""
    first_chunk, chunks, first, end = sequence_span(segment // segments, table, starts, T, C)
    span = tl.cdiv(chunks, segments)
    low = (segment % segments) * span
    return first_chunk + low, tl.maximum(tl.minimum(span, chunks - low), 0), first + low.to(tl.int64) * C, end


@triton.jit
def scan_index(n, count, REVERSE: tl.constexpr):
    """Where the n-th step of a scan over `count` is: at n, or counted from the last one if REVERSE."""
    if REVERSE:
        return count - 1 - n
    else:
        return n


@triton.jit
def add_both(a, b, c, d):
    """For two sums in one `tl.reduce`."""
    return a + c, b + d


@triton.jit
def append(tensors, x):
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
def load_gate(gate, start, o_gate, m_gate, C: tl.constexpr):
    """A gate's values [C] at these offsets from `start` on, 1 without a gate and where the mask is off."""
    if gate is not None:
        return tl.load(gate + start + o_gate, mask=m_gate, other=1.0).to(tl.float32)  # [C]
    else:
        return tl.full([C], 1.0, tl.float32)


@triton.jit
def load_chunk_gate(gate, first, count, head, H: tl.constexpr, C: tl.constexpr):
    """A gate's value for each token of the chunk [C], 1 without a gate and beyond the chunk's end, where all else is 0."""
    o_c = tl.arange(0, C)
    return load_gate(gate, first * H + head, o_c * H, o_c < count, C)


@triton.jit
def tile(base, first, count, head, start, H: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers and mask [C, BLOCK] of channels from `start` on, of a chunk and a head of [tokens, H, WIDTH]."""
    o_c, o_w = tl.arange(0, C), start + tl.arange(0, BLOCK)
    p_x = base + (first * H + head) * WIDTH + (o_c[:, None] * (H * WIDTH) + o_w[None, :])
    return p_x, (o_c[:, None] < count) & (o_w[None, :] < WIDTH)


@triton.jit
def state_tile(base, index, k_start, v_start, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers and mask of a [BK, BV] block of state number `index` in [..., K, V]."""
    o_k, o_v = k_start + tl.arange(0, BK), v_start + tl.arange(0, BV)
    p_s = base + index * K * V + o_k[:, None] * V + o_v[None, :]
    return p_s, (o_k[:, None] < K) & (o_v[None, :] < V)


@triton.jit
def wait_for_dot(b_sum, count):
    """`b_sum` as it is, which the compiler does not know: so a product that is added to it is over before the loop goes on.

    For loops whose tiles meet other arithmetic beside a product. On Hopper a product may still be under way when the next tiles are
    fetched, for which Triton (3.6, 3.7) then has one buffer too few: it would fill the one that is being read. `python -m lab bench fit`
    looks for such loops.
    """
    return b_sum * tl.where(count > 0, 1.0, 0.0)


SIGNALLING = tl.constexpr(0x7F800001)
"""The bits of a float32 NaN that no arithmetic gives."""


@triton.jit
def convert_layout_like(b_x, b_product):
    """`b_x` in the layout of a float32 product: the same numbers, which the compiler does not know, so that it converts them here and not
    what is made of them."""
    return tl.where(b_product.to(tl.int32, bitcast=True) != SIGNALLING, b_x, 0.0)


@triton.jit
def causal_mask(count, C: tl.constexpr):
    """[C, C], on where the row's token is in the chunk and not before the column's."""
    o_c = tl.arange(0, C)
    return (o_c[:, None] >= o_c[None, :]) & (o_c[:, None] < count)


@triton.jit
def decay_sums(log_decay, first, count, head, H: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """b [C], b_C - b [C] and b_C of a chunk, as powers of two. DECAY says what there is: "none", one per "head" or one per "token"."""
    o_c = tl.arange(0, C)
    if DECAY == "none":
        b_zero = tl.zeros([C], tl.float32)
        return b_zero, b_zero, tl.sum(b_zero, 0)
    elif DECAY == "head":
        step = base_2(tl.load(log_decay + head).to(tl.float32))
        return (o_c + 1) * step, (count - 1 - o_c) * step, count * step
    else:
        b_g = base_2(tl.load(log_decay + (first * H + head) + o_c * H, mask=o_c < count, other=0.0).to(tl.float64))  # [C]
        b_cum, total = tl.cumsum(b_g, 0), tl.sum(b_g, 0)
        return b_cum, total - b_cum, total


@triton.jit
def decay_factors(b_sums, count, C: tl.constexpr):
    """2^sums of each token [C], 0 beyond the chunk's end."""
    return tl.exp2(tl.where(tl.arange(0, C) < count, b_sums.to(tl.float32), -float("inf")))


@triton.jit
def decay_matrix(b_cum, log_decay, count, head, C: tl.constexpr, DECAY: tl.constexpr):
    """D [C, C] = 2^(b_i - b_j) below and on the diagonal, 0 above."""
    if DECAY == "none":
        b_between = tl.zeros([C, C], tl.float32)
    elif DECAY == "head":
        o_c = tl.arange(0, C).to(tl.float32)
        b_between = (o_c[:, None] - o_c[None, :]) * base_2(tl.load(log_decay + head).to(tl.float32))
    else:
        b_high = b_cum.to(tl.float32)
        b_low = (b_cum - b_high).to(tl.float32)  # differences of two float32 parts, since [C, C] in float64 takes its time
        b_between = (b_high[:, None] - b_high[None, :]) + (b_low[:, None] - b_low[None, :])
    return tl.exp2(tl.where(causal_mask(count, C), b_between, -float("inf")))


@triton.jit
def unit_lower_inverse(b_lower, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower [C, C] tile: its 16 x 16 diagonal blocks by substitution, all at once; then, with D the inverse
    of the block diagonal and N = D (what lies below it), (I + N)^-1 D = (I - N)(I + N^2) D, exact since N^4 = 0 for four blocks.
    """
    tl.static_assert(C == 64)
    o_c, o_b = tl.arange(0, C), tl.arange(0, 16)
    m_diagonal = (o_c[:, None] // 16) == (o_c[None, :] // 16)
    b_solved = tl.sum(tl.reshape(tl.where(m_diagonal, -b_lower, 0.0), (4, 16, 4, 16)), 2)  # [4, 16, 16]
    for i in range(1, 16):
        b_row = tl.sum(tl.where(o_b[None, :, None] == i, b_solved, 0.0), 1)  # [4, 16]
        b_row += tl.sum(b_row[:, :, None] * b_solved, 1)
        b_solved = tl.where(o_b[None, :, None] == i, b_row[:, None, :], b_solved)
    b_solved += tl.where(o_b[None, :, None] == o_b[None, None, :], 1.0, 0.0)
    b_d = tl.reshape(tl.broadcast_to(b_solved[:, :, None, :], (4, 16, 4, 16)), (C, C))
    b_d = tl.where(m_diagonal, b_d, 0.0)
    b_n = tl.dot(b_d, tl.where(m_diagonal, 0.0, b_lower), input_precision=PRECISION)
    b_inverse = b_d + tl.dot(b_n, tl.dot(b_n, b_d, input_precision=PRECISION), input_precision=PRECISION)
    return b_inverse - tl.dot(b_n, b_inverse, input_precision=PRECISION)
