"""SwiGLU in Triton, from the product that gives its gate and its input side by side, to which gradients go straight back.

As with the read-out (norm.py), the last projection belongs to the op: its gradient needs what the gradient kernel has at hand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from headmax.ops.kernels.common import sigmoid
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv
from headmax.ops.library import define_op

ROWS, COLUMNS = 4, 256
"""Tokens and channels of a program."""


@triton.jit
def place(tokens, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Offsets of this program's tile in [tokens, WIDTH] and in the first half of [tokens, 2 WIDTH], and its mask."""
    blocks: tl.constexpr = (WIDTH + BC - 1) // BC
    rows, columns = tl.program_id(0) // blocks * BR + tl.arange(0, BR), tl.program_id(0) % blocks * BC + tl.arange(0, BC)[None, :]
    at = rows.to(tl.int64)[:, None] * WIDTH
    return at + columns, 2 * at + columns, (rows[:, None] < tokens) & (columns < WIDTH)


@triton.jit
def swiglu_kernel(joint, h, tokens, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """h = silu(gate) x, gate and x being the halves of `joint`"""
    at, left, inside = place(tokens, WIDTH, BR, BC)
    gate = tl.load(joint + left, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(joint + left + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + at, (gate * sigmoid(gate) * x).to(h.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_gradients_kernel(joint, d_h, d_joint, h, tokens, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """The gradient of `joint`, and h once more."""
    at, left, inside = place(tokens, WIDTH, BR, BC)
    gate = tl.load(joint + left, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(joint + left + WIDTH, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_h + at, mask=inside, other=0.0).to(tl.float32)
    open_ = sigmoid(gate)
    swish = gate * open_
    tl.store(h + at, (swish * x).to(h.dtype.element_ty), mask=inside)
    tl.store(d_joint + left, (d * x * open_ * (1.0 + gate * (1.0 - open_))).to(d_joint.dtype.element_ty), mask=inside)
    tl.store(d_joint + left + WIDTH, (d * swish).to(d_joint.dtype.element_ty), mask=inside)


def _launch(kernel, h: Tensor, *tensors: Tensor) -> None:
    tokens, width = h.shape
    grid = (cdiv(tokens, ROWS) * cdiv(width, COLUMNS),)
    launch(kernel, grid, (*tensors, h, tokens), {"WIDTH": width, "BR": ROWS, "BC": COLUMNS})


def forward(joint: Tensor, down: Tensor) -> Tensor:
    h = joint.new_empty((joint.shape[0], down.shape[1]))
    _launch(swiglu_kernel, h, joint.contiguous())
    return h @ down.T


def backward(d_h: Tensor, joint: Tensor) -> tuple[Tensor, Tensor]:
    d_joint, h = joint.new_empty(joint.shape), d_h.new_empty(d_h.shape)
    _launch(swiglu_gradients_kernel, h, joint.contiguous(), d_h.contiguous(), d_joint)
    return d_joint, h


_swiglu = define_op("swiglu", forward, lambda joint, down: joint.new_empty(joint.shape[0], down.shape[0]))
_swiglu_backward = define_op("swiglu_backward", backward, lambda d_h, joint: (joint.new_empty(joint.shape), d_h.new_empty(d_h.shape)))


class SwiGLU(torch.autograd.Function):
    """See `swiglu`. Saves its inputs."""

    @staticmethod
    def forward(ctx, joint, down):
        ctx.save_for_backward(joint, down)
        return _swiglu(joint.flatten(0, -2), down).unflatten(0, joint.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output):
        joint, down = ctx.saved_tensors
        d_output = d_output.flatten(0, -2)
        d_joint, h = _swiglu_backward(d_output @ down, joint.flatten(0, -2))
        return d_joint.view(joint.shape), d_output.T @ h if ctx.needs_input_grad[1] else None


def swiglu(joint: Tensor, down: Tensor) -> Tensor:
    """(silu(gate) x) down^T, gate and x being the halves of joint [...,2 I]; down [E,I]."""
    return SwiGLU.apply(joint, down)
