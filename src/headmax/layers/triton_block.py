"""A block on one token of each sequence, in five kernels: two products and the recurrence between them, then the MLP's two products.
KDA takes two more, for what it makes of narrow matrices."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headmax.layers.mixers.attention import Attention, AttentionSlots
from headmax.layers.mixers.base import RecurrentMixer
from headmax.layers.mixers.state import RecurrentSlots
from headmax.layers.mixers.terms import StepTerms
from headmax.layers.norm import RMSNorm
from headmax.layers.rotary import Rotary
from headmax.layers.triton_linear import Convolution, LinearInput, Scores, linear, score_part
from headmax.layers.triton_mixer import Decay, gated_norm, mixer_step

if TYPE_CHECKING:
    from headmax.layers.block import Block


def normed(x: Tensor, norm: RMSNorm) -> LinearInput:
    return LinearInput(x, norm.weight, norm.eps)


def block_step(block: Block, x: Tensor, state: RecurrentSlots | AttentionSlots, rotary: Rotary | None, mask: Tensor | None) -> Tensor:
    """The block's forward on x [rows, hidden]; the state moves on in place."""
    mixer, mlp = block.mixer, block.mlp
    if isinstance(mixer, Attention):
        x = attention_step(mixer, block.mixer_norm, x, state, rotary, mask)  # type: ignore[arg-type]
    else:
        x = recurrent_step(mixer, block.mixer_norm, x, state, rotary)  # type: ignore[arg-type]
    joint = linear(normed(x, block.mlp_norm), [mlp.gate_proj.weight, mlp.up_proj.weight], pair=True)
    return linear(LinearInput(joint), [mlp.down_proj.weight], residual=x)


def attention_step(mixer: Attention, norm: RMSNorm, x: Tensor, state: AttentionSlots, rotary: Rotary | None, mask: Tensor | None) -> Tensor:
    """x + attention(norm(x))"""
    weights = [module.weight for module in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj) if module is not None]
    q, k, v, *gate = linear(normed(x, norm), weights).unsqueeze(1).split(list(map(len, weights)), dim=-1)
    assert rotary is not None
    o, _ = mixer.read(q, k, v, gate[0] if gate else None, rotary, state, mask)
    return linear(LinearInput(o.flatten(1)), [mixer.o_proj.weight], residual=x)


def projected_parts(mixer: RecurrentMixer) -> dict[str, Tensor]:
    """All matrices on the normalised hidden state, by the name under which `mixer_step_kernel` knows where their products start."""
    terms, gate = mixer.step_terms(), mixer.head_gate
    assert terms is not None
    parts = {"Q": mixer.q_proj.weight, "KEYS": mixer.k_proj.weight, "VALUES": mixer.v_proj.weight}
    if mixer.g_proj is not None:
        parts["SWISH"] = mixer.g_proj.weight
    parts |= zip(("DECAYS", "BETAS"), (projection.weight for projection in terms.projections), strict=False)
    if terms.gate is not None:
        parts["GATE"] = terms.gate[0].weight
    if gate is not None and gate.source != "head":
        parts |= {name: gate.hidden_rows(w) for name, w in (("READS", gate.read_weight), ("WRITES", gate.write_weight)) if w is not None}
    return parts


def recurrent_step(mixer: RecurrentMixer, norm: RMSNorm, x: Tensor, state: RecurrentSlots, rotary: Rotary | None) -> Tensor:
    """x + mixer(norm(x))"""
    gate, terms, parts = mixer.head_gate, mixer.step_terms(), projected_parts(mixer)
    assert terms is not None
    starts = dict(zip(parts, accumulate(map(len, parts.values()), initial=0), strict=False))
    scores, convolution = None, None
    if gate is not None and gate.source == "head" and gate.kind != "uniform":
        sums = x.new_empty(len(x), 2, mixer.num_v_heads, mixer.head_k_dim // score_part(mixer.head_k_dim), dtype=torch.float32)
        scores = Scores(gate.read_weight, gate.write_weight, mixer.num_heads, sums)
    if mixer.convs is not None and state.inputs is not None:
        taps, biases = ([getattr(conv, name) for conv in mixer.convs] for name in ("weight", "bias"))
        convolution = Convolution(taps, biases, state.inputs)
    projected = linear(normed(x, norm), list(parts.values()), convolution=convolution, scores=scores, dtype=torch.float32)
    of_token = {name: projected[:, start : start + len(parts[name])] for name, start in starts.items()}
    constants = {name: starts.get(name, 0) for name in ("Q", "KEYS", "VALUES", "BETAS", "READS", "WRITES")}
    constants |= step_constants(mixer, terms) | {"SWISH": starts["SWISH"] if terms.swish_first else -1}
    decay = decay_terms(terms, of_token.get("DECAYS"))
    numbers = ((1.0, 1.0) if gate is None else (gate.temperature, gate.scale)) + (terms.normalizer, mixer.head_k_dim**-0.5)
    if terms.scale is not None:
        numbers = (*numbers[:3], terms.scale)
    o, read = mixer_step(projected, None if scores is None else scores.sums, state.recurrent, rotary, decay, terms.skip, numbers, constants)
    if terms.gate is not None:
        o = gated_norm(o, of_token["GATE"], terms.gate[1].weight, mixer.num_v_heads, read, **norm_of(mixer))
        return linear(LinearInput(o), [mixer.o_proj.weight], residual=x)
    swish = None if terms.swish_first else of_token.get("SWISH")
    return linear(LinearInput(o, swish=swish, read=read, **norm_of(mixer)), [mixer.o_proj.weight], residual=x)


def decay_terms(terms: StepTerms, low: Tensor | None) -> Decay:
    """What the step's kernel makes decays from: the token's projection, which GLA's part of it and KDA's product before it raise."""
    up = terms.decay_up
    if up is None or low is None:
        return Decay(low, terms.decay_weight, terms.decay_bias)
    if terms.decay == "channel":
        return Decay(low, up.weight, up.bias)
    return Decay(linear(LinearInput(low), [up.weight], dtype=torch.float32), terms.decay_weight, terms.decay_bias)


def step_constants(mixer: RecurrentMixer, terms: StepTerms) -> dict[str, Any]:
    """What the step's kernel is specialised to, but for widths and where its inputs are."""
    rank = terms.projections[0].out_features if terms.decay == "channel" else 1
    return gate_constants(mixer) | {"KEY_HEADS": mixer.num_heads, "RANK": rank, "DECAY": terms.decay, "FEATURE": terms.feature}


def gate_constants(mixer: RecurrentMixer) -> dict[str, Any]:
    """Which gates there are, and where the read gate multiplies."""
    gate = mixer.head_gate
    if gate is None:
        return {"KIND": "uniform", "READ": "none", "WRITE": False}
    place = "after_norm" if mixer.read_after_norm else "query"
    return {"KIND": gate.kind, "READ": place if gate.read else "none", "WRITE": gate.write}


def norm_of(mixer: RecurrentMixer) -> dict[str, Any]:
    """The norm of the read-out, as a product's input takes it."""
    norm = mixer.output_norm
    if norm.kind == "none":
        return {}
    return {"norm": norm.norm.weight, "eps": norm.norm.eps, "groups": mixer.num_v_heads if norm.kind == "head" else 1}
