"""From logits to tokens, each request by its own rules and its own seed, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_STEP, _MIX_1, _MIX_2 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

MAX_TEMPERATURE, MAX_PENALTY, MAX_SUBTRACTED = 1e6, 1e3, 2.0
"""Beyond these every token is as likely as any other, or logits overflow."""
NO_TOKEN = -1
"""What is sampled where logits are not finite: it says so along with the tokens, which are fetched anyway."""
ALTERNATIVES = 20
"""How many of the most likely tokens come with a new one, where they are asked for."""


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Keep only this many of the most likely tokens."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this total probability, after top_k."""
    min_p: float = 0.0
    """Keep only tokens with at least this fraction of the highest probability."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen before, in the prompt or since."""
    seed: int = 0
    """Seed of the draws, which depend on it and on a token's position only: the same request gives the same tokens in any batch."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens generated before."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it has been generated."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not isinstance(getattr(self, name), int | float):
                raise ValueError(f"{name} must be a number, got {getattr(self, name)!r}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature must be 0 (greedy) or positive, at most {MAX_TEMPERATURE:g}, got {self.temperature}")
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 1):
            raise ValueError(f"top_k must be at least 1 or None, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise ValueError(f"repetition_penalty must be positive, {1 / MAX_PENALTY:g} to {MAX_PENALTY:g}, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_SUBTRACTED <= getattr(self, name) <= MAX_SUBTRACTED:
                raise ValueError(f"{name} must be between -{MAX_SUBTRACTED:g} and {MAX_SUBTRACTED:g}, got {getattr(self, name)}")
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**63):
            raise ValueError(f"seed must be in [0, 2^63), got {self.seed}")

    @property
    def penalized(self) -> bool:
        """Whether it matters which tokens there have been."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


GREEDY = Sampling(temperature=0.0)


class Features(NamedTuple):
    """What at least one request of a batch asks for; the others cost nothing."""

    random: bool = False
    sorted: bool = False
    penalized: bool = False
    logprobs: bool = False
    alternatives: bool = False

    @classmethod
    def of(cls, requests: Sequence[Sampling], logprobs: bool, alternatives: bool = False) -> Features:
        drawn = [s for s in requests if s.temperature > 0]
        return cls(
            random=bool(drawn),
            sorted=any(s.top_k is not None or s.top_p < 1 for s in drawn),
            penalized=any(s.penalized for s in requests),
            logprobs=logprobs,
            alternatives=alternatives,
        )


class Sampled(NamedTuple):
    """What a step gives."""

    tokens: Tensor
    """[rows]"""
    logprobs: Tensor | None = None
    """[rows] of these tokens, under the model itself."""
    likeliest: tuple[Tensor, Tensor] | None = None
    """Log-probabilities and ids [rows, ALTERNATIVES] of the most likely tokens, in order."""


def mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers in which every bit of the result depends on every bit of x (the finish of SplitMix64)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A number in [0, 1) for each pair of int64, the same on every device."""
    bits = mix(mix(seed + _STEP) + position * _STEP)
    return ((bits >> 40) & (2**24 - 1)).float() * 2**-24


class Sampler:
    """The rules of up to `slots` requests, at fixed addresses."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, 1, dtype=dtype, device=device)

        self.vocabulary = vocabulary
        self.temperature, self.top_p, self.min_p, self.penalty = (column(torch.float32) for _ in range(4))
        self.presence, self.frequency = column(torch.float32), column(torch.float32)
        self.top_k, self.seed = column(torch.int64), column(torch.int64)
        self.repeats: Tensor | None = None
        """[slots, vocabulary] which tokens a request has had; only once a request is penalized."""
        self.counts: Tensor | None = None
        """[slots, vocabulary] how often it has generated each; along with `repeats`."""

    def remember(self) -> None:
        """Takes the memory that penalized requests need."""
        if self.repeats is None:
            self.repeats = torch.zeros(self.seed.shape[0], self.vocabulary, dtype=torch.bool, device=self.seed.device)
            self.counts = torch.zeros_like(self.repeats, dtype=torch.float32)

    def set(self, requests: Sequence[Sampling], histories: Sequence[Tensor]) -> None:
        """The rules of the first slots; `histories` are the tokens [n] each request has had so far, none of which it has generated."""
        self._columns(slice(0, len(requests)), requests)
        if self.repeats is not None and self.counts is not None:
            self.repeats[: len(requests)] = False
            self.counts[: len(requests)] = 0
            for row, history in zip(self.repeats, histories, strict=False):
                row[history.to(row.device)] = True

    def put(self, slots: Tensor, rules: Sequence[Sampling], histories: Sequence[Tensor], generated: int) -> None:
        """The rules of some slots [m]. Their requests have had the tokens `histories` [n], the last few of which they have generated."""
        self._columns(slots, rules)
        if self.repeats is None or self.counts is None:
            return
        self.repeats[slots] = False
        self.counts[slots] = 0
        for slot, own, history in zip(slots.tolist() if any(own.penalized for own in rules) else (), rules, histories, strict=False):
            if own.penalized:
                new = history[len(history) - generated :].to(self.counts.device)
                self.repeats[slot, history.to(self.repeats.device)] = True
                self.counts[slot].scatter_add_(0, new, torch.ones_like(new, dtype=torch.float32))

    def move(self, source: int, target: int) -> None:
        """The rules of one slot become those of another."""
        for own in (*self._rules().values(), *(x for x in (self.repeats, self.counts) if x is not None)):
            own[target].copy_(own[source])

    def _rules(self) -> dict[str, Tensor]:
        names = ("temperature", "top_p", "min_p", "penalty", "presence", "frequency", "top_k", "seed")
        return {name: getattr(self, name) for name in names}

    def _columns(self, rows: slice | Tensor, requests: Sequence[Sampling]) -> None:
        columns = {
            "temperature": [s.temperature for s in requests],
            "top_p": [s.top_p for s in requests],
            "min_p": [s.min_p for s in requests],
            "penalty": [s.repetition_penalty for s in requests],
            "presence": [s.presence_penalty for s in requests],
            "frequency": [s.frequency_penalty for s in requests],
            "top_k": [min(s.top_k or self.vocabulary, self.vocabulary) for s in requests],
            "seed": [s.seed for s in requests],
        }
        for name, own in self._rules().items():
            own[rows] = torch.tensor(columns[name], dtype=own.dtype).unsqueeze(1).to(own.device)

    def __call__(self, logits: Tensor, position: Tensor, features: Features) -> Sampled:
        """The next token of the first requests, from logits [rows, vocabulary].

        `position` [rows] counts the tokens before the new one. Nothing here waits for the device. Where the largest logit is NaN or
        infinite the token is NO_TOKEN.
        """
        raw = logits
        if features.penalized:
            logits = self._penalize(logits)
        tokens = logits.argmax(-1)
        largest = logits.gather(1, tokens.unsqueeze(1))  # a NaN, if there is one
        if features.random:
            temperature = self.temperature[: len(logits)]
            scores = (logits - largest).div_(temperature.where(temperature > 0, 1.0))  # not above 0: no temperature makes them overflow
            drawn = self._draw(scores, uniform(self.seed[: len(logits)], position.unsqueeze(1)), features)
            tokens = torch.where(temperature.squeeze(1) > 0, drawn, tokens)
        if features.penalized and self.repeats is not None and self.counts is not None:
            self.repeats[: len(logits)].scatter_(1, tokens.unsqueeze(1), True)
            self.counts[: len(logits)].scatter_add_(1, tokens.unsqueeze(1), torch.ones_like(largest))
        logprobs, likeliest = None, None
        if features.logprobs or features.alternatives:
            total = raw.logsumexp(-1, keepdim=True)
            logprobs = (raw.gather(1, tokens.unsqueeze(1)) - total).squeeze(1)
            if features.alternatives:
                best = raw.topk(min(ALTERNATIVES, self.vocabulary), dim=-1)
                likeliest = best.values - total, best.indices
        return Sampled(tokens.where(largest.squeeze(1).isfinite(), NO_TOKEN), logprobs, likeliest)

    def _penalize(self, logits: Tensor) -> Tensor:
        """A request without penalties keeps its logits to the bit."""
        assert self.repeats is not None
        assert self.counts is not None
        rows = len(logits)
        penalty, counts = self.penalty[:rows], self.counts[:rows]
        logits = torch.where(self.repeats[:rows], torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        return logits - counts * self.frequency[:rows] - (counts > 0) * self.presence[:rows]

    def _draw(self, scores: Tensor, u: Tensor, features: Features) -> Tensor:
        """The first token at which the summed probabilities exceed u, in the vocabulary's order: it depends on the request alone."""
        probability = self.truncate(torch.softmax(scores, -1), features)
        likeliest, possible = probability.argmax(-1, keepdim=True), probability > 0
        total = probability.cumsum_(-1)
        beyond = (total > u * total.amax(-1, keepdim=True)).logical_and_(possible)
        first = beyond.view(torch.uint8).argmax(-1, keepdim=True)
        return torch.where(beyond.gather(1, first), first, likeliest).squeeze(1)

    def truncate(self, probability: Tensor, features: Features) -> Tensor:
        """Zeroes probabilities [rows, vocabulary] of tokens that top_k, top_p or min_p forbid, in place: new memory of this size costs a
        CPU more than the arithmetic."""
        rows = probability.shape[0]
        if features.sorted:
            ranked = probability.sort(-1, descending=True).values
            rank = torch.arange(ranked.shape[1], device=ranked.device)
            ranked = ranked.masked_fill(rank >= self.top_k[:rows], 0.0)
            before = ranked.cumsum(-1) - ranked
            top_p = self.top_p[:rows]  # 1 keeps all, though rounding may let `before` reach the sum
            kept = (ranked > 0) & ((before < top_p * ranked.sum(-1, keepdim=True)) | (top_p >= 1)) | (rank == 0)  # the likeliest always
            probability.masked_fill_(probability < ranked.masked_fill(~kept, 2.0).amin(-1, keepdim=True), 0.0)
        return probability.masked_fill_(probability < self.min_p[:rows] * probability.amax(-1, keepdim=True), 0.0)
