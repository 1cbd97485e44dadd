"""RMS norms in Triton, one kernel each way: of a sum in the residual stream; and of each head's read-out, its gates multiplied on.

The gradient kernel reads each tensor once for all it gives, the weight's gradient too, which it sums over many rows. The output projection
belongs to the read-out's op: its own gradient needs what the forward pass handed it, and that comes out of the gradient kernel once more
at the price of a store, where keeping it would take as much memory as the read-out itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.triton_common import on_its_device, sigmoid
from headmax.ops.triton_tiles import processors

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


def _sizes(x: Tensor, swish: Tensor | None = None, read: Tensor | None = None) -> tuple[int, dict[str, int | bool]]:
    """How many tiles there are, and what kernels are launched with; x is [tokens, heads, width]."""
    rows, width = x.shape[0] * x.shape[1], triton.next_power_of_2(x.shape[2])
    tall = max(1, TILE // width)
    sizes = {"rows": rows, "stride": 0 if swish is None else swish.stride(0), "H": x.shape[1], "WIDTH": x.shape[2], "BR": tall, "BW": width}
    return triton.cdiv(rows, tall), sizes | {"SWISH": swish is not None, "READ": read is not None, "num_warps": WARPS}


def _shares(x: Tensor) -> Tensor:
    """For each program of the gradient kernel its part of d_weight, to be summed by who has use for it."""
    return x.new_empty(min(PROGRAMS * processors(x.device), _sizes(x)[0]), x.shape[2], dtype=torch.float32)


def _norm(
    x: Tensor, delta: Tensor | None, swish: Tensor | None, read: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor | None, Tensor]:
    """x + delta, if there is a delta, and y, both as x is."""
    (tiles, sizes), total, y = _sizes(x, swish, read), None if delta is None else torch.empty_like(x), torch.empty_like(x)
    rms_norm_kernel[(tiles,)](x, delta, swish, read, weight, total, y, eps=eps, SUM=delta is not None, **sizes)
    return total, y


def _gradients(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, swish: Tensor | None, read: Tensor | None, weight: Tensor, eps: float, again: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d_x, d_swish, d_read, the programs' shares of d_weight and, `again`, y; what there is not is empty."""
    _, sizes = _sizes(x, swish, read)
    made = [torch.empty_like(x) if wanted else x.new_empty(0) for wanted in (True, swish is not None, again)]
    d_read = x.new_empty(0 if read is None else read.shape, dtype=torch.float32)
    shares = _shares(x)
    rms_norm_gradients_kernel[(len(shares),)](
        d_y, d_total, x, swish, read, weight, made[0], made[1], d_read, shares, made[2], eps=eps, SUM=d_total is not None, AGAIN=again,
        AHEAD=STAGES if sizes["BR"] * sizes["BW"] <= TILE else 1, **sizes,
    )  # fmt: skip
    return made[0], made[1], d_read, shares, made[2]


def _rows(x: Tensor) -> Tensor:
    """x [..., width] as [tokens, 1, width]."""
    return x.contiguous().view(-1, 1, x.shape[-1])


@torch.library.custom_op("headmax::rms_norm", mutates_args=())
@on_its_device
def _rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, y = _norm(_rows(x), None if delta is None else _rows(delta), None, None, weight, eps)
    return x.new_empty(0) if total is None else total.view(x.shape), y.view(x.shape)


@_rms_norm.register_fake
def _(x, delta, weight, eps):
    return x.new_empty(0 if delta is None else x.shape), x.new_empty(x.shape)


@torch.library.custom_op("headmax::rms_norm_backward", mutates_args=())
@on_its_device
def _rms_norm_backward(d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    d_total = None if d_total is None else _rows(d_total)
    d_x, _, _, shares, _ = _gradients(_rows(d_y), d_total, _rows(x), None, None, weight, eps, again=False)
    return d_x.view(x.shape), shares


@_rms_norm_backward.register_fake
def _(d_y, d_total, x, weight, eps):
    return x.new_empty(x.shape), _shares(_rows(x))


def _save_norm(ctx, inputs, output) -> None:
    x, delta, weight, ctx.eps = inputs
    ctx.summed = delta is not None
    ctx.set_materialize_grads(False)
    if not ctx.summed:
        ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(output[0] if ctx.summed else x, weight)


def _norm_gradient(ctx, d_total, d_y):
    x, weight = ctx.saved_tensors
    d_y = torch.zeros_like(x) if d_y is None else d_y
    d_x, shares = _rms_norm_backward(d_y, d_total if ctx.summed else None, x, weight, ctx.eps)
    return d_x, d_x if ctx.summed else None, shares.sum(0).to(weight.dtype), None


_rms_norm.register_autograd(_norm_gradient, setup_context=_save_norm)


def rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta (x without one), and that normalised; x [..., width], weight [width]."""
    total, y = _rms_norm(x, delta, weight, eps)
    return x if delta is None else total, y


class _Beside(torch.autograd.Function):
    """x and its norm, for who uses both: the gradient of x as it goes on comes to that through the norm in the kernel, not in a pass of
    its own.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x.view_as(x), _rms_norm(x, None, weight, eps)[1]

    @staticmethod
    def backward(ctx, d_x, d_y):
        x, weight = ctx.saved_tensors
        d_x, shares = _rms_norm_backward(d_y, d_x, x, weight, ctx.eps)
        return d_x, shares.sum(0).to(weight.dtype), None


def norm_beside(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, and x normalised."""
    return _Beside.apply(x, weight, eps)


def _rows_dense(swish: Tensor | None) -> Tensor | None:
    """A swish gate whose rows are dense; they may lie apart."""
    return swish if swish is None or swish.stride(1) == 1 else swish.contiguous()


@torch.library.custom_op("headmax::read_out", mutates_args=())
@on_its_device
def _read_out(o: Tensor, swish: Tensor | None, read: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> Tensor:
    read = None if read is None else read.contiguous()
    return _norm(o.contiguous(), None, _rows_dense(swish), read, weight, eps)[1].flatten(1) @ out.T


@_read_out.register_fake
def _(o, swish, read, weight, out, eps):
    return o.new_empty(o.shape[0], out.shape[0])


@torch.library.custom_op("headmax::read_out_backward", mutates_args=())
@on_its_device
def _read_out_backward(
    d_y: Tensor, o: Tensor, swish: Tensor | None, read: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    o, swish, read = o.contiguous(), _rows_dense(swish), None if read is None else read.contiguous()
    d_o, d_swish, d_read, shares, y = _gradients(d_y.contiguous(), None, o, swish, read, weight, eps, again=True)
    return d_o, d_swish if swish is None else d_swish.flatten(1), d_read, shares, y.flatten(1)


@_read_out_backward.register_fake
def _(d_y, o, swish, read, weight, eps):
    d_read = o.new_empty(0 if read is None else read.shape, dtype=torch.float32)
    flat = o.new_empty(o.shape[0], o.shape[1] * o.shape[2])
    return o.new_empty(o.shape), o.new_empty(0 if swish is None else flat.shape), d_read, _shares(o), flat


def _save_read_out(ctx, inputs, output) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _read_out_gradient(ctx, d_mixed):
    o, swish, read, weight, out = ctx.saved_tensors
    d_o, d_swish, d_read, shares, y = _read_out_backward((d_mixed @ out).view_as(o), o, swish, read, weight, ctx.eps)
    d_swish, d_read = None if swish is None else d_swish, None if read is None else d_read.to(read.dtype)
    return d_o, d_swish, d_read, shares.sum(0).to(weight.dtype), d_mixed.T @ y, None


_read_out.register_autograd(_read_out_gradient, setup_context=_save_read_out)


def read_out(o: Tensor, swish: Tensor | None, read: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> Tensor:
    """What heads read out, o [B,T,H,V], each normalised, times gates read [B,T,H] and silu(swish [B,T,H V]), times out^T [E,H V]."""
    flat = [None if x is None else x.flatten(0, 1) for x in (o, swish, read)]
    return _read_out(*flat, weight, out, eps).unflatten(0, o.shape[:2])
