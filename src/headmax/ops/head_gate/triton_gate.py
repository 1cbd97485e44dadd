"""The gate in Triton: one pass over x for all heads; and the gates of scores that a product gave, in one kernel each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.triton_common import on_its_device

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


def _sizes(x: Tensor, weight: Tensor) -> dict[str, int]:
    """One head of x serves all gates where x is a hidden state."""
    heads_in = x.shape[2] if x.ndim == 4 else 1
    width = min(WIDTH, max(16, triton.next_power_of_2(x.shape[-1])))
    return {"H": weight.shape[0], "GROUP": weight.shape[0] // heads_in, "D": x.shape[-1], "BT": TOKENS, "BD": width}


@torch.library.custom_op("headmax::head_gate", mutates_args=())
@on_its_device
def _forward(x: Tensor, weight: Tensor, temperature: float, scale: float, softmax: bool) -> Tensor:
    gate = x.new_empty(*x.shape[:2], weight.shape[0], dtype=torch.float32)
    tokens, sizes = gate.shape[0] * gate.shape[1], _sizes(x, weight)
    head_gate_kernel[(triton.cdiv(tokens, TOKENS),)](
        x, weight, gate, tokens, temperature, scale, **sizes, HP=max(2, triton.next_power_of_2(weight.shape[0])), SOFTMAX=softmax
    )
    return gate


@_forward.register_fake
def _(x, weight, temperature, scale, softmax):
    return x.new_empty(*x.shape[:2], weight.shape[0], dtype=torch.float32)


@torch.library.custom_op("headmax::head_gate_backward", mutates_args=())
@on_its_device
def _backward(d_score: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    sizes = _sizes(x, weight)
    tokens, d_x = x.shape[0] * x.shape[1], torch.empty_like(x)
    programs = min(PROGRAMS, triton.cdiv(tokens, TOKENS))
    d_weight = x.new_zeros(programs, *weight.shape, dtype=torch.float32)
    head_gate_gradients_kernel[(programs, sizes["H"] // sizes["GROUP"], triton.cdiv(sizes["D"], sizes["BD"]))](
        x, weight, d_score, d_x, d_weight, tokens, **sizes
    )
    return d_x, d_weight.sum(0).to(weight.dtype)


@_backward.register_fake
def _(d_score, x, weight):
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx, inputs, output) -> None:
    x, weight, ctx.temperature, ctx.scale, ctx.softmax = inputs
    ctx.save_for_backward(x, weight, output)


def _gradient(ctx, d_gate):
    x, weight, gate = ctx.saved_tensors
    d_score = _split_backward([gate], [d_gate], ctx.temperature, ctx.scale, ctx.softmax, torch.float32)
    return *_backward(d_score, x, weight), None, None, None


_forward.register_autograd(_gradient, setup_context=_save)


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
    sizes = {"N": number, "H": heads, "HP": max(2, triton.next_power_of_2(heads)), "BT": SCORED, "SOFTMAX": softmax}
    return (triton.cdiv(tokens, SCORED),), sizes


@torch.library.custom_op("headmax::split_gates", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
@on_its_device
def _split(scores: Tensor, number: int, temperature: float, scale: float, softmax: bool) -> list[Tensor]:
    batch, time, width = scores.shape
    flat = scores.flatten(0, 1)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    gates = [scores.new_empty(batch, time, width // number, dtype=torch.float32) for _ in range(number)]
    grid, sizes = _split_sizes(len(flat), number, width // number, softmax)
    split_gates_kernel[grid](flat, gates[0], gates[-1], len(flat), flat.stride(0), temperature, scale, **sizes)
    return gates


@_split.register_fake
def _(scores, number, temperature, scale, softmax):
    return [scores.new_empty(*scores.shape[:2], scores.shape[2] // number, dtype=torch.float32) for _ in range(number)]


@torch.library.custom_op("headmax::split_gates_backward", mutates_args=())
@on_its_device
def _split_backward(
    gates: list[Tensor], d_gates: list[Tensor], temperature: float, scale: float, softmax: bool, dtype: torch.dtype
) -> Tensor:
    (batch, time, heads), number = gates[0].shape, len(gates)
    d_gates = [d.contiguous() for d in d_gates]
    d_scores = gates[0].new_empty(batch, time, number * heads, dtype=dtype)
    grid, sizes = _split_sizes(batch * time, number, heads, softmax)
    split_gates_gradient_kernel[grid](gates[0], gates[-1], d_gates[0], d_gates[-1], d_scores, batch * time, temperature, scale, **sizes)
    return d_scores


@_split_backward.register_fake
def _(gates, d_gates, temperature, scale, softmax, dtype):
    return gates[0].new_empty(*gates[0].shape[:2], len(gates) * gates[0].shape[2], dtype=dtype)


def _save_split(ctx, inputs, output) -> None:
    scores, _, ctx.temperature, ctx.scale, ctx.softmax = inputs
    ctx.dtype = scores.dtype
    ctx.save_for_backward(*output)


def _split_gradient(ctx, d_gates):
    gates = list(ctx.saved_tensors)
    given = [torch.zeros_like(gate) if d is None else d for gate, d in zip(gates, d_gates, strict=True)]
    return _split_backward(gates, given, ctx.temperature, ctx.scale, ctx.softmax, ctx.dtype), None, None, None, None


_split.register_autograd(_split_gradient, setup_context=_save_split)


def _check_dtype(op: str, x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise ValueError(f"{op}: backend 'triton' computes in float32, got torch.float64; use 'reference'")


def head_gate(x: Tensor, weight: Tensor, temperature: float, scale: float, kind: str) -> Tensor:
    _check_dtype("head_gate", x)
    top = scale if kind == "softmax" else 2 * scale / weight.shape[0]
    return _forward(x.contiguous(), weight.contiguous(), temperature, top, kind == "softmax")


def split_gates(scores: Tensor, number: int, temperature: float, scale: float, kind: str) -> list[Tensor]:
    _check_dtype("split_gates", scores)
    top = scale if kind == "softmax" else 2 * scale * number / scores.shape[2]
    return _split(scores, number, temperature, top, kind == "softmax")
