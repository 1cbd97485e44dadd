"""Weights of fused products: cast and stacked in one launch; their gradients are split and cast in another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headmax.ops.library import define_op, once_differentiable
from headmax.ops.registry import autocast_dtype

ALIGNMENT = 8
"""Rows of a stacked matrix are padded to a multiple of this: tensor cores want 16 bytes."""


def joint_rows(group: Sequence[Tensor]) -> int:
    """Rows of a group's matrices when stacked, with padding."""
    rows = sum(matrix.shape[0] for matrix in group)
    return rows if len(group) == 1 else -(-rows // ALIGNMENT) * ALIGNMENT


def grouped(matrices: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[Tensor]]:
    """The first sizes[0] matrices, the next sizes[1], and so on."""
    ends = list(itertools.accumulate(sizes))
    return [matrices[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def row_blocks(joint: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
    """Views of the first rows[0] rows of a stacked matrix, the next rows[1], and so on; the padding comes last, if there is any."""
    if len(rows) == 1:
        return [joint]
    filling = joint.shape[0] - sum(rows)
    return joint.split_with_sizes([*rows, filling] if filling else list(rows))


def empty_joint(matrices: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return [group[0].new_empty((joint_rows(group), *group[0].shape[1:]), dtype=dtype) for group in grouped(matrices, sizes)]


def cast_and_join(matrices: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    joint, parts = empty_joint(matrices, sizes, dtype), list[Tensor]()
    for whole, group in zip(joint, grouped(matrices, sizes), strict=True):
        blocks = row_blocks(whole, [matrix.shape[0] for matrix in group])
        parts += blocks[: len(group)]
        if len(blocks) > len(group):
            blocks[-1].zero_()
    torch._foreach_copy_(parts, list(matrices))
    return joint


def split_and_cast(joint: Sequence[Tensor], rows: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    parts: list[Tensor] = []
    for whole, size in zip(joint, sizes, strict=True):
        parts += row_blocks(whole, rows[len(parts) : len(parts) + size])[:size]
    matrices = [torch.empty_like(part, dtype=dtype, memory_format=torch.contiguous_format) for part in parts]
    torch._foreach_copy_(matrices, parts)
    return matrices


def fake_split(joint: Sequence[Tensor], rows: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    groups = [n for n, size in enumerate(sizes) for _ in range(size)]
    return [joint[n].new_empty((number, *joint[n].shape[1:]), dtype=dtype) for n, number in zip(groups, rows, strict=True)]


_cast_and_join = define_op("cast_and_join", cast_and_join, empty_joint)
_split_and_cast = define_op("split_and_cast", split_and_cast, fake_split)


class CastAndJoin(torch.autograd.Function):
    """Casts matrices and stacks those of a group. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, sizes: tuple[int, ...], dtype: torch.dtype, *matrices: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.rows, ctx.dtype = sizes, [matrix.shape[0] for matrix in matrices], matrices[0].dtype
        return tuple(_cast_and_join(matrices, sizes, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_joint: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _split_and_cast(d_joint, ctx.rows, ctx.sizes, ctx.dtype)
        needed = ctx.needs_input_grad[2:]
        return None, None, *(gradient if need else None for gradient, need in zip(gradients, needed, strict=True))


def product_matrices(x: Tensor, groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Matrices [n_i, E] in the dtype of their products with x, those of a group stacked into one [Σ n_i, E] and padded with zeros to a
    multiple of ALIGNMENT. One product with a stacked matrix reads x once, and its backward pass computes one gradient of x.
    """
    dtype = x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device) or x.dtype  # autocast leaves float64 alone
    matrices = [matrix for group in groups for matrix in group]
    stored = {matrix.dtype for matrix in matrices}
    if len(stored) == 1 and dtype not in stored:
        return CastAndJoin.apply(tuple(map(len, groups)), dtype, *matrices)
    joint = []
    for group in groups:
        cast = [matrix.to(dtype) for matrix in group]
        if len(cast) > 1:
            filling = joint_rows(group) - sum(matrix.shape[0] for matrix in group)
            cast = [torch.cat([*cast, cast[0].new_zeros((filling, *cast[0].shape[1:]))])]
        joint += cast
    return tuple(joint)
