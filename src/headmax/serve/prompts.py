"""Reading prompts in pieces, from the longest beginning that the prefix cache knows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from headmax.generate.prefill import Reader, Together
from headmax.generate.sampling import ALTERNATIVES
from headmax.generate.step import State
from headmax.models import HeadmaxForCausalLM
from headmax.serve.cache import Node, PrefixCache
from headmax.serve.job import Job, Likeliest, NewToken

MOST_LATER = 64
"""Texts that may wait to be read for the cache alone; of more, the oldest are dropped."""


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
        self.known: tuple[State, ...] | None = None
        """The states after it, where it was read beside others."""
        self.alone = False
        """Whether it must be read by itself, since reading it beside others has failed."""
        self.head = b""
        """Its first chunk, if it goes on after that."""
        self.node: Node | None = None
        self.promise: Future[tuple[State, ...]] | None = None
        self.after: tuple[Reading, int] | None = None
        """Another that reads the same beginning, and how long that is: its states are waited for, once."""
        self.has_waited = False
        self.over = False
        self.error: Exception | None = None
        """Why it cannot be read: its next piece raises it."""

    @property
    def position(self) -> int:
        return len(self.tokens) if self.known is not None else 0 if self.reader is None else self.reader.position

    def states(self) -> tuple[State, ...]:
        """After what has been read."""
        assert self.reader is not None
        return self.reader.states() if self.known is None else self.known

    @property
    def left(self) -> int:
        return len(self.tokens) - self.position


class Piece:
    """The next tokens of a text, or several whole texts: one pass, which may be left after any block."""

    def __init__(self, group: list[Reading], count: int, blocks: int) -> None:
        """`count` tokens of each, padding included; `blocks` are still to run over them."""
        self.group, self.count, self.blocks = group, count, blocks
        self.starts = [reading.position for reading in group]
        self.together: Together | None = None
        self.begun = False

    @property
    def tokens(self) -> int:
        return self.count * len(self.group)


class Prompts:
    """All texts under way, for one thread. Two kinds of turn: the oldest text, and the one with the least left, so that a long prompt
    neither waits for ever nor keeps short ones waiting."""

    def __init__(self, model: HeadmaxForCausalLM, cache: PrefixCache | None, pieces: Pieces, wake: Callable[[], None]) -> None:
        self.model, self.cache, self.pieces, self.wake = model, cache, pieces, wake
        self.reading: list[Reading] = []
        self.later: deque[Reading] = deque()
        """Texts that are read for the cache alone, the first of which may be under way."""
        self.turn = 0
        self.piece: Piece | None = None
        """The one under way."""

    def begin(self, job: Job) -> None:
        reading = Reading(job.tokens, job)
        if len(job.tokens) > self.pieces.chunk:
            reading.head = job.tokens[: self.pieces.chunk].numpy().tobytes()
        self.reading.append(reading)
        self._locate(reading)

    def keep_later(self, text: Tensor, generated: int) -> None:
        """Has the states after the whole chunks of a text [n] computed when no prompt is to be read."""
        end = len(text) // self.pieces.chunk * self.pieces.chunk
        if self.cache is not None and end > len(text) - generated:
            if len(self.later) == MOST_LATER:
                del self.later[1]
            self.later.append(Reading(text[:end], None, generated + 2 * self.pieces.chunk))

    def drop(self, job: Job) -> None:
        """Forgets a job's text."""
        for reading in self.reading:
            reading.over = reading.over or reading.job is job
        self.reading = [reading for reading in self.reading if not reading.over]
        if self.piece is not None and all(reading.over for reading in self.piece.group):
            self.piece = None

    def next(self, most: int, left: int) -> Piece | None:
        """The piece under way, or another of `most` tokens at most; None if no text is ready, or if it has more than are `left`."""
        if self.piece is None and (group := self._choose(most, left)):
            count = 0 if group[0].error is not None else max(self._size(reading, most) for reading in group)
            self.piece = Piece(group, count, len(self.model.model.layers))
        return self.piece

    def _choose(self, most: int, left: int) -> list[Reading]:
        """The text whose turn it is, and others that are read beside it."""
        ready = [reading for reading in self.reading if self._ready(reading)]
        if ready:
            chosen = min(ready, key=lambda reading: reading.left) if self.turn % 2 else ready[0]
            if left < most and (chosen.error is not None or self._size(chosen, most) > left):
                return []
            self.turn += 1
            return [chosen, *self._beside(chosen, ready, left)]
        while self.later and left == most:
            reading = self.later[0]
            if not self._settled(reading):
                assert self.cache is not None
                if self.cache.has(reading.tokens):
                    self.later.popleft()
                    continue
                self._locate(reading)
            if self._ready(reading) and reading.left <= reading.most:
                return [reading]
            if reading.promise is not None:
                return []
            self.later.popleft()
        return []

    def skim(self, most: int) -> list[Reading]:
        """Texts of which so few tokens are left that steps shall read them, beside those that decode; they are no longer read here."""
        busy = () if self.piece is None else self.piece.group
        found = [reading for reading in self.reading if reading not in busy and self._ready(reading) and self._short(reading, most)]
        for reading in found:
            reading.over = True
            self.reading.remove(reading)
        return found

    def _short(self, reading: Reading, most: int) -> bool:
        job = reading.job
        if self.pieces.exact or reading.error is not None or job is None or not 0 < reading.left <= most or not reading.position:
            return False
        return not (job.scored or job.watched or any(rules.penalized for rules in job.rules)) and job.max_new_tokens > 0

    def _beside(self, chosen: Reading, ready: list[Reading], most: int) -> list[Reading]:
        """Further texts that one pass reads from their start to their end, of similar length, so that padding wastes little."""
        if not self._whole(chosen, most):
            return []
        group, longest, shortest = [chosen], len(chosen.tokens), len(chosen.tokens)
        for other in ready:
            length = len(other.tokens)
            long, short = max(longest, length), min(shortest, length)
            if other is not chosen and 2 * short > long and (len(group) + 1) * long <= most and self._whole(other, most):
                group.append(other)
                longest, shortest = long, short
        return group[1:]

    def _whole(self, reading: Reading, most: int) -> bool:
        """Whether one pass can read it all, beside others."""
        if self.pieces.exact or reading.alone or reading.error is not None or reading.position or reading.job is None:
            return False
        return not (reading.job.scored or reading.job.watched) and self._size(reading, most) == len(reading.tokens)

    def read(self, blocks: int) -> Piece | None:
        """Runs so many blocks over the piece under way, and gives it back once all have run: `over` then says of each of its texts whether
        that was its last."""
        piece = self.piece
        assert piece is not None
        self.piece = None  # whatever fails
        hidden = self._run(piece, blocks)
        piece.blocks -= blocks
        if hidden is None:
            self.piece = piece
            return None
        for row, reading in enumerate(piece.group):
            if reading.over:  # cancelled meanwhile
                continue
            if piece.together is None:
                self._end_piece(reading, piece.starts[0], hidden)
            else:
                reading.known, reading.logits = piece.together.states(row), hidden[row : row + 1]
                if self.cache is not None and reading.position in reading.cuts:  # a copy: what one pass gives is in one memory
                    self.cache.put(reading.tokens, tree_map_only(Tensor, torch.clone, reading.known))
            if not reading.left:
                reading.over = True
                (self.later if reading.job is None else self.reading).remove(reading)
        return piece

    def _run(self, piece: Piece, blocks: int) -> Tensor | None:
        first = piece.group[0]
        if len(piece.group) > 1:
            if piece.together is None:
                piece.together = Together(self.model, [reading.tokens for reading in piece.group])
            return piece.together.advance(blocks)
        if first.error is not None:
            raise first.error
        assert first.reader is not None
        if not piece.begun:
            first.reader.begin(piece.count)
            piece.begun = True
        return first.reader.advance(blocks)

    def _end_piece(self, reading: Reading, start: int, hidden: Tensor) -> None:
        """What is to be kept and told after a piece from `start` on, with outputs hidden [n, hidden]."""
        reader = reading.reader
        assert reader is not None
        if reading.job is not None and reading.job.scored:
            self._score(reading, start, hidden)
        if self.cache is not None and reader.position in reading.cuts:
            self.cache.put(reading.tokens[: reader.position], reader.states())
        if not reader.left and reading.job is not None and reading.job.max_new_tokens:
            reading.logits = reader.logits(hidden[-1:])

    def _size(self, reading: Reading, most: int) -> int:
        """Tokens of the next piece, which ends with a chunk or with its text."""
        at, chunk = reading.position, self.pieces.chunk
        if self.pieces.exact:
            return min(reading.left, chunk - at % chunk)
        end = min((cut for cut in reading.cuts if cut > at), default=len(reading.tokens))
        return end - at if end - at <= most else max(chunk, (at + most) // chunk * chunk - at)

    @staticmethod
    def _settled(reading: Reading) -> bool:
        return reading.reader is not None or reading.promise is not None or reading.after is not None

    def _ready(self, reading: Reading) -> bool:
        """Whether its next piece can be read, after a look at what it waits for."""
        try:
            if reading.promise is not None and reading.promise.done():
                self._arrived(reading, reading.promise)
            if reading.after is not None:
                other, end = reading.after
                if other.over or other.position >= end:
                    reading.after = None
                    self._locate(reading)
        except Exception as error:  # such as too little memory for its states
            reading.error = error
        return reading.reader is not None or reading.error is not None

    def _arrived(self, reading: Reading, promise: Future[tuple[State, ...]]) -> None:
        """Goes on from what the folder had."""
        assert self.cache is not None
        assert reading.node is not None
        reading.promise = None
        states = self.cache.arrived(reading.node, promise)
        if states is None:
            self._locate(reading)
        else:
            self._start(reading, reading.node.depth * self.pieces.chunk, states)

    def _locate(self, reading: Reading) -> None:
        """Finds where to go on from: the start, states in the cache, or those that another text is about to have."""
        if self.cache is None or (reading.job is not None and (reading.job.scored or reading.job.watched)):
            return self._start(reading, 0, ())
        node, common = self.cache.match(reading.tokens)
        reading.cuts.add(common * self.pieces.chunk)
        known = 0 if node is None else node.depth * self.pieces.chunk
        reading.after = self._ahead(reading, known)
        if reading.after is not None:
            return None
        if node is None:
            return self._start(reading, 0, ())
        states = self.cache.fetch(node)
        if isinstance(states, Future):
            reading.node, reading.promise = node, states
            states.add_done_callback(lambda _: self.wake())
            return None
        return self._start(reading, known, states)

    def _start(self, reading: Reading, past: int, states: tuple[State, ...]) -> None:
        reading.cached = past
        reading.cuts.add(len(reading.tokens) // self.pieces.chunk * self.pieces.chunk)
        reading.reader = Reader(self.model, reading.tokens, states, past, gates=reading.job is not None and reading.job.watched)

    def _ahead(self, reading: Reading, known: int) -> tuple[Reading, int] | None:
        """An older text that will have states further on in this one than the `known` tokens."""
        if reading.job is None or reading.has_waited or not reading.head:
            return None
        for other in self.reading:
            if other is reading:
                return None
            if other.head != reading.head:
                continue
            length = min(len(other.tokens), len(reading.tokens) - 1)
            differing = (other.tokens[:length] != reading.tokens[:length]).nonzero()
            shared = int(differing[0]) if len(differing) else length
            end = shared // self.pieces.chunk * self.pieces.chunk
            if end > known and other.position < end:
                reading.has_waited = True
                other.cuts.add(end)
                return other, end
        return None

    @torch.no_grad()
    def _score(self, reading: Reading, start: int, hidden: Tensor) -> None:
        """Notes the log-probabilities of the tokens that follow those just read, with outputs hidden [n, hidden]."""
        assert reading.reader is not None
        assert reading.job is not None
        targets = reading.tokens[start + 1 : start + 1 + len(hidden)]
        if not len(targets):
            return
        logprobs = reading.reader.logits(hidden[: len(targets)]).log_softmax(-1)
        chosen = logprobs.gather(1, targets.to(logprobs.device).unsqueeze(1))[:, 0].tolist()
        tops: Sequence[Likeliest | None] = [None] * len(chosen)
        if reading.job.likeliest:
            values, ids = (x.tolist() for x in logprobs.topk(min(ALTERNATIVES, logprobs.shape[1]), dim=-1))
            tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        scores = zip(targets.tolist(), chosen, tops, strict=True)
        reading.scores += [NewToken(0, token, logprob, likeliest) for token, logprob, likeliest in scores]
