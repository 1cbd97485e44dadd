"""A prompt while it is read: how far, from which states on, and what has come of it; and the passes that read it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from headmax.generate.prefill import Reader, Together
from headmax.generate.sampling import ALTERNATIVES
from headmax.generate.step import State
from headmax.serve.cache import Node
from headmax.serve.job import Job, Likeliest, NewToken


class Pieces(NamedTuple):
    """How prompts are cut."""

    chunk: int
    """States are kept after whole chunks, counted from the text's start."""
    most: int
    """Most tokens of a piece, and of all prompts between two steps of those that decode."""
    exact: bool
    """Every piece ends with its chunk, so that each has the same shape whatever the cache holds."""


class Reading:
    """A text under way. Without a job it is read for the cache alone."""

    def __init__(self, tokens: Tensor, job: Job | None = None, most: int = 0) -> None:
        """`most` are the tokens that may be read of a text without a job; where more are missing it is not worth it."""
        self.tokens, self.job, self.most = tokens, job, most
        self.reader: Reader | None = None
        self.cached = 0
        self.cuts: set[int] = set()
        """Where states are to be kept."""
        self.scores: list[NewToken] = []
        self.logits: Tensor | None = None
        """[1, vocabulary] of what follows, once it has been read; None of a text for the cache alone."""
        self.final_states: tuple[State, ...] | None = None
        """The states after it, where one pass has read it together with others."""
        self.alone = False
        """Whether it must be read by itself, since a pass over several has failed."""
        self.first_chunk = b""
        """Its tokens, if the text goes on after them."""
        self.node: Node | None = None
        self.loading: Future[tuple[State, ...]] | None = None
        """States of `node` on their way from the folder."""
        self.waits_for: tuple[Reading, int] | None = None
        """Another that reads the same beginning, and how long that is: its states are waited for, once."""
        self.has_waited = False
        self.done = False
        self.error: Exception | None = None
        """Why it cannot be read: its next piece raises it."""

    @property
    def position(self) -> int:
        return len(self.tokens) if self.final_states is not None else 0 if self.reader is None else self.reader.position

    def states(self) -> tuple[State, ...]:
        """After what has been read."""
        assert self.reader is not None
        return self.reader.states() if self.final_states is None else self.final_states

    @property
    def left(self) -> int:
        return len(self.tokens) - self.position

    @property
    def from_start(self) -> bool:
        """Whether all of it must be read, whatever is cached, and by itself: what is asked for comes with each token."""
        return self.job is not None and (self.job.scored or self.job.watched)

    @property
    def located(self) -> bool:
        """Whether it is known from where it goes on."""
        return self.reader is not None or self.loading is not None or self.waits_for is not None

    def has_tail(self, most: int) -> bool:
        """Whether steps can read what is left of it: a few tokens, after others, whose outputs nobody asks for."""
        job = self.job
        if self.error is not None or job is None or not 0 < self.left <= most or not self.position:
            return False
        return not self.from_start and job.max_new_tokens > 0 and not any(rules.penalized for rules in job.rules)

    @torch.no_grad()
    def score(self, start: int, hidden: Tensor) -> None:
        """Notes the log-probabilities of the tokens that follow those from `start` on, with outputs hidden [n, hidden]."""
        assert self.reader is not None
        assert self.job is not None
        targets = self.tokens[start + 1 : start + 1 + len(hidden)]
        if not len(targets):
            return
        logprobs = self.reader.logits(hidden[: len(targets)]).log_softmax(-1)
        chosen = logprobs.gather(1, targets.to(logprobs.device).unsqueeze(1))[:, 0].tolist()
        tops: Sequence[Likeliest | None] = [None] * len(chosen)
        if self.job.likeliest:
            values, ids = (x.tolist() for x in logprobs.topk(min(ALTERNATIVES, logprobs.shape[1]), dim=-1))
            tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        scores = zip(targets.tolist(), chosen, tops, strict=True)
        self.scores += [NewToken(0, token, logprob, likeliest) for token, logprob, likeliest in scores]


class Piece:
    """The next tokens of a text, or several whole texts: one pass, which may pause after any block."""

    def __init__(self, group: list[Reading], count: int, blocks: int) -> None:
        """`count` tokens of each, padding included; `blocks` are still to run over them."""
        self.group, self.count, self.blocks = group, count, blocks
        self.starts = [reading.position for reading in group]
        self.together: Together | None = None
        self.started = False

    @property
    def tokens(self) -> int:
        return self.count * len(self.group)
