"""The gate in Triton: one pass over x for all heads; and the gates of scores that a product gave, in one kernel each way."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, power_of_2
from headmax.ops.library import define_op

TOKENS = 16
"""Tokens of a program."""
WIDTH = 128
"""Channels it takes at a time."""
PROGRAMS = 512
"""Into how many partial sums the gradient of the weight is split."""


@triton.jit
def gates_of(scores, heads, scale, H: tl.constexpr, SOFTMAX: tl.constexpr):
    """scale softmax(scores) or scale sigmoid(scores), of scores [rows, heads]."""
    if SOFTMAX:
        scores = tl.where(heads[None, :] < H, scores, -float("inf"))
        powers = tl.exp(scores - tl.max(scores, 1)[:, None])
        return scale * powers / tl.sum(powers, 1)[:, None]
    else:
        return scale / (1.0 + tl.exp(-scores))


@triton.jit
def head_gate_kernel(
    x, weight, gate, tokens, temperature, scale,
    H: tl.constexpr, GROUP: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """gate = scale softmax_h(temperature <x_h, weight_h>), GROUP gates scored on each head of x [tokens, H / GROUP, D]."""
    rows, heads = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, HP)
    scores = tl.zeros([BT, HP], tl.float32)
    for head in tl.static_range(H):
        score = tl.zeros([BT], tl.float32)
        for start in range(0, D, BD):
            columns = start + tl.arange(0, BD)
            inside = (rows[:, None] < tokens) & (columns[None, :] < D)
            t_x = tl.load(x + (rows[:, None] * (H // GROUP) + head // GROUP) * D + columns[None, :], mask=inside, other=0.0)
            t_w = tl.load(weight + head * D + columns, mask=columns < D, other=0.0)
            score += tl.sum(t_x.to(tl.float32) * t_w.to(tl.float32)[None, :], 1)
        scores = tl.where(heads[None, :] == head, score[:, None], scores)
    value = gates_of(scores * temperature, heads, scale, H, SOFTMAX)
    tl.store(gate + rows[:, None] * H + heads[None, :], value, mask=(rows[:, None] < tokens) & (heads[None, :] < H))


@triton.jit
def head_gate_gradients_kernel(
    x, weight, d_score, d_x, d_weight, tokens,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """d_x_h = d_score weight_h, and this program's share of d_weight_h = Σ_t d_score x_h."""
    head, columns = tl.program_id(1), tl.program_id(2) * BD + tl.arange(0, BD)
    for start in range(tl.program_id(0) * BT, tokens, tl.num_programs(0) * BT):
        rows = start + tl.arange(0, BT).to(tl.int64)
        inside = (rows[:, None] < tokens) & (columns[None, :] < D)
        at = (rows[:, None] * (H // GROUP) + head) * D + columns[None, :]
        t_x, gradient = tl.load(x + at, mask=inside, other=0.0).to(tl.float32), tl.zeros([BT, BD], tl.float32)
        for n in tl.static_range(GROUP):
            gate = head * GROUP + n
            t_s = tl.load(d_score + rows * H + gate, mask=rows < tokens, other=0.0)
            t_w = tl.load(weight + gate * D + columns, mask=columns < D, other=0.0).to(tl.float32)
            gradient += t_s[:, None] * t_w[None, :]
            share = d_weight + (tl.program_id(0) * H + gate) * D + columns
            before = tl.load(share, mask=columns < D, other=0.0)
            tl.store(share, before + tl.sum(t_s[:, None] * t_x, 0), mask=columns < D)
        tl.store(d_x + at, gradient.to(d_x.dtype.element_ty), mask=inside)


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
    """N gates from scores [tokens, N H] that lie `stride` apart."""
    rows, heads = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None], tl.arange(0, HP)
    inside = (rows < tokens) & (heads[None, :] < H)
    for n in tl.static_range(N):
        t_s = tl.load(scores + rows * stride + n * H + heads[None, :], mask=inside, other=0.0).to(tl.float32)
        gate = gates_of(t_s * temperature, heads, scale, H, SOFTMAX)
        if n == 0:
            tl.store(first + rows * H + heads[None, :], gate, mask=inside)
        else:
            tl.store(second + rows * H + heads[None, :], gate, mask=inside)


@triton.jit
def split_gates_gradient_kernel(
    first, second, d_first, d_second, d_scores, tokens, temperature, scale,
    N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BT: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """d_scores [tokens, N H]."""
    rows, heads = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None], tl.arange(0, HP)
    inside = (rows < tokens) & (heads[None, :] < H)
    at = rows * H + heads[None, :]
    for n in tl.static_range(N):
        if n == 0:
            gate, d_gate = tl.load(first + at, mask=inside, other=0.0), tl.load(d_first + at, mask=inside, other=0.0)
        else:
            gate, d_gate = tl.load(second + at, mask=inside, other=0.0), tl.load(d_second + at, mask=inside, other=0.0)
        if SOFTMAX:
            d_score = temperature * gate * (d_gate - tl.sum(gate * d_gate, 1)[:, None] / scale)
        else:
            d_score = temperature * gate * (1.0 - gate / scale) * d_gate
        tl.store(d_scores + rows * (N * H) + n * H + heads[None, :], d_score.to(d_scores.dtype.element_ty), mask=inside)


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
