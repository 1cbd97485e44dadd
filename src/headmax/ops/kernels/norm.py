"""RMS norms in Triton, one kernel each way: of a sum in the residual stream; and of each head's read-out, its gates multiplied on.

The gradient kernel reads each tensor once for all it gives, the weight's gradient too, which it sums over many rows. The output projection
belongs to the read-out's op: its own gradient needs what the forward pass handed it, and that comes out of the gradient kernel once more
at the price of a store, where keeping it would take as much memory as the read-out itself.
"""

from __future__ import annotations

import functools
from operator import index

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.common import sigmoid
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, power_of_2, processors
from headmax.ops.library import define_op, once_differentiable

TILE = 2048
"""Numbers of a tile, of as many rows as that makes."""
WARPS = 8
PROGRAMS = 2
"""Of the gradient kernel, on each processor."""
STAGES = 3
"""Of its loop: tiles that are on their way, and the one that is computed on. Rows wider than TILE would take too much shared memory so."""


@triton.jit
def row_tile(start, rows, stride, H: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Of BR rows from `start` on, H to a token: their numbers, offsets into [rows, WIDTH] and into [tokens, ...] of that stride, mask."""
    o_r, o_w = start + tl.arange(0, BR), tl.arange(0, BW)[None, :]
    o_wide, m_x = o_r.to(tl.int64)[:, None], (o_r[:, None] < rows) & (o_w < WIDTH)
    return o_r, o_wide * WIDTH + o_w, o_wide // H * stride + o_wide % H * WIDTH + o_w, m_x


@triton.jit
def inverse_rms(b_x, eps, WIDTH: tl.constexpr, AXIS: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) over an axis of WIDTH numbers."""
    return tl.rsqrt(tl.sum(b_x * b_x, AXIS) / WIDTH + eps)


@triton.jit
def rms_norm_kernel(
    x, delta, swish, read, weight, total, y, rows, stride, eps,
    H: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """y = weight x / sqrt(mean(x²) + eps), times read and silu(swish) where there are such.

    In: x, y [rows, WIDTH], H rows to a token; swish [tokens, H WIDTH] of any stride, read [rows]. With a `delta`, x + delta stands for x,
    and is stored in `total`; what is normalised is that number as it was rounded.
    """
    o_r, o_x, o_g, m_x = row_tile(tl.program_id(0) * BR, rows, stride, H, WIDTH, BR, BW)
    o_w = tl.arange(0, BW)
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)  # [BR, BW]
    if swish is not None:
        b_g = tl.load(swish + o_g, mask=m_x, other=0.0).to(tl.float32)  # [BR, BW]
    if delta is not None:
        b_x += tl.load(delta + o_x, mask=m_x, other=0.0).to(tl.float32)  # [BR, BW]
        b_rounded = b_x.to(total.dtype.element_ty)
        tl.store(total + o_x, b_rounded, mask=m_x)
        b_x = b_rounded.to(tl.float32)
    b_w = tl.load(weight + o_w, mask=o_w < WIDTH, other=0.0).to(tl.float32)[None, :]  # [1, BW]
    b_factor = inverse_rms(b_x, eps, WIDTH, 1)[:, None]
    if read is not None:
        b_factor *= tl.load(read + o_r, mask=o_r < rows, other=0.0).to(tl.float32)[:, None]  # [BR, 1]
    b_y = b_x * b_factor * b_w
    if swish is not None:
        b_y *= b_g * sigmoid(b_g)
    tl.store(y + o_x, b_y.to(y.dtype.element_ty), mask=m_x)


@triton.jit
def rms_norm_gradients_kernel(
    d_y, d_total, x, swish, read, weight, d_x, d_swish, d_read, d_weight, y, rows, stride, eps,
    H: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Gradients of all inputs, of the weight this program's share d_weight [programs, WIDTH]; a `d_total` comes to d_x; y, if there is room
    for it, is made once more. Programs go through many rows, with AHEAD tiles on their way."""
    o_w, b_share = tl.arange(0, BW), tl.zeros([BR, BW], tl.float32)  # summed over rows at the end alone: threads must meet for that
    b_w = tl.load(weight + o_w, mask=o_w < WIDTH, other=0.0).to(tl.float32)[None, :]  # [1, BW]
    for start in tl.range(tl.program_id(0) * BR, rows, tl.num_programs(0) * BR, num_stages=AHEAD):
        o_r, o_x, o_g, m_x = row_tile(start, rows, stride, H, WIDTH, BR, BW)
        b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)  # [BR, BW]
        b_d = tl.load(d_y + o_x, mask=m_x, other=0.0).to(tl.float32)  # [BR, BW]
        if swish is not None:
            b_g = tl.load(swish + o_g, mask=m_x, other=0.0).to(tl.float32)  # [BR, BW]
        if d_total is not None:
            b_total = tl.load(d_total + o_x, mask=m_x, other=0.0).to(tl.float32)  # [BR, BW]
        b_inverse = inverse_rms(b_x, eps, WIDTH, 1)[:, None]
        b_unit = b_x * b_inverse
        if swish is not None:
            b_open = sigmoid(b_g)
            b_swish = b_g * b_open
            b_d_swish = b_d * b_unit * b_w
            b_d *= b_swish
        if read is not None:
            b_read = tl.load(read + o_r, mask=o_r < rows, other=0.0).to(tl.float32)  # [BR]
            tl.store(d_read + o_r, tl.sum(b_d * b_unit * b_w, 1), mask=o_r < rows)
            b_d *= b_read[:, None]
        if swish is not None:
            if read is not None:
                b_d_swish *= b_read[:, None]
            b_dg = b_d_swish * b_open * (1.0 + b_g * (1.0 - b_open))
            tl.store(d_swish + o_x, b_dg.to(d_swish.dtype.element_ty), mask=m_x)
        if y is not None:
            b_y = b_unit * b_w
            if read is not None:
                b_y *= b_read[:, None]
            if swish is not None:
                b_y *= b_swish
            tl.store(y + o_x, b_y.to(y.dtype.element_ty), mask=m_x)
        b_share += b_d * b_unit
        b_d *= b_w
        b_d = b_inverse * (b_d - b_unit * (tl.sum(b_d * b_unit, 1) / WIDTH)[:, None])
        if d_total is not None:
            b_d += b_total
        tl.store(d_x + o_x, b_d.to(d_x.dtype.element_ty), mask=m_x)
    tl.store(d_weight + tl.program_id(0) * WIDTH + o_w, tl.sum(b_share, 0), mask=o_w < WIDTH)


@functools.cache
def _block(width: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    columns = power_of_2(width)
    return max(1, TILE // columns), columns


def _tiles(x: Tensor) -> int:
    """How many there are; x is [tokens, heads, width]."""
    tokens, heads, width = x.shape
    return cdiv(tokens * heads, _block(index(width))[0])


def _sizes(x: Tensor, swish: Tensor | None) -> tuple[int, int, dict[str, int]]:
    """Rows, the distance of the swish gate's, and what kernels are specialised to; x is [tokens, heads, width]."""
    tokens, heads, width = x.shape
    tall, columns = _block(width)
    sizes = {"H": heads, "WIDTH": width, "BR": tall, "BW": columns, "num_warps": WARPS}
    return tokens * heads, 0 if swish is None else swish.stride(0), sizes


def _shares(x: Tensor) -> Tensor:
    """For each program of the gradient kernel its part of d_weight, to be summed by who has use for it."""
    return x.new_empty((min(PROGRAMS * processors(x.device), _tiles(x)), x.shape[2]), dtype=torch.float32)


def _norm(
    x: Tensor, delta: Tensor | None, swish: Tensor | None, read: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor | None, Tensor]:
    """x + delta, if there is a delta, and y, both as x is."""
    (rows, stride, sizes), total, y = _sizes(x, swish), None if delta is None else torch.empty_like(x), torch.empty_like(x)
    args = x, delta, swish, read, weight, total, y, rows, stride, eps
    launch(rms_norm_kernel, (_tiles(x),), args, sizes)
    return total, y


def _gradients(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, swish: Tensor | None, read: Tensor | None, weight: Tensor, eps: float, again: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d_x, d_swish, d_read, the programs' shares of d_weight and, `again`, y; what there is not is empty."""
    rows, stride, sizes = _sizes(x, swish)
    d_x, d_swish, y = (torch.empty_like(x) if wanted else x.new_empty(0) for wanted in (True, swish is not None, again))
    d_read = x.new_empty(0 if read is None else read.shape, dtype=torch.float32)
    shares = _shares(x)
    sizes |= {"AHEAD": STAGES if sizes["BR"] * sizes["BW"] <= TILE else 1}
    args = d_y, d_total, x, swish, read, weight, d_x, d_swish, d_read, shares, y if again else None, rows, stride, eps
    launch(rms_norm_gradients_kernel, (len(shares),), args, sizes)
    return d_x, d_swish, d_read, shares, y


def _rows(x: Tensor) -> Tensor:
    """x [..., width] as [tokens, 1, width]."""
    return x.contiguous().view(-1, 1, x.shape[-1])


def norm_forward(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, empty without one, and y."""
    total, y = _norm(_rows(x), None if delta is None else _rows(delta), None, None, weight, eps)
    return x.new_empty(0) if total is None else total.view(x.shape), y.view(x.shape)


def norm_backward(d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    d_total = None if d_total is None else _rows(d_total)
    d_x, _, _, shares, _ = _gradients(_rows(d_y), d_total, _rows(x), None, None, weight, eps, again=False)
    return d_x.view(x.shape), shares


_rms_norm = define_op(
    "rms_norm", norm_forward, lambda x, delta, weight, eps: (x.new_empty(0 if delta is None else x.shape), x.new_empty(x.shape))
)
_rms_norm_backward = define_op(
    "rms_norm_backward", norm_backward, lambda d_y, d_total, x, weight, eps: (x.new_empty(x.shape), _shares(_rows(x)))
)


def _weight_gradient(ctx, n: int, shares: Tensor, weight: Tensor) -> Tensor | None:
    """That of the n-th input, if it is asked for."""
    return shares.sum(0).to(weight.dtype) if ctx.needs_input_grad[n] else None


class Norm(torch.autograd.Function):
    """x normalised. Saves x."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _rms_norm(x, None, weight, eps)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        x, weight = ctx.saved_tensors
        d_x, shares = _rms_norm_backward(d_y, None, x, weight, ctx.eps)
        return d_x, _weight_gradient(ctx, 1, shares, weight), None


class NormOfSum(torch.autograd.Function):
    """x + delta, and that normalised. Saves the sum."""

    @staticmethod
    def forward(ctx, x, delta, weight, eps):
        total, y = _rms_norm(x, delta, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total, d_y):
        total, weight = ctx.saved_tensors
        d_x, shares = _rms_norm_backward(d_y, d_total, total, weight, ctx.eps)
        return d_x, d_x, _weight_gradient(ctx, 2, shares, weight), None


class NormAndInput(torch.autograd.Function):
    """x and its norm, for who uses both: the gradient of x as it goes on comes to that through the norm in the kernel, not in a pass of
    its own.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x.view_as(x), _rms_norm(x, None, weight, eps)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_x, d_y):
        x, weight = ctx.saved_tensors
        d_x, shares = _rms_norm_backward(d_y, d_x, x, weight, ctx.eps)
        return d_x, _weight_gradient(ctx, 1, shares, weight), None


def rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta (x without one), and that normalised; x [..., width], weight [width]."""
    return (x, Norm.apply(x, weight, eps)) if delta is None else NormOfSum.apply(x, delta, weight, eps)


def norm_with_residual(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, and x normalised."""
    return NormAndInput.apply(x, weight, eps)


def _rows_dense(swish: Tensor | None) -> Tensor | None:
    """A swish gate whose rows are dense; they may lie apart."""
    return swish if swish is None or swish.stride(1) == 1 else swish.contiguous()


def read_out_forward(o: Tensor, swish: Tensor | None, read: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> Tensor:
    read = None if read is None else read.contiguous()
    return _norm(o.contiguous(), None, _rows_dense(swish), read, weight, eps)[1].flatten(1) @ out.T


def read_out_backward(
    d_y: Tensor, o: Tensor, swish: Tensor | None, read: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    o, swish, read = o.contiguous(), _rows_dense(swish), None if read is None else read.contiguous()
    d_o, d_swish, d_read, shares, y = _gradients(d_y.contiguous(), None, o, swish, read, weight, eps, again=True)
    return d_o, d_swish if swish is None else d_swish.flatten(1), d_read, shares, y.flatten(1)


def fake_read_out_backward(d_y, o, swish, read, weight, eps):
    d_read = o.new_empty(0 if read is None else read.shape, dtype=torch.float32)
    flat = o.new_empty(o.shape[0], o.shape[1] * o.shape[2])
    return o.new_empty(o.shape), o.new_empty(0 if swish is None else flat.shape), d_read, _shares(o), flat


_read_out = define_op("read_out", read_out_forward, lambda o, swish, read, weight, out, eps: o.new_empty(o.shape[0], out.shape[0]))
_read_out_backward = define_op("read_out_backward", read_out_backward, fake_read_out_backward)


class ReadOut(torch.autograd.Function):
    """See `read_out`. Saves its inputs."""

    @staticmethod
    def forward(ctx, o, swish, read, weight, out, eps):
        ctx.save_for_backward(o, swish, read, weight, out)
        ctx.eps = eps
        flat = [None if x is None else x.flatten(0, 1) for x in (o, swish, read)]
        return _read_out(*flat, weight, out, eps).unflatten(0, o.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx, d_mixed):
        o, swish, read, weight, out = ctx.saved_tensors
        d_mixed, flat = d_mixed.flatten(0, 1), [None if x is None else x.flatten(0, 1) for x in (o, swish, read)]
        d_o, d_swish, d_read, shares, y = _read_out_backward((d_mixed @ out).view_as(flat[0]), *flat, weight, ctx.eps)
        d_swish = None if swish is None else d_swish.view(swish.shape)
        d_read = None if read is None else d_read.view(read.shape).to(read.dtype)
        d_out = d_mixed.T @ y if ctx.needs_input_grad[4] else None
        return d_o.view(o.shape), d_swish, d_read, _weight_gradient(ctx, 3, shares, weight), d_out, None


def read_out(o: Tensor, swish: Tensor | None, read: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> Tensor:
    """What heads read out, o [B,T,H,V], each normalised, times gates read [B,T,H] and silu(swish [B,T,H V]), times out^T [E,H V]."""
    return ReadOut.apply(o, swish, read, weight, out, eps)
