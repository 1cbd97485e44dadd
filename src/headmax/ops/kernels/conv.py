"""The short convolution and its silu in Triton: programs go through a span of tokens with the last few inputs in registers, so that each
tensor is read once, by the gradients of inputs and weights together too.

A program that has the whole of a head can also scale it to unit length, and score it for the gates before that: what else would be read
for that again, and written, stays in registers.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from headmax.ops.gated_delta_rule.reference import EPS
from headmax.ops.kernels.common import beside, sigmoid
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, power_of_2
from headmax.ops.library import define_op

SPAN = 64
"""Tokens of a program."""
AHEAD = 4
"""Tokens whose loads are under way together."""
CHANNELS = 256
"""Of a program that does not have a head."""
PER_THREAD = 4
"""Channels, but for heads, which a warp has to itself so that it can sum over them without waiting for others."""


@triton.jit
def place(T, D, BD: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Of this program: its block of channels, these, which of them there are, the batch row, and the first token."""
    n, wide, spans, columns = tl.program_id(0), tl.cdiv(D, BLOCK), tl.cdiv(T, SPAN), tl.arange(0, BD)
    block = n % wide
    channels = block * BLOCK + columns
    return block, channels, (columns < BLOCK) & (channels < D), (n // wide // spans).to(tl.int64), n // wide % spans * SPAN


@triton.jit
def rows_from(x, batch, start, channels, known, T, stride, N: tl.constexpr):
    """N tokens of x [B,T,D], which lie `stride` apart; 0 where there is no such token."""
    rows = ()
    for i in tl.static_range(N):
        t = start + i
        found = tl.load(x + (batch * T + t) * stride + channels, mask=known & (t >= 0) & (t < T), other=0.0)
        rows = beside(rows, found.to(tl.float32))
    return rows


@triton.jit
def load_rows(base, at, step, known, N: tl.constexpr):
    """N rows of numbers, `step` apart."""
    rows = ()
    for i in tl.static_range(N):
        rows = beside(rows, tl.load(base + at + i * step, mask=known, other=0.0).to(tl.float32))
    return rows


@triton.jit
def nothing(N: tl.constexpr, BD: tl.constexpr):
    """N times zeros."""
    zeros = ()
    for _ in tl.static_range(N):
        zeros = beside(zeros, tl.zeros([BD], tl.float32))
    return zeros


@triton.jit
def moved_on(window, x, W: tl.constexpr):
    """A window of W values without its first and with x behind the last."""
    moved = ()
    for i in tl.static_range(1, W):
        moved = beside(moved, window[i])
    return beside(moved, x)


@triton.jit
def reach(before, t, T, W: tl.constexpr, PACKED: tl.constexpr):
    """How many tokens before t are of its sequence, W or more being alike."""
    if PACKED:
        return tl.load(before + t, mask=t < T, other=0).to(tl.int32)
    else:
        return W


@triton.jit
def seen(x, reached, I: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr):
    """Input I of a window as its last token sees it: 0 where its sequence does not reach as far."""
    if PACKED:
        return tl.where(reached >= W - 1 - I, x, 0.0)
    else:
        return x


@triton.jit
def weighted(window, weights, biases, reached, W: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr):
    """bias + Σ_i weight_i input_i"""
    total = window[W - 1] * weights[W - 1]
    for i in tl.static_range(BIAS):
        total += biases[i]
    for i in tl.static_range(W - 1):
        total += seen(window[i], reached, i, W, PACKED) * weights[i]
    return total


@triton.jit
def with_products(sums, x, factors, reached, W: tl.constexpr, PACKED: tl.constexpr):
    """sums_i + x factors_i, for each input of a window that its last token sees."""
    made = ()
    for i in tl.static_range(W):
        made = beside(made, sums[i] + seen(x, reached, i, W, PACKED) * factors[i])
    return made


@triton.jit
def with_term(sums, x, N: tl.constexpr):
    """Each of N sums, and x."""
    made = ()
    for i in tl.static_range(N):
        made = beside(made, sums[i] + x)
    return made


@triton.jit
def short_conv_kernel(
    x, weight, bias, before, scorer, y, scores, stride, T, D, eps,
    W: tl.constexpr, BIAS: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr,
    PACKED: tl.constexpr, UNIT: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """y_t = silu(bias + Σ_i weight_i x_{t-W+1+i}), with BIAS 1 if there is one and else 0; if UNIT of unit length, the block being a head,
    which GATES rows of `scorer` score first."""
    block, channels, known, batch, start = place(T, D, BD, BLOCK, SPAN)
    weights, window = load_rows(weight, channels * W, 1, known, W), rows_from(x, batch, start - W, channels, known, T, stride, W)
    biases = load_rows(bias, channels, 1, known, BIAS)
    scorers = load_rows(scorer, block * (GATES * BLOCK) + tl.arange(0, BD), BLOCK, known, GATES)
    for n in range(start, tl.minimum(start + SPAN, T), AHEAD):
        inputs = rows_from(x, batch, n, channels, known, T, stride, AHEAD)
        for i in tl.static_range(AHEAD):
            window = moved_on(window, inputs[i], W)
            total = weighted(window, weights, biases, reach(before, n + i, T, W, PACKED), W, BIAS, PACKED)
            t_y, at = total * sigmoid(total), batch * T + n + i
            for gate in tl.static_range(GATES):
                score = scores + (at * tl.cdiv(D, BLOCK) + block) * GATES + gate
                tl.store(score, tl.sum(t_y * scorers[gate], 0), mask=n + i < T)
            if UNIT:
                t_y *= tl.rsqrt(tl.sum(t_y * t_y, 0) + eps)
            tl.store(y + at * D + channels, t_y.to(y.dtype.element_ty), mask=known & (n + i < T))


@triton.jit
def short_conv_gradients_kernel(
    x, weight, bias, before, scorer, d_y, d_scores, d_x, d_weight, d_bias, d_scorer, stride, T, D, eps,
    W: tl.constexpr, BIAS: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr,
    PACKED: tl.constexpr, UNIT: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """d_x_t = Σ_i weight_i inner_{t+W-1-i}, with inner the gradient of what goes into the silu; and shares of the weights' gradients,
    d_weight_i = Σ_t inner_t x_{t-W+1+i}, d_bias = Σ_t inner_t and d_scorer = Σ_t d_score_t silu_t.

    A token's d_x is known once W - 1 more inners are: the program goes that much further than its span, whose shares end with it.
    """
    block, channels, known, batch, start = place(T, D, BD, BLOCK, SPAN)
    end, columns = tl.minimum(start + SPAN, T), tl.arange(0, BD)
    weights, window = load_rows(weight, channels * W, 1, known, W), rows_from(x, batch, start - W, channels, known, T, stride, W)
    scorers = load_rows(scorer, block * (GATES * BLOCK) + columns, BLOCK, known, GATES)
    biases, biased = load_rows(bias, channels, 1, known, BIAS), nothing(BIAS, BD)
    shares, scored, open_ = nothing(W, BD), nothing(GATES, BD), nothing(W, BD)  # the last: d_x of W tokens, as far as it is known
    for n in range(start, end + W - 1, AHEAD):
        inputs, gradients = (
            rows_from(x, batch, n, channels, known, T, stride, AHEAD),
            rows_from(d_y, batch, n, channels, known, T, D, AHEAD),
        )
        for i in tl.static_range(AHEAD):
            window = moved_on(window, inputs[i], W)
            reached = reach(before, n + i, T, W, PACKED)
            total = weighted(window, weights, biases, reached, W, BIAS, PACKED)
            gate, inner = sigmoid(total), gradients[i]
            if UNIT:
                swish = total * gate
                root = tl.rsqrt(tl.sum(swish * swish, 0) + eps)
                inner = root * (inner - swish * (root * root * tl.sum(swish * inner, 0)))
                found = load_rows(d_scores, ((batch * T + n + i) * tl.cdiv(D, BLOCK) + block) * GATES, 1, n + i < T, GATES)
                summed = ()
                for j in tl.static_range(GATES):
                    inner += found[j] * scorers[j]
                    summed = beside(summed, scored[j] + tl.where(n + i < end, found[j], 0.0) * swish)
                scored = summed
            inner *= gate * (1.0 + total * (1.0 - gate))
            own = tl.where(n + i < end, inner, 0.0)
            shares = with_products(shares, own, window, reached, W, PACKED)
            biased = with_term(biased, own, BIAS)
            open_ = with_products(moved_on(open_, tl.zeros([BD], tl.float32), W), inner, weights, reached, W, PACKED)
            t = n + i - (W - 1)
            tl.store(d_x + (batch * T + t) * D + channels, open_[0].to(d_x.dtype.element_ty), mask=known & (t >= start) & (t < end))
    span = batch * tl.cdiv(T, SPAN) + start // SPAN
    for i in tl.static_range(W):
        tl.store(d_weight + (span * D + channels) * W + i, shares[i], mask=known)
    for i in tl.static_range(BIAS):
        tl.store(d_bias + span * D + channels, biased[i], mask=known)
    for i in tl.static_range(GATES):
        tl.store(d_scorer + ((span * tl.cdiv(D, BLOCK) + block) * GATES + i) * BLOCK + columns, scored[i], mask=known)


def _spans(x: Tensor) -> int:
    return x.shape[0] * cdiv(x.shape[1], SPAN)


def _regular(x: Tensor) -> Tensor:
    """x with rows at one distance from each other, dense or those of a wider matrix, whatever a compiler made of it."""
    _, time, _ = x.shape
    batch_stride, stride, dense = x.stride()
    return x if dense == 1 and batch_stride == time * stride else x.clone(memory_format=torch.contiguous_format)


@functools.cache
def _sizes(channels: int, width: int, biased: bool, packed: bool, heads: int, gates: int) -> dict[str, int]:
    block = channels // heads if heads else CHANNELS
    columns = power_of_2(block)
    warps = max(1, columns // 256) if heads else CHANNELS // (32 * PER_THREAD)
    given = {"W": width, "BIAS": int(biased), "PACKED": packed, "UNIT": heads > 0, "GATES": gates // heads if heads else 0}
    return given | {"BD": columns, "BLOCK": block, "SPAN": SPAN, "AHEAD": AHEAD, "num_warps": warps}


def _launch(
    kernel,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    scorer: Tensor | None,
    heads: int,
    eps: float,
    *others: Tensor,
) -> None:
    (_, time, channels), gates = x.shape, 0 if scorer is None else scorer.shape[0]
    sizes = _sizes(channels, weight.shape[1], bias is not None, before is not None, heads, gates)
    args = x, weight, bias, before, scorer, *others, x.stride(1), time, channels, eps
    launch(kernel, (_spans(x) * cdiv(channels, sizes["BLOCK"]),), args, sizes)


def _outputs(x: Tensor, scorer: Tensor | None) -> tuple[Tensor, Tensor]:
    """y and scores, not filled in."""
    return x.new_empty(x.shape), x.new_empty((*x.shape[:2], 0 if scorer is None else scorer.shape[0]), dtype=torch.float32)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, scorer: Tensor | None, heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """y, of `heads` of unit length unless that is 0, and [B,T,gates] scores, empty without a scorer [gates,K]."""
    outputs = _outputs(x, scorer)
    _launch(short_conv_kernel, _regular(x), weight, bias, before, scorer, heads, eps, *outputs)
    return outputs


def _gradients(x: Tensor, weight: Tensor, bias: Tensor | None, scorer: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d_x and each span's share of d_weight, d_bias and d_scorer, not filled in; those of what there is not are empty."""
    shapes = ((0,) if y is None else y.shape for y in (weight, bias, scorer))
    shares, biased, scored = (x.new_empty((_spans(x), *shape), dtype=torch.float32) for shape in shapes)
    return x.new_empty(x.shape), shares, biased, scored


def backward(
    d_y: Tensor,
    d_scores: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    scorer: Tensor | None,
    heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients, given = _gradients(x, weight, bias, scorer), (d_y.contiguous(), d_scores.contiguous())
    _launch(short_conv_gradients_kernel, _regular(x), weight, bias, before, scorer, heads, eps, *given, *gradients)
    return gradients


def fake_backward(d_y, d_scores, x, weight, bias, before, scorer, heads, eps):
    return _gradients(x, weight, bias, scorer)


_forward = define_op("short_conv", forward, lambda x, weight, bias, before, scorer, heads, eps: _outputs(x, scorer))
_backward = define_op("short_conv_backward", backward, fake_backward)


class ShortConv(torch.autograd.Function):
    """y, and scores if there is a scorer. Saves its inputs."""

    @staticmethod
    def forward(ctx, x, weight, bias, before, scorer, heads, eps):
        y, scores = _forward(x, weight, bias, before, scorer, heads, eps)
        ctx.save_for_backward(x, weight, bias, before, scorer)
        ctx.heads, ctx.eps = heads, eps
        return y if scorer is None else (y, scores)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y, d_scores=None):
        x, weight, bias, before, scorer = ctx.saved_tensors
        d_scores = d_y.new_empty(0) if d_scores is None else d_scores
        d_x, shares, biased, scored = _backward(d_y, d_scores, x, weight, bias, before, scorer, ctx.heads, ctx.eps)
        d_weight = shares.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = biased.sum(0).to(bias.dtype) if ctx.needs_input_grad[2] else None
        d_scorer = scored.sum(0).to(scorer.dtype) if ctx.needs_input_grad[4] else None
        return d_x, d_weight, d_bias, None, d_scorer, None, None


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
    """silu of the causal depthwise convolution of x [B,T,D] with weight [D,W] and bias [D]; `before` [T] counts a packed token's
    predecessors."""
    return ShortConv.apply(x, weight.contiguous(), bias, before, None, 0, 0.0)


def unit_conv(x: Tensor, weight: Tensor, before: Tensor | None, scorer: Tensor | None, heads: int) -> tuple[Tensor, Tensor | None]:
    """As `short_conv`, then each of the heads scaled to unit length; and their scores [B,T,gates] before that, by scorer [gates,K]."""
    if scorer is None:
        return ShortConv.apply(x, weight.contiguous(), None, before, None, heads, EPS), None
    return ShortConv.apply(x, weight.contiguous(), None, before, scorer.contiguous(), heads, EPS)
