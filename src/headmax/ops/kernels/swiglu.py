"""SwiGLU in Triton, from the product that gives its gate and its input side by side, to which gradients go straight back.

As with the read-out (norm.py), the last projection belongs to the op: its gradient needs what the gradient kernel has at hand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.common import sigmoid
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv
from headmax.ops.library import define_op, once_differentiable

ROWS, COLUMNS = 4, 256
"""Tokens and channels of a program."""


@triton.jit
def program_tile(tokens, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Offsets of this program's tile in [tokens, WIDTH] and in the first half of [tokens, 2 WIDTH], and its mask [BR, BC]."""
    blocks: tl.constexpr = (WIDTH + BC - 1) // BC
    o_r, o_c = tl.program_id(0) // blocks * BR + tl.arange(0, BR), tl.program_id(0) % blocks * BC + tl.arange(0, BC)[None, :]
    o_row = o_r.to(tl.int64)[:, None] * WIDTH
    return o_row + o_c, 2 * o_row + o_c, (o_r[:, None] < tokens) & (o_c < WIDTH)


@triton.jit
def swiglu_kernel(joint, h, tokens, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """h = silu(gate) x [tokens, WIDTH], gate and x being the halves of `joint` [tokens, 2 WIDTH]."""
    o_h, o_gate, m_h = program_tile(tokens, WIDTH, BR, BC)
    b_gate = tl.load(joint + o_gate, mask=m_h, other=0.0).to(tl.float32)  # [BR, BC]
    b_x = tl.load(joint + o_gate + WIDTH, mask=m_h, other=0.0).to(tl.float32)  # [BR, BC]
    tl.store(h + o_h, (b_gate * sigmoid(b_gate) * b_x).to(h.dtype.element_ty), mask=m_h)


@triton.jit
def swiglu_gradients_kernel(joint, d_h, d_joint, h, tokens, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """d_joint [tokens, 2 WIDTH] from d_h [tokens, WIDTH], and h once more."""
    o_h, o_gate, m_h = program_tile(tokens, WIDTH, BR, BC)
    b_gate = tl.load(joint + o_gate, mask=m_h, other=0.0).to(tl.float32)  # [BR, BC]
    b_x = tl.load(joint + o_gate + WIDTH, mask=m_h, other=0.0).to(tl.float32)  # [BR, BC]
    b_d = tl.load(d_h + o_h, mask=m_h, other=0.0).to(tl.float32)  # [BR, BC]
    b_open = sigmoid(b_gate)
    b_swish = b_gate * b_open
    tl.store(h + o_h, (b_swish * b_x).to(h.dtype.element_ty), mask=m_h)
    b_d_gate = b_d * b_x * b_open * (1.0 + b_gate * (1.0 - b_open))
    tl.store(d_joint + o_gate, b_d_gate.to(d_joint.dtype.element_ty), mask=m_h)
    tl.store(d_joint + o_gate + WIDTH, (b_d * b_swish).to(d_joint.dtype.element_ty), mask=m_h)


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
