"""Reading prompts in pieces, from the longest beginning that the prefix cache knows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from headmax.generate.prefill import Reader, Together
from headmax.generate.step import State
from headmax.models import HeadmaxForCausalLM
from headmax.serve.cache import PrefixCache
from headmax.serve.job import Job
from headmax.serve.reading import Piece, Pieces, Reading

MOST_RECOMPUTED = 64
"""Texts that may wait to be read for the cache alone; of more, the oldest are dropped."""


class Prompts:
    """All texts under way, for one thread. Two kinds of turn: the oldest text, and the one with the least left, so that a long prompt
    neither waits for ever nor keeps short ones waiting."""

    def __init__(self, model: HeadmaxForCausalLM, cache: PrefixCache | None, pieces: Pieces, wake: Callable[[], None]) -> None:
        self.model, self.cache, self.pieces, self.wake = model, cache, pieces, wake
        self.reading: list[Reading] = []
        self.recomputed: deque[Reading] = deque()
        """Texts that are read for the cache alone, the first of which may be under way."""
        self.turn = 0
        self.piece: Piece | None = None
        """The one under way."""

    def begin(self, job: Job) -> None:
        reading = Reading(job.tokens, job)
        if len(job.tokens) > self.pieces.chunk:
            reading.first_chunk = job.tokens[: self.pieces.chunk].numpy().tobytes()
        self.reading.append(reading)
        self._find_start(reading)

    def recompute(self, text: Tensor, generated: int) -> None:
        """Has the states after the whole chunks of a text [n] computed when no prompt is to be read."""
        end = len(text) // self.pieces.chunk * self.pieces.chunk
        if self.cache is not None and end > len(text) - generated:
            if len(self.recomputed) == MOST_RECOMPUTED:
                del self.recomputed[1]
            self.recomputed.append(Reading(text[:end], None, generated + 2 * self.pieces.chunk))

    def drop(self, job: Job) -> None:
        """Forgets a job's text."""
        for reading in self.reading:
            reading.done = reading.done or reading.job is job
        self.reading = [reading for reading in self.reading if not reading.done]
        if self.piece is not None and all(reading.done for reading in self.piece.group):
            self.piece = None

    def next(self, most: int, left: int) -> Piece | None:
        """The piece under way, or another of `most` tokens at most; None if no text is readable, or if it has more than are `left`."""
        if self.piece is None and (group := self._choose(most, left)):
            count = 0 if group[0].error is not None else max(self._size(reading, most) for reading in group)
            self.piece = Piece(group, count, len(self.model.model.layers))
        return self.piece

    def _choose(self, most: int, left: int) -> list[Reading]:
        """The text whose turn it is, and others that are read beside it."""
        readable = [reading for reading in self.reading if self._can_go_on(reading)]
        if readable:
            chosen = min(readable, key=lambda reading: reading.left) if self.turn % 2 else readable[0]
            if left < most and (chosen.error is not None or self._size(chosen, most) > left):
                return []
            self.turn += 1
            return [chosen, *self._companions(chosen, readable, left)]
        while self.recomputed and left == most:
            reading = self.recomputed[0]
            if not reading.located:
                assert self.cache is not None
                if self.cache.has(reading.tokens):
                    self.recomputed.popleft()
                    continue
                self._find_start(reading)
            if self._can_go_on(reading) and reading.left <= reading.most:
                return [reading]
            if reading.loading is not None:
                return []
            self.recomputed.popleft()
        return []

    def take_tails(self, most: int) -> list[Reading]:
        """Texts of which so few tokens are left that steps shall read them, among others' tokens; they are no longer read here."""
        if self.pieces.exact:
            return []
        group = () if self.piece is None else self.piece.group
        taken = [reading for reading in self.reading if reading not in group and self._can_go_on(reading) and reading.has_tail(most)]
        for reading in taken:
            reading.done = True
            self.reading.remove(reading)
        return taken

    def _companions(self, chosen: Reading, readable: list[Reading], most: int) -> list[Reading]:
        """Further texts that one pass reads from their start to their end, of similar length, so that padding wastes little."""
        if not self._in_one_pass(chosen, most):
            return []
        group, longest, shortest = [chosen], len(chosen.tokens), len(chosen.tokens)
        for other in readable:
            length = len(other.tokens)
            long, short = max(longest, length), min(shortest, length)
            if other is not chosen and 2 * short > long and (len(group) + 1) * long <= most and self._in_one_pass(other, most):
                group.append(other)
                longest, shortest = long, short
        return group[1:]

    def _in_one_pass(self, reading: Reading, most: int) -> bool:
        """Whether one pass can read it all, beside others."""
        if self.pieces.exact or reading.alone or reading.error is not None or reading.position or reading.job is None:
            return False
        return not reading.from_start and self._size(reading, most) == len(reading.tokens)

    def read(self, blocks: int) -> Piece | None:
        """Runs so many blocks over the piece under way, and gives it back once all have run: `done` then says of each of its texts whether
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
            if reading.done:  # cancelled meanwhile
                continue
            if piece.together is None:
                self._end_piece(reading, piece.starts[0], hidden)
            else:
                reading.final_states, reading.logits = piece.together.states(row), hidden[row : row + 1]
                if self.cache is not None and reading.position in reading.cuts:  # a copy: what one pass gives is in one memory
                    self.cache.put(reading.tokens, tree_map_only(Tensor, torch.clone, reading.final_states))
            if not reading.left:
                reading.done = True
                (self.recomputed if reading.job is None else self.reading).remove(reading)
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
        if not piece.started:
            first.reader.begin(piece.count)
            piece.started = True
        return first.reader.advance(blocks)

    def _end_piece(self, reading: Reading, start: int, hidden: Tensor) -> None:
        """What is to be kept and told after a piece from `start` on, with outputs hidden [n, hidden]."""
        reader = reading.reader
        assert reader is not None
        if reading.job is not None and reading.job.scored:
            reading.score(start, hidden)
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

    def _can_go_on(self, reading: Reading) -> bool:
        """Whether its next piece can be read, after a look at what it waits for."""
        try:
            if reading.loading is not None and reading.loading.done():
                self._loaded(reading, reading.loading)
            if reading.waits_for is not None:
                other, end = reading.waits_for
                if other.done or other.position >= end:
                    reading.waits_for = None
                    self._find_start(reading)
        except Exception as error:  # such as too little memory for its states
            reading.error = error
        return reading.reader is not None or reading.error is not None

    def _loaded(self, reading: Reading, promise: Future[tuple[State, ...]]) -> None:
        """Goes on from what the folder had."""
        assert self.cache is not None
        assert reading.node is not None
        reading.loading = None
        states = self.cache.arrived(reading.node, promise)
        if states is None:
            self._find_start(reading)
        else:
            self._start(reading, reading.node.depth * self.pieces.chunk, states)

    def _find_start(self, reading: Reading) -> None:
        """Finds where to go on from: the start, states in the cache, or those that another text is about to have."""
        if self.cache is None or reading.from_start:
            return self._start(reading, 0, ())
        node, common = self.cache.match(reading.tokens)
        reading.cuts.add(common * self.pieces.chunk)
        known = 0 if node is None else node.depth * self.pieces.chunk
        reading.waits_for = self._leader(reading, known)
        if reading.waits_for is not None:
            return None
        if node is None:
            return self._start(reading, 0, ())
        states = self.cache.fetch(node)
        if isinstance(states, Future):
            reading.node, reading.loading = node, states
            states.add_done_callback(lambda _: self.wake())
            return None
        return self._start(reading, known, states)

    def _start(self, reading: Reading, past: int, states: tuple[State, ...]) -> None:
        reading.cached = past
        reading.cuts.add(len(reading.tokens) // self.pieces.chunk * self.pieces.chunk)
        reading.reader = Reader(self.model, reading.tokens, states, past, gates=reading.job is not None and reading.job.watched)

    def _leader(self, reading: Reading, known: int) -> tuple[Reading, int] | None:
        """An older text that will have states further on in this one than the `known` tokens."""
        if reading.job is None or reading.has_waited or not reading.first_chunk:
            return None
        for other in self.reading:
            if other is reading:
                return None
            if other.first_chunk != reading.first_chunk:
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
