"""The gates of a model on a text: winners, entropy, load, agreement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmax.data.tokenizer import encode_text
from headmax.layers import HeadGateConfig
from headmax.models import HeadmaxForCausalLM
from headmax.models.modeling import Gates
from headmax.train.evaluate import DEAD
from headmax.train.loading import load_model, load_tokenizer


@dataclass(frozen=True)
class Gate:
    """One gate of one layer over a text."""

    shares: Tensor
    """[time, heads] float32: the gate divided by its `scale`, so that a softmax sums to 1."""

    @property
    def heads(self) -> int:
        return self.shares.shape[1]

    @cached_property
    def winners(self) -> Tensor:
        """[time]: the head with the largest share; -1 for a tie, as under uniform gates."""
        if self.heads == 1:
            return torch.zeros(len(self.shares), dtype=torch.int64)
        (first, second), order = (x.T for x in self.shares.topk(2))
        return order[0].where(first > second, -1)

    @cached_property
    def distribution(self) -> Tensor:
        """[time, heads], summing to 1 for any kind of gate."""
        return self.shares / self.shares.sum(-1, keepdim=True)

    @cached_property
    def entropy(self) -> Tensor:
        """[time], in bits: 0 if one head takes all, log2(heads) if all share evenly."""
        return torch.special.entr(self.distribution).sum(-1) / math.log(2)

    @cached_property
    def load(self) -> Tensor:
        """[heads]: the mean share of each head."""
        return self.distribution.mean(0)

    @cached_property
    def wins(self) -> Tensor:
        """[heads]: the fraction of tokens that each head wins."""
        won = self.winners[self.winners >= 0]
        return torch.bincount(won, minlength=self.heads) / len(self.winners)

    @cached_property
    def dead(self) -> Tensor:
        """[heads] bool: whether the head is dead on this text, as the trainer defines it."""
        return self.load < DEAD / self.heads


@dataclass(frozen=True)
class Layer:
    index: int
    mixer: str
    read: Gate | None
    write: Gate | None

    def agreement(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """C_ij = Σ_h G^Q_h(i) G^K_h(j): how much of what token j wrote token i reads. The caller applies the causal mask."""
        if self.read is None or self.write is None:
            raise ValueError(f"layer {self.index}: agreement needs a read and a write gate, but the model has only one of them")
        return self.read.shares[queries] @ self.write.shares[keys].T


@dataclass(frozen=True)
class Trace:
    """The gates of one model on one text."""

    name: str
    tokens: Sequence[str]
    layers: Sequence[Layer]
    """Layers with gates."""
    kind: str
    """Of the gates: softmax, sigmoid or uniform."""
    read_position: str


@torch.no_grad()
def trace(model: HeadmaxForCausalLM, ids: Tensor, tokens: Sequence[str], name: str) -> Trace:
    """The gates of `model` on token ids [time], with `tokens` their texts. No logits are computed."""
    config = model.config.head_gate
    if not isinstance(config, HeadGateConfig):
        raise ValueError(f"{name}: the model has no head gates (head_gate is None); take one of a softmax recipe")
    if ids.ndim != 1 or len(ids) != len(tokens) or not len(ids):
        raise ValueError(f"{name}: ids must be [time > 0] with a text for each, got {list(ids.shape)} and {len(tokens)} texts")
    if int(ids.max()) >= model.config.vocab_size:
        raise ValueError(f"{name}: token {int(ids.max())} exceeds the model's vocabulary of {model.config.vocab_size}; use its tokenizer")
    gates = model.model(ids[None].to(model.device), return_gates=True, use_cache=False).gates
    return Trace(name, list(tokens), layers_of(model, gates, name), config.kind, config.read_position)


def layers_of(model: HeadmaxForCausalLM, gates: Gates, name: str) -> list[Layer]:
    """The layers with gates, from the `gates` in a model's output on one text."""
    layers = []
    for index, (pair, mixer) in enumerate(zip(gates, model.config.mixers, strict=True)):
        if pair is not None:
            scale = model.model.layers[index].mixer.head_gate.scale
            if any(gate is not None and not gate.isfinite().all() for gate in pair):
                raise ValueError(f"{name}: the gates of layer {index} are not finite: the weights contain NaN or infinity, or overflow")
            read, write = (None if gate is None else Gate((gate[0].float() / scale).cpu()) for gate in pair)
            layers.append(Layer(index, mixer.name, read, write))
    return layers


def of_checkpoint(
    source: str | Path, text: str, *, name: str, tokenizer: str | Path | None = None, most: int = 10_000, device: str = "cpu"
) -> Trace:
    """The gates of a checkpoint's model on the first `most` tokens of `text`."""
    model = load_model(source, device)
    ids, tokens = encode(load_tokenizer(tokenizer or source), text)
    return trace(model, ids[:most], tokens[:most], name)


def encode(tokenizer: Any, text: str) -> tuple[Tensor, list[str]]:
    """The tokens of `text`, and the characters of each; its name, for a token of no or incomplete characters."""
    if not getattr(tokenizer, "is_fast", False):
        ids = encode_text(tokenizer, text)["input_ids"]
        return torch.tensor(ids), [tokenizer.decode([i]) for i in ids]
    encoded = encode_text(tokenizer, text, offsets=True)
    ids, names = encoded["input_ids"], tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    pieces, done = [], 0
    for name, (_, end) in zip(names, encoded["offset_mapping"], strict=True):
        pieces.append(text[done:end] or name)  # from the end of the last token: spaces that no token covers go with the next
        done = max(done, end)
    return torch.tensor(ids, dtype=torch.int64), pieces


@dataclass(frozen=True)
class Difference:
    """One layer of two models on the same text."""

    layer: int
    read: float | None
    """Difference of the read gates' mean entropies in bits, second minus first."""
    write: float | None
    agreement: float | None
    """Root mean square of C's difference over all pairs of tokens; independent of the order of heads."""


def compare(first: Trace, second: Trace) -> list[Difference]:
    """Differences of the layers with gates in both."""
    if list(first.tokens) != list(second.tokens):
        raise ValueError(f"{first.name} and {second.name} split the text into different tokens; compare models with the same tokenizer")
    second_layers = {layer.index: layer for layer in second.layers}

    def entropy(a: Gate | None, b: Gate | None) -> float | None:
        return None if a is None or b is None else float(b.entropy.mean() - a.entropy.mean())

    return [
        Difference(layer.index, entropy(layer.read, other.read), entropy(layer.write, other.write), _agreement_distance(layer, other))
        for layer in first.layers
        if (other := second_layers.get(layer.index))
    ]


def _agreement_distance(a: Layer, b: Layer) -> float | None:
    """‖C_a - C_b‖ / time, from heads x heads products alone: <Q_a K_a^T, Q_b K_b^T> = Σ (Q_a^T Q_b) ⊙ (K_a^T K_b)."""
    if a.read is None or a.write is None or b.read is None or b.write is None:
        return None
    q = torch.cat([a.read.shares, b.read.shares], 1).double()
    k = torch.cat([a.write.shares, -b.write.shares], 1).double()
    return float(((q.T @ q) * (k.T @ k)).sum().clamp(min=0).sqrt()) / len(q)
