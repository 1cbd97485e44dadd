"""What the Triton kernels share: where chunks lie, and how tiles are cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.packing import CHUNK


def block(width: int, most: int) -> int:
    """The tile width for `width` channels: a power of two, at least 16 (what a matrix unit takes) and at most `most`."""
    return min(most, max(64, triton.next_power_of_2(width)))


def dot_precision(dtype: torch.dtype) -> str:
    """Float32 inputs get float32 products; the matrix units' shorter mode would lose half the digits."""
    return "ieee" if dtype == torch.float32 else "tf32"


def check_kernel_limits(q: Tensor, v: Tensor) -> None:
    if q.dtype == torch.float64:
        raise ValueError("backend 'triton': q, k and v must be float32, bfloat16 or float16, got torch.float64; use 'chunkwise'")
    if q.shape[3] > 256 or v.shape[3] > 512:
        raise ValueError(f"backend 'triton': heads are at most 256 (key) and 512 (value) wide, got {q.shape[3]} and {v.shape[3]}")


@dataclass(frozen=True)
class Layout:
    """How a call's tokens lie: one sequence per batch row, or packed as the tables say."""

    batch: int
    time: int
    table: Tensor | None
    """[chunks, 2] first token and number of tokens of each chunk, for packed sequences."""
    starts: Tensor | None
    """[sequences + 1] first chunk of each sequence."""

    @property
    def packed(self) -> bool:
        return self.table is not None

    @property
    def sequences(self) -> int:
        return self.batch if self.starts is None else self.starts.shape[0] - 1

    @property
    def chunks(self) -> int:
        return self.batch * triton.cdiv(self.time, CHUNK) if self.table is None else self.table.shape[0]


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
        last = first_chunk + chunks - 1
        end = tl.load(table + 2 * last).to(tl.int64) + tl.load(table + 2 * last + 1).to(tl.int64)
        return first_chunk, chunks, tl.load(table + 2 * first_chunk).to(tl.int64), end
    else:
        chunks = tl.cdiv(T, C)
        token = sequence.to(tl.int64) * T
        return sequence * chunks, chunks, token, token + T
