"""Slots for sequences that decode, and the step of those in use: all in one batch, or each by itself."""

from __future__ import annotations

import bisect
import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headmax.generate.sampling import Features, Sampled, Sampler, Sampling
from headmax.generate.step import Entry, Fetched, Step, Taken
from headmax.models import HeadmaxForCausalLM
from headmax.serve.job import Likeliest


class Outcome(NamedTuple):
    """A sequence's next token, NO_TOKEN where its logits are not finite."""

    token: int
    logprob: float | None
    likeliest: Likeliest | None


Wait = Callable[[], dict[int, Outcome]]
"""Gives the outcome of each slot of a step, once it is on the host."""


class Batch(ABC):
    """Slots for sequences that decode, and their step."""

    def __init__(self, number: int) -> None:
        self.empty = list(range(number))
        """Free slots, a heap."""

    def free(self) -> int:
        """How many slots are free."""
        return len(self.empty)

    def enter(self, entries: Sequence[Entry]) -> list[int]:
        """Puts sequences into slots, as `Step.put` does, and says which."""
        slots = heapq.nsmallest(len(entries), self.empty)
        self.put(slots, entries)
        for _ in slots:
            heapq.heappop(self.empty)
        return slots

    def leave(self, slot: int) -> None:
        heapq.heappush(self.empty, slot)

    def compact(self) -> dict[int, int]:
        """Moves sequences so that steps are smaller; from where to where."""
        return {}

    @abstractmethod
    def put(self, slots: Sequence[int], entries: Sequence[Entry]) -> None: ...

    @abstractmethod
    def take(self, slots: Sequence[int], lengths: Sequence[int]) -> list[Taken]:
        """Copies of the states in slots, as `Step.take` makes them."""

    @abstractmethod
    def feed(self, tokens: Mapping[int, int]) -> None:
        """What some slots are to be fed in the next step."""

    @abstractmethod
    def run(self, wanted: Mapping[int, Features]) -> Wait:
        """One step of these slots."""


def outcomes(sampled: Sampled, rows: Mapping[int, int], wanted: Mapping[int, Features]) -> dict[int, Outcome]:
    """Of each slot, out of results on the host; `rows` says which row each slot has there."""
    tokens = sampled.tokens.tolist()
    logprobs = None if sampled.logprobs is None else sampled.logprobs.tolist()
    results = {}
    for slot, features in wanted.items():
        row, likeliest = rows[slot], None
        if features.alternatives and sampled.likeliest is not None:
            values, ids = sampled.likeliest
            likeliest = list(zip(ids[row].tolist(), values[row].tolist(), strict=True))
        results[slot] = Outcome(tokens[row], logprobs[row] if logprobs is not None and features.logprobs else None, likeliest)
    return results


def union(features: Iterable[Features]) -> Features:
    """All that any of these asks for."""
    return Features(*(any(flags) for flags in zip(*set(features), strict=True)))


def warm(features: Features) -> Features:
    """Of the two sets that a GPU has graphs for, the one that has all that is asked for."""
    rare = features.sorted or features.penalized or features.alternatives
    return Features(True, rare, rare, True, rare)


class SharedBatch(Batch):
    """All slots in one step: as many rows as are in use, rounded up to a power of two, or always all of them if `fixed`."""

    def __init__(
        self, model: HeadmaxForCausalLM, number: int, state_dtype: torch.dtype, length: int | None, *, fixed: bool = False
    ) -> None:
        super().__init__(number)
        self.step, self.number, self.fixed = Step(model, number, state_dtype, length), number, fixed
        self.graphs = model.device.type == "cuda"
        if self.graphs:  # now, since capturing runs the step on whatever is in the slots
            for rows in {self.rows(count) for count in range(1, number + 1)}:
                for features in (warm(Features()), warm(Features(sorted=True))):
                    self.step.prepare(rows, features)

    def rows(self, count: int) -> int:
        """The batch size that runs so many slots."""
        return self.number if self.fixed else min(1 << (count - 1).bit_length(), self.number)

    def put(self, slots: Sequence[int], entries: Sequence[Entry]) -> None:
        if any(entry.rules.penalized for entry in entries):
            self.step.sampler.remember()
        self.step.put(slots, entries)

    def take(self, slots: Sequence[int], lengths: Sequence[int]) -> list[Taken]:
        return self.step.take(slots, lengths)

    def feed(self, tokens: Mapping[int, int]) -> None:
        self.step.feed(tokens)

    def run(self, wanted: Mapping[int, Features]) -> Wait:
        features = union(wanted.values())
        rows = self.rows(max(wanted) + 1)
        fetched = Fetched(self.step.prepare(rows, warm(features) if self.graphs else features)(), rows)
        return lambda: outcomes(fetched.wait(), {slot: slot for slot in wanted}, wanted)

    def compact(self) -> dict[int, int]:
        moved: dict[int, int] = {}
        used = sorted(set(range(self.number)) - set(self.empty))
        while used and self.rows(used[-1] + 1) > self.rows(len(used)):
            source, target = used.pop(), heapq.heappop(self.empty)
            self.step.move(source, target)
            self.leave(source)
            bisect.insort(used, target)
            moved[source] = target
        return moved


class SeparateSteps(Batch):
    """Each slot a step of its own: on a CPU, where a product's rounding depends on how many rows it has."""

    def __init__(self, model: HeadmaxForCausalLM, number: int, state_dtype: torch.dtype, length: int | None) -> None:
        super().__init__(number)
        self.steps = [Step(model, 1, state_dtype, length) for _ in range(number)]

    def put(self, slots: Sequence[int], entries: Sequence[Entry]) -> None:
        for slot, entry in zip(slots, entries, strict=True):
            if entry.rules.penalized:
                self.steps[slot].sampler.remember()
            self.steps[slot].put([0], [entry])

    def take(self, slots: Sequence[int], lengths: Sequence[int]) -> list[Taken]:
        return [self.steps[slot].take([0], [length])[0] for slot, length in zip(slots, lengths, strict=True)]

    def feed(self, tokens: Mapping[int, int]) -> None:
        for slot, token in tokens.items():
            self.steps[slot].feed({0: token})

    def run(self, wanted: Mapping[int, Features]) -> Wait:
        results: dict[int, Outcome] = {}
        for slot, features in wanted.items():
            results |= outcomes(self.steps[slot].prepare(1, features)(), {slot: 0}, {slot: features})
        return lambda: results


class Asked(NamedTuple):
    """A choice whose prompt has been read."""

    logits: Tensor
    """[1, vocabulary] after the prompt."""
    prompt: Tensor
    """[n]"""
    rules: Sampling
    features: Features


class FirstTokens:
    """Samples what follows prompts, of up to `rows` choices at a time; one at a time always rounds alike."""

    def __init__(self, model: HeadmaxForCausalLM, rows: int) -> None:
        self.rows = rows
        self.sampler = Sampler(rows, model.config.vocab_size, model.device)

    @torch.no_grad()
    def __call__(self, asked: Sequence[Asked]) -> list[Outcome]:
        rules, prompts = [one.rules for one in asked], [one.prompt for one in asked]
        if any(own.penalized for own in rules):
            self.sampler.remember()
        logits, count = torch.cat([one.logits for one in asked]), len(asked)
        self.sampler.put(torch.arange(count, device=logits.device), rules, prompts, 0)
        positions = torch.tensor([len(prompt) for prompt in prompts], device=logits.device)
        wanted = {row: one.features for row, one in enumerate(asked)}
        sampled = Fetched(self.sampler(logits, positions, union(wanted.values())), count).wait()
        results = outcomes(sampled, {row: row for row in wanted}, wanted)
        return [results[row] for row in range(count)]
