"""From logits to tokens, each request by its own rules and its own seed, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_STEP, _MIX_1, _MIX_2 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

MAX_TEMPERATURE, MAX_PENALTY = 1e6, 1e3
"""Beyond these every token is as likely as any other, or logits overflow."""
NO_TOKEN = -1
"""What is sampled where logits are not finite: it says so along with the tokens, which are fetched anyway."""


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Only this many most likely tokens."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability, after top_k."""
    min_p: float = 0.0
    """Only tokens at least this likely, as a share of the most likely one's probability."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen before, in the prompt or since."""
    seed: int = 0
    """With a token's position it decides the draw: the same request gives the same tokens in any batch."""

    def __post_init__(self) -> None:
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
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**63):
            raise ValueError(f"seed must be in [0, 2^63), got {self.seed}")


GREEDY = Sampling(temperature=0.0)


class Features(NamedTuple):
    """What at least one request of a batch asks for; the others cost nothing."""

    random: bool = False
    sorted: bool = False
    penalized: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, requests: Sequence[Sampling], logprobs: bool) -> Features:
        drawn = [s for s in requests if s.temperature > 0]
        return cls(
            random=bool(drawn),
            sorted=any(s.top_k is not None or s.top_p < 1 for s in drawn),
            penalized=any(s.repetition_penalty != 1 for s in requests),
            logprobs=logprobs,
        )


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
        self.top_k, self.seed = column(torch.int64), column(torch.int64)
        self.repeats: Tensor | None = None
        """[slots, vocabulary] which tokens a request has had; only once a request is penalized."""

    def remember(self) -> None:
        """Takes the memory that penalized requests need."""
        if self.repeats is None:
            self.repeats = torch.zeros(self.seed.shape[0], self.vocabulary, dtype=torch.bool, device=self.seed.device)

    def set(self, requests: Sequence[Sampling], histories: Sequence[Tensor]) -> None:
        """The rules of the first slots; `histories` are the tokens [n] each request has had so far."""
        columns = {
            "temperature": [s.temperature for s in requests],
            "top_p": [s.top_p for s in requests],
            "min_p": [s.min_p for s in requests],
            "penalty": [s.repetition_penalty for s in requests],
            "top_k": [min(s.top_k or self.vocabulary, self.vocabulary) for s in requests],
            "seed": [s.seed for s in requests],
        }
        for name, values in columns.items():
            own = getattr(self, name)
            own[: len(requests)].copy_(torch.tensor(values, dtype=own.dtype).unsqueeze(1))
        if self.repeats is not None:
            self.repeats[: len(requests)] = False
            for row, history in zip(self.repeats, histories, strict=False):
                row[history.to(row.device)] = True

    def __call__(self, logits: Tensor, position: Tensor, features: Features) -> tuple[Tensor, Tensor | None]:
        """The next token of the first requests [rows], and its log-probability under the model itself, from logits [rows, vocabulary].

        `position` [rows] counts the tokens before the new one. Nothing here waits for the device. Where the largest logit is NaN or
        infinite the token is NO_TOKEN.
        """
        rows, raw = logits.shape[0], logits
        if features.penalized:
            assert self.repeats is not None
            penalty = self.penalty[:rows]
            logits = torch.where(self.repeats[:rows], torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        tokens = logits.argmax(-1)
        largest = logits.gather(1, tokens.unsqueeze(1))  # a NaN, if there is one
        if features.random:
            temperature = self.temperature[:rows]
            scores = (logits - largest) / temperature.where(temperature > 0, 1.0)  # not above 0: no temperature makes them overflow
            drawn = self._draw(scores, uniform(self.seed[:rows], position.unsqueeze(1)), features)
            tokens = torch.where(temperature.squeeze(1) > 0, drawn, tokens)
        if features.penalized:
            assert self.repeats is not None
            self.repeats[:rows].scatter_(1, tokens.unsqueeze(1), True)
        logprobs = raw.gather(1, tokens.unsqueeze(1)).squeeze(1) - raw.logsumexp(-1) if features.logprobs else None
        return tokens.where(largest.squeeze(1).isfinite(), NO_TOKEN), logprobs

    def _draw(self, scores: Tensor, u: Tensor, features: Features) -> Tensor:
        """The first token at which the summed probabilities exceed u, in the vocabulary's order: it depends on the request alone."""
        probability = self.truncate(torch.softmax(scores, -1), features)
        total = probability.cumsum(-1)
        beyond = (total > u * total.amax(-1, keepdim=True)) & (probability > 0)
        return torch.where(beyond.any(-1), beyond.int().argmax(-1), probability.argmax(-1))

    def truncate(self, probability: Tensor, features: Features) -> Tensor:
        """Probabilities [rows, vocabulary], zero where top_k, top_p or min_p forbid a token."""
        rows = probability.shape[0]
        if features.sorted:
            ranked = probability.sort(-1, descending=True).values
            rank = torch.arange(ranked.shape[1], device=ranked.device)
            ranked = ranked.masked_fill(rank >= self.top_k[:rows], 0.0)
            before = ranked.cumsum(-1) - ranked
            kept = (ranked > 0) & (before < self.top_p[:rows] * ranked.sum(-1, keepdim=True)) | (rank == 0)  # the likeliest always
            probability = probability.masked_fill(probability < ranked.masked_fill(~kept, 2.0).amin(-1, keepdim=True), 0.0)
        return probability.masked_fill(probability < self.min_p[:rows] * probability.amax(-1, keepdim=True), 0.0)
