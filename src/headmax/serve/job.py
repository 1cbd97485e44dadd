"""What a caller asks of the scheduler, and what comes back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headmax.analysis.gates import Layer
from headmax.generate.sampling import Features, Sampling
from headmax.generate.step import Taken

Likeliest = list[tuple[int, float]]
"""Token ids with their log-probabilities, the most likely first."""


class NewToken(NamedTuple):
    """One more token of a choice."""

    choice: int
    token: int
    logprob: float | None
    likeliest: Likeliest | None


class Read(NamedTuple):
    """The prompt has been read."""

    cached: int
    """Tokens of it whose states were there already."""
    scores: list[NewToken] | None
    """Its tokens but the first, under the model, if asked for."""


class Ended(NamedTuple):
    """A choice has all its tokens."""

    choice: int
    reason: Literal["stop", "length"]


class Failed(NamedTuple):
    """The whole job ended in an error; nothing else comes."""

    error: Exception


class NewGates(NamedTuple):
    """The head gates of some of the text's tokens, those of the prompt among them."""

    start: int
    """How many tokens come before them."""
    layers: list[Layer]


Event = NewToken | Read | Ended | Failed | NewGates


class Full(Exception):
    """As many jobs wait as may."""


class Closed(Exception):
    """No more jobs are taken."""


@dataclass(eq=False)
class Job:
    """A prompt and the continuations asked of it. The scheduler owns all but the first group of fields once it is submitted."""

    tokens: Tensor
    """The prompt [n] on the host, n >= 1."""
    rules: Sequence[Sampling]
    """Of each choice."""
    max_new_tokens: int
    listen: Callable[[Event], None]
    """Called in the scheduler's thread with each event, in order: it must not wait."""
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end a choice, which is then its last."""
    logprobs: bool = False
    likeliest: bool = False
    """Whether the most likely tokens come along with each."""
    scored: bool = False
    """Whether the prompt's own tokens are scored; it is then read from its start."""
    watched: bool = False
    """Whether the head gates of all tokens come too, up to its end; it is then read from its start and has one choice."""

    arrived: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    cancelled_choices: set[int] = field(default_factory=set)
    open: int = 0
    """Choices that have not ended."""
    length: int = field(init=False)
    """Tokens of the prompt."""

    def __post_init__(self) -> None:
        self.length = len(self.tokens)

    def features(self, rules: Sampling) -> Features:
        """What a choice's step must compute."""
        return Features.of([rules], self.logprobs or self.likeliest, self.likeliest)


@dataclass(eq=False)
class Choice:
    """A choice in a slot."""

    job: Job
    choice: int
    rules: Sampling
    features: Features
    new: list[int] = field(default_factory=list)
    """Its tokens so far, as the host knows them."""
    launched: int = 1
    """How many there are once all steps under way have ended; below 1 while steps read the prompt's end."""
    tail: deque[int] = field(default_factory=deque)
    """The last tokens of its prompt, where steps are to read them."""
    snapshot: tuple[int, Taken] | None = None
    """A number of tokens, and a copy of the states after them, to be kept when it ends."""
    done: bool = False
    last: float = field(default_factory=time.monotonic)
    """When its last token came."""

    def text(self) -> Tensor:
        """[n] the prompt and its tokens so far."""
        return torch.cat([self.job.tokens, torch.tensor(self.new, dtype=torch.int64)])

    @property
    def fed(self) -> int:
        """Tokens of the text that the states in its slot hold."""
        return self.job.length + self.launched - 1
