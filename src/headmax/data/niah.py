"""Single needles in a haystack (RULER's S-NIAH-1, 2, 3): a sentence with a secret value, hidden in text that does not matter.

1: a noise sentence over and over, the value a number; 2: prose, a number; 3: prose, a UUID. The key is an adjective and a noun.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
PROMPT = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} afterwards.\n"
    "{text}\nWhat is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)
DEPTHS = tuple(round(100 * n / 39) for n in range(40))
"""Positions of needles in the text, in percent."""
STRIDE = 17
"""Step through the depths, so that the first few samples already spread over the text."""
ANSWER_TOKENS = 128
"""Tokens of the length that are reserved for the answer."""


@dataclass(frozen=True)
class Sample:
    """A prompt, to be continued by the value."""

    prompt: str
    key: str
    value: str
    needle: str
    depth: int
    """Percent of the haystack's sentences that come before the needle."""
    tokens: int
    """Of the prompt."""


def sentences(text: str) -> list[str]:
    """The sentences of a text whose documents may be separated by lines `<|doc|>`."""
    joined = re.sub(r"\s+", " ", text.replace("<|doc|>", " ")).strip()
    return re.split(r"(?<=[.!?]) ", joined) if joined else []


@functools.cache
def adjectives_and_nouns() -> tuple[list[str], list[str]]:
    """(adjectives, nouns) of the package wonderwords."""
    from wonderwords import RandomWord

    source = RandomWord()
    return sorted(set(source.filter(include_categories=["adjective"]))), sorted(set(source.filter(include_categories=["noun"])))


def generated_prose(number: int = 4000, seed: int = 0) -> list[str]:
    """Sentences of random words, such as "The quiet river lifts a wooden lantern.", if RULER's essays are not available."""
    from wonderwords import RandomWord

    rng = random.Random(seed)
    adjectives, nouns = adjectives_and_nouns()
    verbs = sorted(set(RandomWord().filter(include_categories=["verb"])))

    def thing(article: str) -> str:
        return f"{article} {rng.choice(adjectives)} {rng.choice(nouns)}"

    return [f"{thing('The')} {rng.choice(verbs)}s {thing('the')} near {thing('some')}." for _ in range(number)]


@dataclass(frozen=True)
class Needles:
    """S-NIAH-`task`, with prompts and answers of at most `length` tokens together."""

    task: int
    length: int
    haystack: Sequence[str] = ()
    """Sentences of prose, for tasks 2 and 3; repeated if there are too few."""

    def __post_init__(self) -> None:
        if self.task not in (1, 2, 3):
            raise ValueError(f"Needles: task must be 1, 2 or 3, got {self.task!r}")
        if self.task > 1 and not self.haystack:
            raise ValueError(f"Needles: haystack must be sentences of prose for task {self.task}, got none")

    def samples(self, number: int, count_tokens: Callable[[str], int], seed: int = 42) -> Iterator[Sample]:
        """`number` prompts, determined by the seed, with needles evenly spread over the depths."""
        rng = random.Random(f"{seed} {self.task} {self.length}")
        adjectives, nouns = adjectives_and_nouns()
        limit = self.length - ANSWER_TOKENS

        def draw(index: int) -> tuple[str, str, int]:
            return f"{rng.choice(adjectives)}-{rng.choice(nouns)}", self._value(rng), DEPTHS[index * STRIDE % len(DEPTHS)]

        probe = draw(0)
        largest = _largest(lambda size: count_tokens(self._prompt(size, *probe)[0]) <= limit)
        for index in range(number):
            key, value, depth = draw(index)
            for size in range(largest, -1, -1):  # a needle longer than the probe's may leave room for fewer sentences
                prompt, needle = self._prompt(size, key, value, depth)
                if (tokens := count_tokens(prompt)) <= limit:
                    yield Sample(prompt, key, value, needle, depth, tokens)
                    break
            else:
                raise ValueError(f"Needles: length {self.length} is too short for a question and {ANSWER_TOKENS} tokens of answer")

    def _value(self, rng: random.Random) -> str:
        while True:
            value = str(uuid.UUID(int=rng.getrandbits(128), version=4)) if self.task == 3 else str(rng.randint(10**6, 10**7 - 1))
            if not any(value in sentence for sentence in self.haystack):
                return value

    def _prompt(self, size: int, key: str, value: str, depth: int) -> tuple[str, str]:
        """(prompt, needle) with `size` sentences of haystack."""
        kind = "uuid" if self.task == 3 else "number"
        needle = NEEDLE.format(kind=kind, key=key, value=value)
        text = [NOISE] * size if self.task == 1 else list(itertools.islice(itertools.cycle(self.haystack), size))
        text.insert(int(size * depth / 100), needle)
        return PROMPT.format(kind=kind, key=key, text=("\n" if self.task == 1 else " ").join(text)), needle


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, or 0, by doubling and bisection."""
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
