"""What a model costs at a length, counted on the meta device: parameters, FLOPs, activations, and the numbers that ranks would exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn

from headmax import HeadmaxForCausalLM
from headmax.layers.block import Block
from headmax.layers.mixers.attention import Attention
from headmax.layers.mixers.base import RecurrentMixer
from headmax.ops.spec import CHUNK_FOR_FLOPS, Case
from headmax.recipes import Recipe


class Shared(NamedTuple):
    """A quantity, of which tensor parallelism splits one part and leaves the other to each rank."""

    split: float
    whole: float

    def on(self, ranks: int) -> float:
        """What each of so many has."""
        return self.split / ranks + self.whole


@dataclass(frozen=True)
class Work:
    """Of all layers together, but for `block`."""

    parameters: int
    layers: int
    flops: float
    """Per token, forward and backward."""
    activations: Shared
    """Bytes per token kept for the backward pass."""
    block: Shared
    """The same of the largest layer, with what its backward pass needs beside."""
    inputs: float
    """Bytes per token of all layers' inputs: what checkpointing keeps."""
    vocabulary: int
    hidden: int
    matrices: Shared
    """Numbers in the projections of blocks, which FSDP gathers in the precision of products."""
    others: Shared
    """In norms, convolutions, gates, decays, which it leaves on every rank."""
    ends: int
    """In the embedding and the last layer, which it gathers in float32."""
    summed: int
    """In a mixer's parameters that all heads share: their gradients are summed over tensor ranks."""
    states: int
    """Of one sequence."""
    transitions: int
    """Numbers that say what a piece of it does to the states before."""
    convolutions: int
    """Inputs that a piece of it needs of the piece before."""
    keys: int
    """And values, per token, that attention layers need of all pieces before."""
    corrections: float
    """FLOPs per token that a piece needs beside, forward and backward: outputs are corrected, transitions carried along."""
    attention: float
    """Those of `flops` that are spent on pairs of tokens: the last piece has more than its share of them."""
    gates: int
    """Softmaxes over heads."""
    joint_norms: int
    splits: dict[str, int]
    """What parallel.tensor must divide."""
    unsplit: str
    """The mixer whose op takes no pieces of sequences, if there is one."""

    @classmethod
    def of(cls, recipe: Recipe, length: int) -> Work:
        with torch.device("meta"):
            model = HeadmaxForCausalLM(recipe.model)
        blocks, hidden = list(model.model.layers), recipe.model.hidden_size
        products = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        recurrent = [block.mixer for block in blocks if isinstance(block.mixer, RecurrentMixer)]
        attention = [block.mixer for block in blocks if isinstance(block.mixer, Attention)]
        ops = sum(block.mixer.flops(length) for block in blocks)
        kept = [_activations(block, hidden) for block in blocks]
        matrices, others, summed = _parameters(model, blocks)
        gated = [mixer.head_gate for mixer in recurrent if mixer.head_gate is not None and mixer.head_gate.kind == "softmax"]
        return cls(
            parameters=(parameters := sum(p.numel() for p in model.parameters())),
            layers=len(blocks),
            flops=3 * (2 * products + ops),
            activations=Shared(sum(k.split for k in kept), sum(k.whole for k in kept)),
            block=max(
                (Shared(2 * k.split + _state_bytes(b.mixer), 2 * k.whole) for k, b in zip(kept, blocks, strict=True)), key=lambda k: k.on(1)
            ),
            inputs=2.0 * hidden * len(blocks),
            vocabulary=recipe.model.vocab_size,
            hidden=hidden,
            matrices=matrices,
            others=others,
            ends=parameters - round(matrices.on(1) + others.on(1)),
            summed=summed,
            states=sum(_heads(mixer) * mixer.head_k_dim * mixer.head_v_dim for mixer in recurrent),
            transitions=sum(_heads(mixer) * _transition(mixer) for mixer in recurrent),
            convolutions=sum((mixer.conv_size - 1) * _channels(mixer) for mixer in recurrent if mixer.conv_size),
            keys=sum(2 * mixer.k_proj.out_features for mixer in attention),
            corrections=3.0 * sum(_corrections(mixer) for mixer in recurrent),
            attention=3.0 * sum(mixer.flops(length) for mixer in attention),
            gates=sum(gate.read + gate.write for gate in gated),
            joint_norms=sum(mixer.output_norm.kind == "joint" for mixer in recurrent),
            splits=_splits(model, recurrent, attention),
            unsplit=next((type(mixer).__name__ for mixer in recurrent if mixer.config.spec.transition is None), ""),
        )


def _heads(mixer: RecurrentMixer) -> int:
    return mixer.num_v_heads


def _case(mixer: RecurrentMixer, wider: int = 0) -> Case:
    """A long sequence of one token's worth: what the op's figures are of."""
    return Case(1, 1, mixer.num_heads, mixer.head_k_dim, mixer.head_v_dim + wider, value_heads=mixer.num_v_heads)


def _transition(mixer: RecurrentMixer) -> int:
    """Numbers of a head."""
    kind = mixer.config.spec.transition
    return 0 if kind is None else kind(_case(mixer))


def _corrections(mixer: RecurrentMixer) -> float:
    """FLOPs of a token forward: what it reads of the state before its piece, and the columns that the delta rules carry."""
    spec, read = mixer.config.spec, 2 * _heads(mixer) * mixer.head_k_dim * mixer.head_v_dim
    carried = _transition(mixer) > mixer.head_k_dim
    return read + (spec.flops(_case(mixer, mixer.head_k_dim)) - spec.flops(_case(mixer)) if carried else 0)


def _channels(mixer: RecurrentMixer) -> int:
    return 2 * mixer.num_heads * mixer.head_k_dim + mixer.num_v_heads * mixer.head_v_dim


def _parameters(model: HeadmaxForCausalLM, blocks: Sequence[Block]) -> tuple[Shared, Shared, int]:
    """Numbers in the blocks' projections; in all else but embedding and last layer; in what all heads of a mixer share."""
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    sizes = {(matrix, whole): 0 for matrix in (True, False) for whole in (True, False)}
    summed = 0
    for block in blocks:
        shared: tuple[str, ...] = block.mixer.of_all_heads  # type: ignore[assignment]
        for name, p in block.named_parameters():
            part, first = name.split(".")[:2]
            common = part == "mixer" and first in shared
            sizes[id(p) in linear, common or part.endswith("norm")] += p.numel()
            summed += p.numel() if common else 0
    sizes[False, True] += sum(p.numel() for p in model.model.norm.parameters())
    return Shared(sizes[True, False], sizes[True, True]), Shared(sizes[False, False], sizes[False, True]), summed


def _activations(block: Block, hidden: int) -> Shared:
    """Bytes of one token in bfloat16: what enters the block and its two halves, every projection, the read-out.

    Compiled blocks compute cheap work again (norms, activations, products of gates), and recurrences keep no states.
    """
    outputs = {name: module.out_features for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    back = [name for name in outputs if name.endswith(("o_proj", "down_proj"))]
    widths = sum(width for name, width in outputs.items() if name not in back) + cast(nn.Linear, block.mixer.o_proj).in_features
    if getattr(block.mixer, "convs", None) is not None:
        widths += _channels(cast(RecurrentMixer, block.mixer))
    return Shared(2.0 * widths, 8.0 * hidden)


def _state_bytes(mixer: nn.Module) -> float:
    """Per token: the states at every chunk's beginning and their gradients, which live while one layer goes back."""
    if not isinstance(mixer, RecurrentMixer):
        return 0.0
    return 2 * 2 * mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim / CHUNK_FOR_FLOPS


def _splits(model: HeadmaxForCausalLM, recurrent: Sequence[RecurrentMixer], attention: Sequence[Attention]) -> dict[str, int]:
    """The greatest common divisor of each thing that tensor parallelism splits, by what the trainer calls it."""
    config = model.config
    found = {"vocab_size": [config.vocab_size], "intermediate_size": [config.mlp_width(mixer) for mixer in config.mixers]}
    for mixer in recurrent:
        found.setdefault(f"the heads of {type(mixer).__name__}", []).append(mixer.num_heads)
    for layer in attention:
        found.setdefault("the key heads of Attention", []).append(layer.k_proj.out_features // layer.head_dim)
    return {name: math.gcd(*numbers) for name, numbers in found.items()}
