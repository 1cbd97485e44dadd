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

from headmax.ops.gated_delta_rule.reference import EPS
from headmax.ops.kernels.common import append, sigmoid
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, power_of_2
from headmax.ops.kernels.unit_length import inverse_length
from headmax.ops.library import define_op, once_differentiable

SPAN = 64
"""Tokens of a program."""
AHEAD = 4
"""Tokens whose loads are under way together."""
CHANNELS = 256
"""Of a program that does not have a head."""
PER_THREAD = 4
"""Channels, but for heads, which a warp has to itself so that it can sum over them without waiting for others."""


@triton.jit
def program_span(T, D, BD: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """This program's block of channels, their offsets and mask [BD], its batch row, and its first token."""
    n, blocks, spans, o_b = tl.program_id(0), tl.cdiv(D, BLOCK), tl.cdiv(T, SPAN), tl.arange(0, BD)
    block = n % blocks
    o_d = block * BLOCK + o_b
    return block, o_d, (o_b < BLOCK) & (o_d < D), (n // blocks // spans).to(tl.int64), n // blocks % spans * SPAN


@triton.jit
def load_tokens(x, batch, start, o_d, m_d, T, stride, N: tl.constexpr):
    """N tokens of x [B,T,D], which lie `stride` apart, N times [BD]; 0 where there is no such token."""
    rows = ()
    for i in tl.static_range(N):
        t = start + i
        b_x = tl.load(x + (batch * T + t) * stride + o_d, mask=m_d & (t >= 0) & (t < T), other=0.0)  # [BD]
        rows = append(rows, b_x.to(tl.float32))
    return rows


@triton.jit
def load_rows(base, o_row, step, m_row, N: tl.constexpr):
    """N rows of numbers, `step` apart, N times [BD]."""
    rows = ()
    for i in tl.static_range(N):
        rows = append(rows, tl.load(base + o_row + i * step, mask=m_row, other=0.0).to(tl.float32))  # [BD]
    return rows


@triton.jit
def zero_rows(N: tl.constexpr, BD: tl.constexpr):
    """N times zeros [BD]."""
    rows = ()
    for _ in tl.static_range(N):
        rows = append(rows, tl.zeros([BD], tl.float32))
    return rows


@triton.jit
def shift(window, b_x, W: tl.constexpr):
    """A window of W values without its first and with x behind the last."""
    shifted = ()
    for i in tl.static_range(1, W):
        shifted = append(shifted, window[i])
    return append(shifted, b_x)


@triton.jit
def count_before(before, t, T, W: tl.constexpr):
    """How many tokens before t are of its sequence, W or more being alike."""
    if before is not None:
        return tl.load(before + t, mask=t < T, other=0).to(tl.int32)
    else:
        return W


@triton.jit
def masked_input(b_x, before_t, I: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr):
    """Input I of a window as its last token sees it: 0 where its sequence does not reach as far."""
    if PACKED:
        return tl.where(before_t >= W - 1 - I, b_x, 0.0)
    else:
        return b_x


@triton.jit
def convolve(window, taps, biases, before_t, W: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr):
    """bias + Σ_i taps_i input_i of a window of W inputs, in training and in decoding."""
    b_y = window[W - 1] * taps[W - 1]
    for i in tl.static_range(BIAS):
        b_y += biases[i]
    for i in tl.static_range(W - 1):
        b_y += masked_input(window[i], before_t, i, W, PACKED) * taps[i]
    return b_y


@triton.jit
def add_products(sums, b_x, factors, before_t, W: tl.constexpr, PACKED: tl.constexpr):
    """sums_i + x factors_i, for each input of a window that its last token sees."""
    added = ()
    for i in tl.static_range(W):
        added = append(added, sums[i] + masked_input(b_x, before_t, i, W, PACKED) * factors[i])
    return added


@triton.jit
def add_to_each(sums, b_x, N: tl.constexpr):
    """Each of N sums, and x."""
    added = ()
    for i in tl.static_range(N):
        added = append(added, sums[i] + b_x)
    return added


@triton.jit
def short_conv_kernel(
    x, weight, bias, before, scorer, y, scores, stride, T, D, eps,
    W: tl.constexpr, BIAS: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr,
    UNIT: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """y_t = silu(bias + Σ_i weight_i x_{t-W+1+i}), with BIAS 1 if there is one and else 0; if UNIT of unit length, the block being a head,
    which GATES rows of `scorer` score first.

    In: x [B,T,D], weight [D,W], bias [D], before [T] or None, scorer [heads GATES, BLOCK]. Out: y [B,T,D], scores [B,T,heads GATES].
    """
    PACKED: tl.constexpr = before is not None
    block, o_d, m_d, batch, start = program_span(T, D, BD, BLOCK, SPAN)
    taps, window = load_rows(weight, o_d * W, 1, m_d, W), load_tokens(x, batch, start - W, o_d, m_d, T, stride, W)
    biases = load_rows(bias, o_d, 1, m_d, BIAS)
    scorers = load_rows(scorer, block * (GATES * BLOCK) + tl.arange(0, BD), BLOCK, m_d, GATES)
    for n in range(start, tl.minimum(start + SPAN, T), AHEAD):
        inputs = load_tokens(x, batch, n, o_d, m_d, T, stride, AHEAD)
        for i in tl.static_range(AHEAD):
            window = shift(window, inputs[i], W)
            b_z = convolve(window, taps, biases, count_before(before, n + i, T, W), W, BIAS, PACKED)
            b_y, o_t = b_z * sigmoid(b_z), batch * T + n + i
            for gate in tl.static_range(GATES):
                p_score = scores + (o_t * tl.cdiv(D, BLOCK) + block) * GATES + gate
                tl.store(p_score, tl.sum(b_y * scorers[gate], 0), mask=n + i < T)
            if UNIT:
                b_y *= inverse_length(b_y, eps)
            tl.store(y + o_t * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d & (n + i < T))


@triton.jit
def short_conv_gradients_kernel(
    x, weight, bias, before, scorer, d_y, d_scores, d_x, d_weight, d_bias, d_scorer, stride, T, D, eps,
    W: tl.constexpr, BIAS: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr,
    UNIT: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """d_x_t = Σ_i weight_i d_z_{t+W-1-i}, with z what goes into the silu; and each span's shares of the weights' gradients,
    d_weight_i = Σ_t d_z_t x_{t-W+1+i}, d_bias = Σ_t d_z_t and d_scorer = Σ_t d_score_t silu_t.

    A token's d_x is known once W - 1 more d_z are: the program goes that much further than its span, whose shares end with it.
    """
    PACKED: tl.constexpr = before is not None
    block, o_d, m_d, batch, start = program_span(T, D, BD, BLOCK, SPAN)
    end, o_b = tl.minimum(start + SPAN, T), tl.arange(0, BD)
    taps, window = load_rows(weight, o_d * W, 1, m_d, W), load_tokens(x, batch, start - W, o_d, m_d, T, stride, W)
    scorers = load_rows(scorer, block * (GATES * BLOCK) + o_b, BLOCK, m_d, GATES)
    biases, d_biases = load_rows(bias, o_d, 1, m_d, BIAS), zero_rows(BIAS, BD)
    d_taps, d_scorers, d_inputs = zero_rows(W, BD), zero_rows(GATES, BD), zero_rows(W, BD)  # the last: d_x of W tokens, as far as known
    for n in range(start, end + W - 1, AHEAD):
        inputs, gradients = load_tokens(x, batch, n, o_d, m_d, T, stride, AHEAD), load_tokens(d_y, batch, n, o_d, m_d, T, D, AHEAD)
        for i in tl.static_range(AHEAD):
            window = shift(window, inputs[i], W)
            before_t = count_before(before, n + i, T, W)
            b_z = convolve(window, taps, biases, before_t, W, BIAS, PACKED)
            b_open, b_dz = sigmoid(b_z), gradients[i]
            if UNIT:
                b_swish = b_z * b_open
                inverse = inverse_length(b_swish, eps)
                b_dz = inverse * (b_dz - b_swish * (inverse * inverse * tl.sum(b_swish * b_dz, 0)))
                o_score = ((batch * T + n + i) * tl.cdiv(D, BLOCK) + block) * GATES
                of_scores = load_rows(d_scores, o_score, 1, n + i < T, GATES)
                summed = ()
                for j in tl.static_range(GATES):
                    b_dz += of_scores[j] * scorers[j]
                    summed = append(summed, d_scorers[j] + tl.where(n + i < end, of_scores[j], 0.0) * b_swish)
                d_scorers = summed
            b_dz *= b_open * (1.0 + b_z * (1.0 - b_open))
            b_in_span = tl.where(n + i < end, b_dz, 0.0)
            d_taps = add_products(d_taps, b_in_span, window, before_t, W, PACKED)
            d_biases = add_to_each(d_biases, b_in_span, BIAS)
            d_inputs = add_products(shift(d_inputs, tl.zeros([BD], tl.float32), W), b_dz, taps, before_t, W, PACKED)
            t = n + i - (W - 1)
            tl.store(d_x + (batch * T + t) * D + o_d, d_inputs[0].to(d_x.dtype.element_ty), mask=m_d & (t >= start) & (t < end))
    span = batch * tl.cdiv(T, SPAN) + start // SPAN
    for i in tl.static_range(W):
        tl.store(d_weight + (span * D + o_d) * W + i, d_taps[i], mask=m_d)
    for i in tl.static_range(BIAS):
        tl.store(d_bias + span * D + o_d, d_biases[i], mask=m_d)
    for i in tl.static_range(GATES):
        tl.store(d_scorer + ((span * tl.cdiv(D, BLOCK) + block) * GATES + i) * BLOCK + o_b, d_scorers[i], mask=m_d)


@triton.jit
def convolve_next(b_y, taps, bias, past, o_n, o_d, m_n, rows, m_y, C: tl.constexpr, W: tl.constexpr):
    """One token's silu(bias + Σ_i taps_i input_i), y [rows, outputs] being the last input; `past` [rows, W - 1, C] moves on by one.

    In: taps [outputs, W] and bias [outputs] at `o_n`; outputs are the channels `o_d` of C.
    """
    BIAS: tl.constexpr = 0 if bias is None else 1
    p_past = past + rows[:, None].to(tl.int64) * ((W - 1) * C) + o_d[None, :]
    b_last = tl.load(taps + o_n * W + W - 1, mask=m_n, other=0.0).to(tl.float32)  # [outputs]
    biases, b_taps, window = load_rows(bias, o_n, 1, m_n, BIAS), (), ()
    for i in tl.static_range(W - 1):
        b_x = tl.load(p_past + i * C, mask=m_y, other=0.0)  # [rows, outputs]
        window = append(window, b_x.to(tl.float32))
        b_taps = append(b_taps, tl.load(taps + o_n * W + i, mask=m_n, other=0.0).to(tl.float32))  # [outputs]
        tl.debug_barrier()  # every thread has read a slot before one writes it
        if i > 0:
            tl.store(p_past + (i - 1) * C, b_x, mask=m_y)
    tl.store(p_past + (W - 2) * C, b_y.to(past.dtype.element_ty), mask=m_y)
    b_z = convolve(append(window, b_y), append(b_taps, b_last), biases, 0, W, BIAS, False)
    return b_z * tl.sigmoid(b_z)


def _spans(x: Tensor) -> int:
    return x.shape[0] * cdiv(x.shape[1], SPAN)


def _regular(x: Tensor) -> Tensor:
    """x with rows at one distance from each other, dense or those of a wider matrix, whatever a compiler made of it."""
    _, time, _ = x.shape
    batch_stride, stride, dense = x.stride()
    return x if dense == 1 and batch_stride == time * stride else x.clone(memory_format=torch.contiguous_format)


@functools.cache
def _sizes(channels: int, width: int, biased: bool, heads: int, gates: int) -> dict[str, int]:
    block = channels // heads if heads else CHANNELS
    columns = power_of_2(block)
    warps = max(1, columns // 256) if heads else CHANNELS // (32 * PER_THREAD)
    given = {"W": width, "BIAS": int(biased), "UNIT": heads > 0, "GATES": gates // heads if heads else 0}
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
    sizes = _sizes(channels, weight.shape[1], bias is not None, heads, gates)
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
