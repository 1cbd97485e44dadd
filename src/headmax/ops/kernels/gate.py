"""The gate in Triton: one pass over x for all heads; and the gates of scores that a product gave, in one kernel each way."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.common import add_both
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, power_of_2
from headmax.ops.library import define_op, once_differentiable

TOKENS = 16
"""Tokens of a program."""
WIDTH = 128
"""Channels it takes at a time."""
PROGRAMS = 512
"""Into how many partial sums the gradient of the weight is split."""


@triton.jit
def scores_to_gates(b_scores, o_h, scale, H: tl.constexpr, SOFTMAX: tl.constexpr):
    """scale softmax(scores) or scale sigmoid(scores), of scores [rows, heads]."""
    if SOFTMAX:
        b_scores = tl.where(o_h[None, :] < H, b_scores, -float("inf"))
        b_powers = tl.exp(b_scores - tl.max(b_scores, 1)[:, None])
        return scale * b_powers / tl.sum(b_powers, 1)[:, None]
    else:
        return scale / (1.0 + tl.exp(-b_scores))


@triton.jit
def larger_both(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def load_gates_of_head(
    reads, writes, head, temperature, scale, H: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr
):
    """A token's two gates of one head in decoding, from where all heads' scores are, in parts [H, PARTS].

    What `scores_to_gates` does, for both gates at once, since every sum makes the program wait.
    """
    if KIND == "uniform":
        return scale / H, scale / H
    else:
        o_h, o_p = tl.arange(0, BH), tl.arange(0, BP)
        o_x, m_x = o_h[:, None] * PARTS + o_p[None, :], (o_h[:, None] < H) & (o_p[None, :] < PARTS)
        b_reads, b_writes = tl.load(reads + o_x, mask=m_x, other=0.0), tl.load(writes + o_x, mask=m_x, other=0.0)  # [BH, BP]
        b_reads, b_writes = tl.reduce((b_reads.to(tl.float32), b_writes.to(tl.float32)), 1, add_both)
        b_reads *= temperature
        b_writes *= temperature
        if KIND == "softmax":
            b_reads, b_writes = tl.where(o_h < H, b_reads, -float("inf")), tl.where(o_h < H, b_writes, -float("inf"))
            most_read, most_written = tl.reduce((b_reads, b_writes), 0, larger_both)
            b_reads, b_writes = tl.exp(b_reads - most_read), tl.exp(b_writes - most_written)
            b_one_read, b_one_write = tl.where(o_h == head, b_reads, 0.0), tl.where(o_h == head, b_writes, 0.0)
            read, write, all_read, all_written = tl.reduce((b_one_read, b_one_write, b_reads, b_writes), 0, add_four)
            return scale * read / all_read, scale * write / all_written
        else:
            read, write = tl.reduce((tl.where(o_h == head, b_reads, 0.0), tl.where(o_h == head, b_writes, 0.0)), 0, add_both)
            return 2 * scale / H * tl.sigmoid(read), 2 * scale / H * tl.sigmoid(write)


@triton.jit
def head_gate_kernel(
    x, weight, gate, tokens, temperature, scale,
    H: tl.constexpr, GROUP: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """gate = scale softmax_h(temperature <x_h, weight_h>) [tokens, H], GROUP gates scored on each head of x [tokens, H / GROUP, D]."""
    o_t, o_h = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, HP)
    b_scores = tl.zeros([BT, HP], tl.float32)
    for head in tl.static_range(H):
        b_score = tl.zeros([BT], tl.float32)
        for start in range(0, D, BD):
            o_d = start + tl.arange(0, BD)
            m_x = (o_t[:, None] < tokens) & (o_d[None, :] < D)
            b_x = tl.load(x + (o_t[:, None] * (H // GROUP) + head // GROUP) * D + o_d[None, :], mask=m_x, other=0.0)  # [BT, BD]
            b_w = tl.load(weight + head * D + o_d, mask=o_d < D, other=0.0)  # [BD]
            b_score += tl.sum(b_x.to(tl.float32) * b_w.to(tl.float32)[None, :], 1)
        b_scores = tl.where(o_h[None, :] == head, b_score[:, None], b_scores)
    b_gate = scores_to_gates(b_scores * temperature, o_h, scale, H, SOFTMAX)
    tl.store(gate + o_t[:, None] * H + o_h[None, :], b_gate, mask=(o_t[:, None] < tokens) & (o_h[None, :] < H))


@triton.jit
def head_gate_gradients_kernel(
    x, weight, d_score, d_x, d_weight, tokens,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """d_x_h = d_score weight_h, and this program's share of d_weight_h = Σ_t d_score x_h [programs, H, D], from d_score [tokens, H]."""
    head, o_d = tl.program_id(1), tl.program_id(2) * BD + tl.arange(0, BD)
    for start in range(tl.program_id(0) * BT, tokens, tl.num_programs(0) * BT):
        o_t = start + tl.arange(0, BT).to(tl.int64)
        m_x = (o_t[:, None] < tokens) & (o_d[None, :] < D)
        o_x = (o_t[:, None] * (H // GROUP) + head) * D + o_d[None, :]
        b_x, b_dx = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32), tl.zeros([BT, BD], tl.float32)  # [BT, BD]
        for n in tl.static_range(GROUP):
            gate = head * GROUP + n
            b_ds = tl.load(d_score + o_t * H + gate, mask=o_t < tokens, other=0.0)  # [BT]
            b_w = tl.load(weight + gate * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)  # [BD]
            b_dx += b_ds[:, None] * b_w[None, :]
            p_dw = d_weight + (tl.program_id(0) * H + gate) * D + o_d
            b_dw = tl.load(p_dw, mask=o_d < D, other=0.0)  # [BD]
            tl.store(p_dw, b_dw + tl.sum(b_ds[:, None] * b_x, 0), mask=o_d < D)
        tl.store(d_x + o_x, b_dx.to(d_x.dtype.element_ty), mask=m_x)


@functools.cache
def _sizes(heads: int, heads_in: int, width: int) -> dict[str, int]:
    """One head of x serves all gates where x is a hidden state."""
    return {"H": heads, "GROUP": heads // heads_in, "D": width, "BT": TOKENS, "BD": min(WIDTH, max(16, power_of_2(width)))}


def _shape(x: Tensor, weight: Tensor) -> tuple[int, dict[str, int]]:
    """How many tokens there are, and what kernels are specialised to."""
    batch, time, *heads_in, width = x.shape
    return batch * time, _sizes(weight.shape[0], heads_in[0] if heads_in else 1, width)


def gate_forward(x: Tensor, weight: Tensor, temperature: float, scale: float, softmax: bool) -> Tensor:
    tokens, sizes = _shape(x, weight)
    gate = x.new_empty((*x.shape[:2], sizes["H"]), dtype=torch.float32)
    constants = {**sizes, "HP": max(2, power_of_2(sizes["H"])), "SOFTMAX": softmax}
    launch(head_gate_kernel, (cdiv(tokens, TOKENS),), (x, weight, gate, tokens, temperature, scale), constants)
    return gate


def gate_backward(
    d_gate: Tensor, gate: Tensor, x: Tensor, weight: Tensor, temperature: float, scale: float, softmax: bool
) -> tuple[Tensor, Tensor]:
    """d_x and d_weight, by way of the scores' gradient."""
    (tokens, sizes), d_x = _shape(x, weight), torch.empty_like(x)
    d_score = split_backward([gate], [d_gate], temperature, scale, softmax, torch.float32)
    programs = min(PROGRAMS, cdiv(tokens, TOKENS))
    d_weight = x.new_zeros((programs, *weight.shape), dtype=torch.float32)
    grid = programs, sizes["H"] // sizes["GROUP"], cdiv(sizes["D"], sizes["BD"])
    launch(head_gate_gradients_kernel, grid, (x, weight, d_score, d_x, d_weight, tokens), sizes)
    return d_x, d_weight.sum(0).to(weight.dtype)


@triton.jit
def split_gates_kernel(
    scores, first, second, tokens, stride, temperature, scale,
    N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BT: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """N gates [tokens, H] from scores [tokens, N H] that lie `stride` apart."""
    o_t, o_h = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None], tl.arange(0, HP)
    m_x = (o_t < tokens) & (o_h[None, :] < H)
    for n in tl.static_range(N):
        b_scores = tl.load(scores + o_t * stride + n * H + o_h[None, :], mask=m_x, other=0.0).to(tl.float32)  # [BT, HP]
        b_gate = scores_to_gates(b_scores * temperature, o_h, scale, H, SOFTMAX)
        if n == 0:
            tl.store(first + o_t * H + o_h[None, :], b_gate, mask=m_x)
        else:
            tl.store(second + o_t * H + o_h[None, :], b_gate, mask=m_x)


@triton.jit
def split_gates_gradient_kernel(
    first, second, d_first, d_second, d_scores, tokens, temperature, scale,
    N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BT: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """d_scores [tokens, N H] from N gates and their gradients [tokens, H]."""
    o_t, o_h = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None], tl.arange(0, HP)
    m_x = (o_t < tokens) & (o_h[None, :] < H)
    o_x = o_t * H + o_h[None, :]
    for n in tl.static_range(N):
        if n == 0:
            b_gate, b_d = tl.load(first + o_x, mask=m_x, other=0.0), tl.load(d_first + o_x, mask=m_x, other=0.0)  # [BT, HP]
        else:
            b_gate, b_d = tl.load(second + o_x, mask=m_x, other=0.0), tl.load(d_second + o_x, mask=m_x, other=0.0)  # [BT, HP]
        if SOFTMAX:
            b_ds = temperature * b_gate * (b_d - tl.sum(b_gate * b_d, 1)[:, None] / scale)
        else:
            b_ds = temperature * b_gate * (1.0 - b_gate / scale) * b_d
        tl.store(d_scores + o_t * (N * H) + n * H + o_h[None, :], b_ds.to(d_scores.dtype.element_ty), mask=m_x)


SCORED = 64
"""Tokens of a program that is given the scores."""


def _split_sizes(tokens: int, number: int, heads: int, softmax: bool) -> tuple[tuple[int], dict[str, int]]:
    sizes = {"N": number, "H": heads, "HP": max(2, power_of_2(heads)), "BT": SCORED, "SOFTMAX": softmax}
    return (cdiv(tokens, SCORED),), sizes


def split_forward(scores: Tensor, number: int, temperature: float, scale: float, softmax: bool) -> list[Tensor]:
    batch, time, width = scores.shape
    flat = scores.flatten(0, 1)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    gates = [scores.new_empty((batch, time, width // number), dtype=torch.float32) for _ in range(number)]
    grid, sizes = _split_sizes(len(flat), number, width // number, softmax)
    launch(split_gates_kernel, grid, (flat, gates[0], gates[-1], len(flat), flat.stride(0), temperature, scale), sizes)
    return gates


def split_backward(
    gates: list[Tensor], d_gates: list[Tensor], temperature: float, scale: float, softmax: bool, dtype: torch.dtype
) -> Tensor:
    (batch, time, heads), number = gates[0].shape, len(gates)
    d_gates = [d.contiguous() for d in d_gates]
    d_scores = gates[0].new_empty((batch, time, number * heads), dtype=dtype)
    grid, sizes = _split_sizes(batch * time, number, heads, softmax)
    args = gates[0], gates[-1], d_gates[0], d_gates[-1], d_scores, batch * time, temperature, scale
    launch(split_gates_gradient_kernel, grid, args, sizes)
    return d_scores


_forward = define_op(
    "head_gate",
    gate_forward,
    lambda x, weight, temperature, scale, softmax: x.new_empty(*x.shape[:2], weight.shape[0], dtype=torch.float32),
)
_backward = define_op(
    "head_gate_backward",
    gate_backward,
    lambda d_gate, gate, x, weight, temperature, scale, softmax: (torch.empty_like(x), torch.empty_like(weight)),
)
_split = define_op(
    "split_gates",
    split_forward,
    lambda scores, number, temperature, scale, softmax: [
        scores.new_empty(*scores.shape[:2], scores.shape[2] // number, dtype=torch.float32) for _ in range(number)
    ],
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_split_backward = define_op(
    "split_gates_backward",
    split_backward,
    lambda gates, d_gates, temperature, scale, softmax, dtype: gates[0].new_empty(
        *gates[0].shape[:2], len(gates) * gates[0].shape[2], dtype=dtype
    ),
)


class Gate(torch.autograd.Function):
    """The gate of x by weight. Saves both, and the gate."""

    @staticmethod
    def forward(ctx, x, weight, temperature, scale, softmax):
        gate = _forward(x, weight, temperature, scale, softmax)
        ctx.save_for_backward(x, weight, gate)
        ctx.factors = temperature, scale, softmax
        return gate

    @staticmethod
    @once_differentiable
    def backward(ctx, d_gate):
        x, weight, gate = ctx.saved_tensors
        return *_backward(d_gate, gate, x, weight, *ctx.factors), None, None, None


class SplitGates(torch.autograd.Function):
    """The gates of scores. Saves the gates."""

    @staticmethod
    def forward(ctx, scores, number, temperature, scale, softmax):
        gates = _split(scores, number, temperature, scale, softmax)
        ctx.save_for_backward(*gates)
        ctx.factors = temperature, scale, softmax, scores.dtype
        return tuple(gates)

    @staticmethod
    @once_differentiable
    def backward(ctx, *d_gates):
        return _split_backward(list(ctx.saved_tensors), list(d_gates), *ctx.factors), None, None, None, None


def head_gate(x: Tensor, weight: Tensor, temperature: float, scale: float, kind: str) -> Tensor:
    top = scale if kind == "softmax" else 2 * scale / weight.shape[0]
    return Gate.apply(x.contiguous(), weight.contiguous(), temperature, top, kind == "softmax")


def split_gates(scores: Tensor, number: int, temperature: float, scale: float, kind: str) -> list[Tensor]:
    top = scale if kind == "softmax" else 2 * scale * number / scores.shape[2]
    return list(SplitGates.apply(scores, number, temperature, top, kind == "softmax"))
