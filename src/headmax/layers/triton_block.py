"""A block for one token of each sequence in five kernels: the matrices of a stage are stacked, all else happens inside their products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headmax.layers.block import Block
from headmax.layers.decoding import AttentionSlots, Place, RecurrentSlots, Slots, unfit
from headmax.layers.mixers.attention import Attention
from headmax.layers.mixers.base import RecurrentMixer
from headmax.layers.norm import RMSNorm
from headmax.layers.triton_linear import Convolution, Input, Scores, linear, score_part
from headmax.layers.triton_mixer import mixer_step


def normed(x: Tensor, norm: RMSNorm) -> Input:
    return Input(x, norm.weight, norm.eps)


def stack(matrices: list[nn.Linear], *more: Tensor) -> Tensor:
    """One matrix of all rows. The modules keep theirs as views of it, so that nothing is held twice."""
    joined = torch.cat([matrix.weight.detach() for matrix in matrices] + [x.detach() for x in more])
    start = 0
    for matrix in matrices:
        matrix.weight.data = joined[start : start + matrix.out_features]
        start += matrix.out_features
    return joined


class FusedHead:
    """The last norm and the logits, in float32."""

    def __init__(self, norm: RMSNorm, head: nn.Linear) -> None:
        self.norm, self.weight = norm, head.weight

    def __call__(self, x: Tensor) -> Tensor:
        return linear(normed(x, self.norm), self.weight, dtype=torch.float32)


class FusedBlock:
    """The same as `plain_step`, to rounding."""

    def __init__(self, block: Block) -> None:
        if (why := unfit(block)) is not None:
            raise ValueError(f"a layer cannot be fused: {why}")
        self.norm, self.down = block.mlp_norm, block.mlp.down_proj.weight
        fuse: Any = FusedAttention if isinstance(block.mixer, Attention) else FusedMixer
        self.mixer: FusedAttention | FusedMixer = fuse(block.mixer_norm, block.mixer)
        self.up = stack([block.mlp.gate_proj, block.mlp.up_proj])

    def __call__(self, x: Tensor, slots: Slots, place: Place) -> Tensor:
        x = self.mixer(x, slots, place)  # type: ignore[arg-type]
        return linear(Input(linear(normed(x, self.norm), self.up, pair=True)), self.down, residual=x)


class FusedAttention:
    """Attention with its projections stacked; the attention itself is PyTorch's."""

    def __init__(self, norm: RMSNorm, mixer: Attention) -> None:
        self.norm, self.mixer = norm, mixer
        self.inputs = stack([mixer.q_proj, mixer.k_proj, mixer.v_proj])

    def __call__(self, x: Tensor, slots: AttentionSlots, place: Place) -> Tensor:
        q, k, v = linear(normed(x, self.norm), self.inputs).unsqueeze(1).chunk(3, dim=-1)
        turn = place.rotary[self.mixer.rotary]
        assert turn is not None
        o = slots.attend(*self.mixer.heads(q, k, v, turn), place)
        return linear(Input(o), self.mixer.o_proj.weight, residual=x)


def score_rows(mixer: RecurrentMixer) -> dict[str, Tensor]:
    """The gates' scores as matrices on the hidden state [heads, hidden], where they are linear in it.

    Scores of q and k are, too, unless a convolution stands between: <W x, w> = <W^T w, x>. The kernel then need not look at all heads.
    """
    gate = mixer.head_gate
    if gate is None or (gate.source == "head" and mixer.convs is not None):
        return {}
    names = [name for name, weight in (("READS", gate.read_weight), ("WRITES", gate.write_weight)) if weight is not None]
    with torch.no_grad():
        rows = gate.rows(mixer.q_proj.weight.float(), mixer.k_proj.weight.float())
    return {} if rows is None else dict(zip(names, rows.to(mixer.q_proj.weight.dtype).split(gate.num_heads), strict=True))


def gate_arguments(mixer: RecurrentMixer) -> dict[str, Any]:
    """What the mixer's kernel needs to know of the gates."""
    gate = mixer.head_gate
    made: dict[str, Any] = {"temperature": 1.0, "gate_scale": 1.0, "KIND": "uniform", "READ": "none", "WRITE": False}
    if gate is not None:
        made |= {"temperature": gate.temperature, "gate_scale": gate.scale, "KIND": gate.kind, "WRITE": gate.write}
        if gate.read:
            made["READ"] = "after_norm" if mixer.read_after_norm else "query"
    return made


def score_weights(mixer: RecurrentMixer) -> Tensor | None:
    """The gates' weights on convolved queries and keys, where that is what they score: [value heads to a key head, channels of both]."""
    gate, shape = mixer.head_gate, (mixer.num_heads, -1, mixer.head_k_dim)
    weights = [] if gate is None or gate.source != "head" or mixer.convs is None else [gate.read_weight, gate.write_weight]
    there = [weight.detach().float() for weight in weights if weight is not None]
    if not there:
        return None
    both = [torch.zeros_like(there[0]) if weight is None else weight.detach().float() for weight in weights]
    return torch.cat([weight.view(shape).transpose(0, 1).flatten(1) for weight in both], dim=1)


class FusedMixer:
    """A recurrent mixer: all projections of the hidden state in one product, the recurrence in one kernel, the output in another."""

    def __init__(self, norm: RMSNorm, mixer: RecurrentMixer) -> None:
        self.norm, self.mixer, terms = norm, mixer, mixer.step_terms()
        parts = {"Q": mixer.q_proj, "KEYS": mixer.k_proj, "VALUES": mixer.v_proj, "SWISH": mixer.g_proj}
        parts |= dict(zip(("DECAYS", "BETAS"), terms.projections, strict=False))
        matrices = {name: matrix for name, matrix in parts.items() if matrix is not None}
        scores = score_rows(mixer)
        self.starts, start = dict.fromkeys(("DECAYS", "BETAS", "READS", "WRITES"), 0), 0
        for name, rows in ({name: m.out_features for name, m in matrices.items()} | {name: len(x) for name, x in scores.items()}).items():
            self.starts[name] = start
            start += rows
        spare = norm.weight.new_zeros(-start % 16, len(norm.weight))  # the product's rows then start where 16 bytes can be loaded at once
        self.inputs = stack(list(matrices.values()), *scores.values(), spare)
        self.swish = self.starts.pop("SWISH", None)
        self.taps = None if mixer.convs is None else torch.cat([conv.get_parameter("weight").detach() for conv in mixer.convs])
        self.scored, self.part = score_weights(mixer), score_part(mixer.head_k_dim, len(norm.weight))
        self.output_norm: dict[str, Any] = {}
        if mixer.output_norm.kind != "none":
            own, groups = mixer.output_norm.norm, mixer.num_v_heads if mixer.output_norm.kind == "head" else 1
            self.output_norm = {"norm": own.weight, "eps": own.eps, "groups": groups}
        self.arguments: dict[str, Any] = gate_arguments(mixer) | {
            "decay_weight": terms.decay_weight,
            "decay_bias": terms.decay_bias,
            "normalizer": terms.normalizer,
            "scale": mixer.head_k_dim**-0.5,
            "RANK": terms.projections[0].out_features if terms.decay == "channel" else 1,
            "DECAY": terms.decay,
            "FEATURE": terms.feature,
        }

    def __call__(self, x: Tensor, slots: RecurrentSlots, place: Place) -> Tensor:
        mixer, rows, convolution, sums, scores = self.mixer, len(x), None, None, None
        if self.scored is not None:
            sums = x.new_empty(rows, 2 * mixer.num_v_heads, mixer.head_k_dim // self.part, dtype=torch.float32)
            scores = Scores(self.scored, mixer.head_k_dim, sums)
        if self.taps is not None and slots.conv is not None:
            convolution = Convolution(self.taps, slots.conv[:rows], scores)
        projected = linear(normed(x, self.norm), self.inputs, convolution=convolution, dtype=torch.float32)
        turn = place.rotary[mixer.rotary]
        o, read = mixer_step(projected, sums, slots.recurrent[:rows], mixer.num_heads, turn, self.starts, self.arguments)
        swish = None if self.swish is None else projected[:, self.swish : self.swish + o.shape[1]]
        return linear(Input(o, swish=swish, read=read, **self.output_norm), mixer.o_proj.weight, residual=x)
