"""A block for one token of each sequence, in five kernels: the matrices of each stage stacked, and everything between them inside the kernels."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor, nn

from headmax.layers.block import Block
from headmax.layers.head_gate import HeadGate
from headmax.layers.mixers.attention import Attention
from headmax.layers.mixers.base import RecurrentMixer
from headmax.layers.norm import RMSNorm
from headmax.layers.slots import AttentionSlots, Place, RecurrentSlots, Slots

WIDEST_KEY = 256
"""Channels of a head's key that a program of the mixer's kernel holds."""


def unfit(block: Block) -> str | None:
    """Why a block cannot be fused, or None; it then decodes by its own forward."""
    mixer, weight = block.mixer, block.mlp.down_proj.weight
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if weight.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"kernels need a CUDA device, the model is on {weight.device.type}"
    if weight.dtype == torch.float64:
        return "kernels compute in float32, the model is float64"
    for name, module in block.named_modules():
        if isinstance(module, nn.Module) and name.endswith("_proj") and type(module) is not nn.Linear:
            return f"{name} is a {type(module).__name__}, not a plain matrix"
    if isinstance(mixer, RecurrentMixer):
        if type(mixer).step_terms is RecurrentMixer.step_terms:
            return f"{type(mixer).__name__} does not say how one token is decoded"
        if mixer.head_k_dim > WIDEST_KEY:
            return f"keys are at most {WIDEST_KEY} wide, got {mixer.head_k_dim}"
    elif not isinstance(mixer, Attention):
        return f"{type(mixer).__name__} is no mixer of headmax"
    return None


def stack(matrices: list[nn.Linear], *more: Tensor) -> Tensor:
    """One matrix of all rows. The modules keep theirs as views of it, so that nothing is held twice."""
    joined = torch.cat([matrix.weight.detach() for matrix in matrices] + [x.detach() for x in more])
    start = 0
    for matrix in matrices:
        matrix.weight.data = joined[start : start + matrix.out_features]
        start += matrix.out_features
    return joined


def score_rows(gate: HeadGate, weight: Tensor) -> Tensor:
    """The scores of gates that look at the hidden state, as rows of a matrix on it: [heads, hidden]."""
    if gate.source == "hidden":
        return weight
    return torch.block_diag(*weight.unsqueeze(1))


class FusedBlock:
    """`block` on the first rows of its slots; the same as `plain_step`, to rounding."""

    def __init__(self, block: Block) -> None:
        if (why := unfit(block)) is not None:
            raise ValueError(f"a layer cannot be fused: {why}")
        self.block = block
        self.mixer: FusedMixer | FusedAttention
        self.mixer = FusedAttention(block) if isinstance(block.mixer, Attention) else FusedMixer(block)
        self.up = stack([block.mlp.gate_proj, block.mlp.up_proj])

    def __call__(self, x: Tensor, slots: Slots, place: Place) -> Tensor:
        from headmax.layers.triton_linear import Input, linear

        block = self.block
        x = self.mixer(x, slots, place)  # type: ignore[arg-type]
        hidden = linear(normed(x, block.mlp_norm), self.up, pair=True)
        return linear(Input(hidden), block.mlp.down_proj.weight, residual=x)


def normed(x: Tensor, norm: RMSNorm) -> Any:
    from headmax.layers.triton_linear import Input

    return Input(x, norm.weight, norm.eps)


class FusedAttention:
    """Attention with its projections stacked; the attention itself is PyTorch's."""

    def __init__(self, block: Block) -> None:
        self.norm, self.mixer = block.mixer_norm, block.mixer
        self.qkv = stack([self.mixer.q_proj, self.mixer.k_proj, self.mixer.v_proj])

    def __call__(self, x: Tensor, slots: AttentionSlots, place: Place) -> Tensor:
        from headmax.layers.triton_linear import Input, linear

        mixer = self.mixer
        q, k, v = linear(normed(x, self.norm), self.qkv).unsqueeze(1).chunk(3, dim=-1)
        o = slots.attend(*mixer.heads(q, k, v, place.rotary[mixer.rotary]), place)
        return linear(Input(o), mixer.o_proj.weight, residual=x)


class FusedMixer:
    """A recurrent mixer: all projections of the hidden state in one product, the recurrence in one kernel, the output in another."""

    def __init__(self, block: Block) -> None:
        self.norm, self.mixer = block.mixer_norm, block.mixer
        mixer, gate, terms = self.mixer, self.mixer.head_gate, self.mixer.step_terms()
        parts = {"Q": mixer.q_proj, "KEYS": mixer.k_proj, "VALUES": mixer.v_proj, "SWISH": mixer.g_proj}
        parts |= dict(zip(("DECAYS", "BETAS"), terms.projections, strict=False))
        matrices = {name: matrix for name, matrix in parts.items() if matrix is not None}
        weights = {"READS": None, "WRITES": None} if gate is None else {"READS": gate.read_weight, "WRITES": gate.write_weight}
        by_head = gate is not None and gate.source == "head"
        scores = {name: score_rows(gate, weight) for name, weight in weights.items() if weight is not None and not by_head}
        self.inputs = stack(list(matrices.values()), *scores.values())
        self.starts, start = dict.fromkeys(("DECAYS", "BETAS", "READS", "WRITES"), 0), 0
        for name, rows in [*((name, m.out_features) for name, m in matrices.items()), *((name, len(w)) for name, w in scores.items())]:
            self.starts[name] = start
            start += rows
        self.swish = self.starts.pop("SWISH", None)
        self.taps = None if mixer.convs is None else torch.cat([conv.weight.detach() for conv in mixer.convs])
        self.arguments: dict[str, Any] = {
            "read_weight": weights["READS"] if by_head else None,
            "write_weight": weights["WRITES"] if by_head else None,
            "decay_weight": terms.decay_weight,
            "decay_bias": terms.decay_bias,
            "normalizer": terms.normalizer,
            "temperature": 1.0 if gate is None else gate.temperature,
            "gate_scale": 1.0 if gate is None else gate.scale,
            "scale": mixer.head_k_dim**-0.5,
            "RANK": terms.projections[0].out_features if terms.decay == "channel" else 1,
            "DECAY": terms.decay,
            "FEATURE": terms.feature,
            "KIND": "uniform" if gate is None else gate.kind,
            "READ": "none" if gate is None or not gate.read else "after_norm" if mixer.read_after_norm else "query",
            "WRITE": gate is not None and gate.write,
        }

    def __call__(self, x: Tensor, slots: RecurrentSlots, place: Place) -> Tensor:
        from headmax.layers.triton_linear import Convolution, Input, linear
        from headmax.layers.triton_mixer import mixer_step

        mixer, count = self.mixer, x.shape[0]
        convolution = None if slots.conv is None else Convolution(self.taps, slots.conv[:count])
        projected = linear(normed(x, self.norm), self.inputs, convolution=convolution, dtype=torch.float32)
        o, read = mixer_step(projected, slots.recurrent[:count], mixer.num_heads, place.rotary[mixer.rotary], self.starts, self.arguments)
        swish = None if self.swish is None else projected[:, self.swish : self.swish + o.shape[1]]
        kind = mixer.output_norm.kind
        weight, eps = (None, 0.0) if kind == "none" else (mixer.output_norm.norm.weight, mixer.output_norm.norm.eps)
        made = Input(o, weight, eps, mixer.num_v_heads if kind == "head" else 1, swish, read)
        return linear(made, mixer.o_proj.weight, residual=x)
