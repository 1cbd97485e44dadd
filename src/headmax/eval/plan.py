"""In what order requests are answered: contexts read once, packed with others, and common beginnings of contexts read once too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headmax.ops.packing import CHUNK

Tokens = tuple[int, ...]

SHARED = 32
"""Tokens that contexts must have in common, beside half of their length, to be read as one beginning and several endings."""


@dataclass(frozen=True)
class Limits:
    """What one forward pass takes, where a single sequence is not more."""

    tokens: int
    rows: int
    """Sequences."""
    mixed: int
    """Tokens from which on a pass keeps to sequences of similar length. Off a GPU each takes the room of the longest, up to a chunk."""


def slots(length: int) -> int:
    """What a short sequence takes up in a packed row off a GPU, where it is the longest."""
    return min(CHUNK, 1 << (length - 1).bit_length())


@dataclass
class Batch:
    """Contexts that are read together, after their common beginnings if there are any."""

    contexts: list[Tokens] = field(default_factory=list)
    prefixes: list[Tokens] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    """The prefix of each context; empty where there are none."""
    tokens: int = 0

    @property
    def endings(self) -> list[Tokens]:
        """What is left of each context after its prefix."""
        return [context[len(self.prefixes[n]) :] for context, n in zip(self.contexts, self.owner, strict=True)]


def common(a: Tokens, b: Tokens) -> int:
    """How many tokens two sequences begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def families(contexts: Sequence[Tokens]) -> list[tuple[Tokens, list[Tokens]]]:
    """(beginning, contexts) where several contexts share at least SHARED tokens and half of each; a context alone has beginning ()."""
    made: list[tuple[Tokens, list[Tokens]]] = []
    for context in sorted(contexts):
        if made:
            prefix, members = made[-1]
            alike = common(prefix, context[:-1])  # something must be left to read after the beginning
            if alike >= SHARED and 2 * alike >= len(context):
                made[-1] = (prefix[:alike], [*members, context])
                continue
        made.append((context[:-1], [context]))
    return [(prefix if len(members) > 1 else (), members) for prefix, members in made]


def batches(contexts: Sequence[Tokens], limits: Limits) -> Iterator[Batch]:
    """Contexts of similar length together, the longest first."""
    groups = sorted(families(contexts), key=lambda group: (bool(group[0]), -max(map(len, group[1]))))
    batch = Batch()
    for prefix, members in groups:
        for context in members:
            known = prefix in batch.prefixes[-1:]
            cost = len(context) - known * len(prefix)
            full = batch.tokens + cost > limits.tokens or len(batch.contexts) == limits.rows
            shorter = batch.tokens >= limits.mixed and slots(len(context)) < slots(len(batch.contexts[0]))
            if batch.contexts and (full or shorter or bool(prefix) != bool(batch.prefixes)):
                yield batch
                batch, known, cost = Batch(), False, len(context)
            if prefix and not known:
                batch.prefixes.append(prefix)
            if prefix:
                batch.owner.append(len(batch.prefixes) - 1)
            batch.contexts.append(context)
            batch.tokens += cost
    if batch.contexts:
        yield batch


def split(lengths: Sequence[int], limits: Limits, padded: bool = False) -> Iterator[range]:
    """Neighbours to run together, given the longest first; padding counts too if `padded`."""
    start, total = 0, 0
    for n, length in enumerate(lengths):
        shorter = total >= limits.mixed and slots(length) < slots(lengths[start])
        total = (n + 1 - start) * lengths[start] if padded else total + length
        if n > start and (total > limits.tokens or n - start == limits.rows or (shorter and not padded)):
            yield range(start, n)
            start, total = n, length
    if lengths:
        yield range(start, len(lengths))
