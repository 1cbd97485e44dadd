"""The paper's proposition and theorems as experiments in float64, and what a norm leaves of the read gate, also in models that start."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headmax.layers import HeadGateConfig
from headmax.layers.feature_map import FEATURE_MAPS
from headmax.layers.norm import OutputNorm
from headmax.models import HeadmaxConfig, HeadmaxForCausalLM
from headmax.ops import head_gate


def entropy(p: Tensor) -> Tensor:
    """Over the last axis, in bits."""
    return torch.special.entr(p).sum(-1) / math.log(2)


def gate(scores: Tensor, factors: Tensor) -> Tensor:
    """softmax(λ s) for scores [heads] and every λ of `factors` [n] → [n, heads], by the library's own op."""
    ones = torch.ones(len(scores), 1, dtype=scores.dtype)
    return head_gate((factors[:, None] * scores)[None, :, :, None], ones, backend="reference")[0]


@dataclass(frozen=True)
class Invariance:
    """Proposition 1: weights of normalised attention when the query is multiplied by λ."""

    factors: Tensor
    weights: dict[str, Tensor]
    """[λ, keys] by feature map, and of softmax attention."""

    def change(self, name: str) -> float:
        """The largest change of a weight from its value at the first λ."""
        return float((self.weights[name] - self.weights[name][0]).abs().max())


def proposition_1(keys: int = 64, width: int = 16, seed: int = 0) -> Invariance:
    """w(k) = φ(q)·φ(k) / Σ_j φ(q)·φ(k_j). A homogeneous φ (ReLU) gives φ(λq) = λ φ(q), and λ cancels; elu + 1 is not homogeneous."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, width, dtype=torch.float64, generator=generator) for n in (1, keys))
    factors = torch.logspace(-2, 2, 81, dtype=torch.float64)
    scaled = factors[:, None] * q
    weights = {}
    for name in ("relu", "elu"):
        products = FEATURE_MAPS[name](scaled) @ FEATURE_MAPS[name](k).T
        weights[name] = products / products.sum(-1, keepdim=True)
    weights["softmax attention"] = (scaled @ k.T / math.sqrt(width)).softmax(-1)
    return Invariance(factors, weights)


@dataclass(frozen=True)
class Sharpening:
    """Theorem 1: the gate on scores λ s."""

    factors: Tensor
    scores: dict[str, Tensor]
    gates: dict[str, Tensor]
    """[λ, heads]"""

    def entropy(self, name: str) -> Tensor:
        return entropy(self.gates[name])


def winners(scores: Tensor) -> Tensor:
    """[..., heads] bool: the heads with the largest score; more than one where they tie."""
    return scores == scores.amax(-1, keepdim=True)


def limit_gate(scores: Tensor) -> Tensor:
    """The gate for λ → ∞: one-hot, or even over the heads that tie for the lead (the paper's proof assumes that none do)."""
    won = winners(scores).to(scores.dtype)
    return won / won.sum(-1, keepdim=True)


def theorem_1(heads: int = 8, seed: int = 0) -> Sharpening:
    """dH/dλ = -λ Var(s) under the gate: entropy falls with λ unless the scores that have weight are equal, and then it stays."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(heads, dtype=torch.float64, generator=generator)
    best = int(drawn.argmax())
    tied = drawn.clone()
    tied[(best + 1) % heads] = tied[best]
    close = drawn.clone()
    close[(best + 1) % heads] = close[best] - 0.1
    scores = {"no tie": drawn, "a close second (0.1 behind)": close, "two tie": tied, "all tie": torch.zeros_like(drawn)}
    factors = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-1, 3, 200, dtype=torch.float64)])
    return Sharpening(factors, scores, {name: gate(s, factors) for name, s in scores.items()})


@dataclass(frozen=True)
class Consensus:
    """Theorem 2: C(λ) = Σ_h G^Q_h(λ s^Q) G^K_h(λ s^K), for pairs of scores [pairs, heads]."""

    factors: Tensor
    queries: Tensor
    keys: Tensor
    agreement: Tensor
    """[pairs, λ]"""
    limit: Tensor
    """[pairs]"""
    gap: Tensor
    """[pairs]: the smaller lead of the two winners; infinite where all heads tie."""

    @property
    def error(self) -> Tensor:
        return (self.agreement - self.limit[:, None]).abs()

    @property
    def bound(self) -> Tensor:
        return agreement_bound(self.queries.shape[1], self.factors, self.gap[:, None])


def lead(scores: Tensor) -> Tensor:
    """How far the winners are ahead of the best of the others."""
    rest = scores.masked_fill(winners(scores), -math.inf).amax(-1)
    return scores.amax(-1) - rest


def agreement_bound(heads: int, factors: Tensor, gap: Tensor) -> Tensor:
    """2 (H - 1) exp(-λ gap): what the losing heads of both gates hold at most; nothing where there are none (an infinite gap)."""
    return torch.where(gap.isinf(), 0.0, 2 * (heads - 1) * torch.exp(-factors * gap))


def agreement_limit(queries: Tensor, keys: Tensor) -> Tensor:
    """The Kronecker delta of the two winners; with ties, the overlap of the tied sets, |A ∩ B| / (|A| |B|)."""
    return (limit_gate(queries) * limit_gate(keys)).sum(-1)


def theorem_2(pairs: int = 200, heads: int = 8, seed: int = 0) -> Consensus:
    """Random scores, every fourth pair with a tie for the lead in its query, every eighth in its key too."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (torch.randn(pairs, heads, dtype=torch.float64, generator=generator) for _ in range(2))
    for scores, every in ((queries, 4), (keys, 8)):
        tied = scores[::every]
        tied.scatter_(1, tied.argsort(-1)[:, -2:-1], tied.amax(-1, keepdim=True))
    factors = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-1, 2, 200, dtype=torch.float64)])
    agreement = torch.stack([(gate(q, factors) * gate(k, factors)).sum(-1) for q, k in zip(queries, keys, strict=True)])
    gap = torch.minimum(lead(queries), lead(keys))
    return Consensus(factors, queries, keys, agreement, agreement_limit(queries, keys), gap)


PLACEMENTS = ("query, per-head norm", "after_norm, per-head norm", "query, joint norm", "query, no norm")


@torch.no_grad()
def surviving(placement: str, gates: Tensor, eps: float, rms: float = 1.0, width: int = 64, seed: int = 0) -> Tensor:
    """How much of a read gate reaches the output, for every gate size g of `gates` [n].

    Two heads read out vectors of the same root mean square `rms` with gates g and g/2. If the output kept the gates, the first would be
    twice the second; the figure is log2 of that proportion: 1 if all of the gate survives, 0 if nothing does.
    A per-head norm gives RMSNorm(g o) = o / sqrt(mean(o²) + eps/g²), so what survives depends on eps / (g rms)² alone.
    """
    position, kind = placement.split(", ")
    norm = OutputNorm({"per-head norm": "head", "joint norm": "joint", "no norm": "none"}[kind], 2, width, eps).double()  # type: ignore[arg-type]
    o = torch.randn(1, 1, 2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    o = rms * o / o.square().mean(-1, keepdim=True).sqrt()
    found = []
    for g in gates:
        pair = torch.stack([g, g / 2]).view(1, 1, 2, 1)
        y = norm(o) * pair if position == "after_norm" else norm(o * pair)
        first, second = y.square().mean(-1).flatten()
        found.append(0.5 * torch.log2(first / second))
    return torch.stack(found)


@torch.no_grad()
def before_training(mixer: str, gate: HeadGateConfig | None, *, tokens: int = 512, seed: int = 0) -> tuple[float, float]:
    """Root mean square of what the output norm of a head gets (the median over tokens and heads), and of what mixers add to the residual
    stream, on random tokens; means over 6 layers x 512 with 4 heads."""
    torch.manual_seed(seed)
    config = HeadmaxConfig(mixer=mixer, hidden_size=512, num_hidden_layers=6, num_heads=4, vocab_size=32_000, head_gate=gate)
    model = HeadmaxForCausalLM(config).eval()
    given, added = list[float](), list[float]()
    for block in model.model.layers:
        block.mixer.output_norm.register_forward_pre_hook(lambda _, x: given.append(float(x[0].square().mean(-1).sqrt().median())))
        block.mixer.register_forward_hook(lambda _, x, y: added.append(float(y[0].square().mean().sqrt())))
    model(torch.randint(config.vocab_size, (1, tokens)))
    return sum(given) / len(given), sum(added) / len(added)
