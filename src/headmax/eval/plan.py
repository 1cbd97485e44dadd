"""Batches of requests: each context, and each common prefix of contexts, is read once, packed with others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headmax.ops.packing import CHUNK

Tokens = tuple[int, ...]

SHARED = 32
"""Fewest tokens of a common prefix to be read separately; it must also be half of each context."""


@dataclass(frozen=True)
class Limits:
    """Limits of one forward pass; a single sequence may exceed them."""

    tokens: int
    rows: int
    """Sequences."""
    mixed: int
    """Tokens after which a pass only takes sequences of similar length, as on a CPU each is padded to the longest, up to a chunk."""


def slots(length: int) -> int:
    """Padded length of a sequence in a packed row on a CPU, if it is the longest."""
    return min(CHUNK, 1 << (length - 1).bit_length())


@dataclass
class Batch:
    """Contexts that are read together, after their common prefixes, if any."""

    contexts: list[Tokens] = field(default_factory=list)
    prefixes: list[Tokens] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    """Index of each context's prefix; empty without prefixes."""
    tokens: int = 0

    @property
    def endings(self) -> list[Tokens]:
        """Each context without its prefix."""
        return [context[len(self.prefixes[n]) :] for context, n in zip(self.contexts, self.owner, strict=True)]


def common_length(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def families(contexts: Sequence[Tokens]) -> list[tuple[Tokens, list[Tokens]]]:
    """(prefix, contexts) of contexts that share at least SHARED tokens and half of each; a context on its own has prefix ()."""
    groups: list[tuple[Tokens, list[Tokens]]] = []
    for context in sorted(contexts):
        if groups:
            prefix, members = groups[-1]
            shared = common_length(prefix, context[:-1])  # at least one token must follow the prefix
            if shared >= SHARED and 2 * shared >= len(context):
                groups[-1] = (prefix[:shared], [*members, context])
                continue
        groups.append((context[:-1], [context]))
    return [(prefix if len(members) > 1 else (), members) for prefix, members in groups]


def batches(contexts: Sequence[Tokens], limits: Limits) -> Iterator[Batch]:
    """Batches of contexts of similar length, longest first."""
    groups = sorted(families(contexts), key=lambda group: (bool(group[0]), -max(map(len, group[1]))))
    batch = Batch()
    for prefix, members in groups:
        for context in members:
            prefix_read = prefix in batch.prefixes[-1:]
            cost = len(context) - (len(prefix) if prefix_read else 0)
            full = batch.tokens + cost > limits.tokens or len(batch.contexts) == limits.rows
            shorter = batch.tokens >= limits.mixed and slots(len(context)) < slots(len(batch.contexts[0]))
            if batch.contexts and (full or shorter or bool(prefix) != bool(batch.prefixes)):
                yield batch
                batch, prefix_read, cost = Batch(), False, len(context)
            if prefix and not prefix_read:
                batch.prefixes.append(prefix)
            if prefix:
                batch.owner.append(len(batch.prefixes) - 1)
            batch.contexts.append(context)
            batch.tokens += cost
    if batch.contexts:
        yield batch


def split(lengths: Sequence[int], limits: Limits, padded: bool = False) -> Iterator[range]:
    """Ranges of sequences, sorted longest first, to run together; `padded` counts padding too."""
    start, total = 0, 0
    for n, length in enumerate(lengths):
        shorter = total >= limits.mixed and slots(length) < slots(lengths[start])
        total = (n + 1 - start) * lengths[start] if padded else total + length
        if n > start and (total > limits.tokens or n - start == limits.rows or (shorter and not padded)):
            yield range(start, n)
            start, total = n, length
    if lengths:
        yield range(start, len(lengths))
