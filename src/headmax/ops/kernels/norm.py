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
from torch.autograd.function import once_differentiable

from headmax.ops.kernels.common import sigmoid
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, power_of_2, processors
from headmax.ops.library import define_op

TILE = 2048
"""Numbers of a tile, of as many rows as that makes."""
WARPS = 8
PROGRAMS = 2
"""Of the gradient kernel, on each processor."""
STAGES = 3
"""Of its loop: tiles that are on their way, and the one that is computed on. Rows wider than TILE would take too much shared memory so."""


@triton.jit
def place(start, rows, H: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, stride):
    """Of BR rows from `start` on, H to a token: their numbers, offsets into [rows, WIDTH] and into [tokens, ...] of that stride, mask."""
    index, columns = start + tl.arange(0, BR), tl.arange(0, BW)[None, :]
    at, inside = index.to(tl.int64)[:, None], (index[:, None] < rows) & (columns < WIDTH)
    return index, at * WIDTH + columns, at // H * stride + at % H * WIDTH + columns, inside


@triton.jit
def inverse_root(x, eps, WIDTH: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of each row, [rows, 1]."""
    return tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]


@triton.jit
def rms_norm_kernel(
    x, delta, swish, read, weight, total, y, rows, stride, eps,
    H: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, SUM: tl.constexpr, SWISH: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """y = weight x / sqrt(mean(x²) + eps), x + delta for x if SUM, which is stored too; times read and silu(swish) where there are such."""
    index, at, beside, inside = place(tl.program_id(0) * BR, rows, H, WIDTH, BR, BW, stride)
    columns = tl.arange(0, BW)
    t_x = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if SWISH:
        t_g = tl.load(swish + beside, mask=inside, other=0.0).to(tl.float32)
    if SUM:
        t_x += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = t_x.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        t_x = rounded.to(tl.float32)
    t_w = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    factor = inverse_root(t_x, eps, WIDTH)
    if READ:
        factor *= tl.load(read + index, mask=index < rows, other=0.0).to(tl.float32)[:, None]
    t_y = t_x * factor * t_w
    if SWISH:
        t_y *= t_g * sigmoid(t_g)
    tl.store(y + at, t_y.to(y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_gradients_kernel(
    d_y, d_total, x, swish, read, weight, d_x, d_swish, d_read, d_weight, y, rows, stride, eps,
    H: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, SUM: tl.constexpr, SWISH: tl.constexpr, READ: tl.constexpr,
    AGAIN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Gradients of all inputs, of d_weight this program's share; if SUM, d_total comes to d_x; if AGAIN, y itself once more."""
    columns, share = tl.arange(0, BW), tl.zeros([BR, BW], tl.float32)  # summed over rows at the end alone: threads must meet for that
    t_w = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    for start in tl.range(tl.program_id(0) * BR, rows, tl.num_programs(0) * BR, num_stages=AHEAD):
        index, at, beside, inside = place(start, rows, H, WIDTH, BR, BW, stride)
        t_x = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        t_d = tl.load(d_y + at, mask=inside, other=0.0).to(tl.float32)
        if SWISH:
            t_g = tl.load(swish + beside, mask=inside, other=0.0).to(tl.float32)
        if SUM:
            t_t = tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        root = inverse_root(t_x, eps, WIDTH)
        unit = t_x * root
        if SWISH:
            open_ = sigmoid(t_g)
            t_s = t_g * open_
            d_s = t_d * unit * t_w
            t_d *= t_s
        if READ:
            t_r = tl.load(read + index, mask=index < rows, other=0.0).to(tl.float32)
            tl.store(d_read + index, tl.sum(t_d * unit * t_w, 1), mask=index < rows)
            t_d *= t_r[:, None]
        if SWISH:
            if READ:
                d_s *= t_r[:, None]
            d_g = d_s * open_ * (1.0 + t_g * (1.0 - open_))
            tl.store(d_swish + at, d_g.to(d_swish.dtype.element_ty), mask=inside)
        if AGAIN:
            t_y = unit * t_w
            if READ:
                t_y *= t_r[:, None]
            if SWISH:
                t_y *= t_s
            tl.store(y + at, t_y.to(y.dtype.element_ty), mask=inside)
        share += t_d * unit
        t_d *= t_w
        t_d = root * (t_d - unit * (tl.sum(t_d * unit, 1) / WIDTH)[:, None])
        if SUM:
            t_d += t_t
        tl.store(d_x + at, t_d.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_weight + tl.program_id(0) * WIDTH + columns, tl.sum(share, 0), mask=columns < WIDTH)


@functools.cache
def _block(width: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    columns = power_of_2(width)
    return max(1, TILE // columns), columns


def _tiles(x: Tensor) -> int:
    """How many there are; x is [tokens, heads, width]."""
    tokens, heads, width = x.shape
    return cdiv(tokens * heads, _block(index(width))[0])


def _sizes(x: Tensor, swish: Tensor | None = None, read: Tensor | None = None) -> tuple[int, int, dict[str, int | bool]]:
    """Rows, the distance of the swish gate's, and what kernels are specialised to; x is [tokens, heads, width]."""
    tokens, heads, width = x.shape
    tall, columns = _block(width)
    sizes = {"H": heads, "WIDTH": width, "BR": tall, "BW": columns, "num_warps": WARPS}
    sizes |= {"SWISH": swish is not None, "READ": read is not None}
    return tokens * heads, 0 if swish is None else swish.stride(0), sizes


def _shares(x: Tensor) -> Tensor:
    """For each program of the gradient kernel its part of d_weight, to be summed by who has use for it."""
    return x.new_empty((min(PROGRAMS * processors(x.device), _tiles(x)), x.shape[2]), dtype=torch.float32)


def _norm(
    x: Tensor, delta: Tensor | None, swish: Tensor | None, read: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor | None, Tensor]:
    """x + delta, if there is a delta, and y, both as x is."""
    (rows, stride, sizes), total, y = _sizes(x, swish, read), None if delta is None else torch.empty_like(x), torch.empty_like(x)
    args = x, delta, swish, read, weight, total, y, rows, stride, eps
    launch(rms_norm_kernel, (_tiles(x),), args, sizes | {"SUM": delta is not None})
    return total, y


def _gradients(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, swish: Tensor | None, read: Tensor | None, weight: Tensor, eps: float, again: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d_x, d_swish, d_read, the programs' shares of d_weight and, `again`, y; what there is not is empty."""
    rows, stride, sizes = _sizes(x, swish, read)
    d_x, d_swish, y = (torch.empty_like(x) if wanted else x.new_empty(0) for wanted in (True, swish is not None, again))
    d_read = x.new_empty(0 if read is None else read.shape, dtype=torch.float32)
    shares = _shares(x)
    sizes |= {"SUM": d_total is not None, "AGAIN": again, "AHEAD": STAGES if sizes["BR"] * sizes["BW"] <= TILE else 1}
    args = d_y, d_total, x, swish, read, weight, d_x, d_swish, d_read, shares, y, rows, stride, eps
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
