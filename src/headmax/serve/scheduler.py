"""Continuous batching: one thread owns model and slots; jobs come and go at any time, from any thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque

import torch

from headmax.generate.sampling import NO_TOKEN
from headmax.generate.step import Entry
from headmax.models import HeadmaxForCausalLM
from headmax.serve.batch import Asked, Batch, FirstTokens, Outcome, Wait
from headmax.serve.cache import PrefixCache
from headmax.serve.gates import GateReadings, gates_of
from headmax.serve.job import Choice, Closed, Ended, Event, Failed, Full, Job, NewToken, Read
from headmax.serve.metrics import Metrics
from headmax.serve.pace import Pace
from headmax.serve.prompts import Piece, Pieces, Prompts, Reading

logger = logging.getLogger("headmax")

MOST_FIRST = 64
"""First tokens that are sampled at a time."""
MOST_FAILURES = 3
"""Steps in a row that may fail before the scheduler gives up."""


class Scheduler:
    """Each turn of the thread admits jobs in the order they came, reads parts of prompts for about as long as a step takes, and moves all
    choices in slots on by one token: nobody who generates waits for more than that.

    Its methods may be called from any thread; `Job.listen` is called in the scheduler's.
    """

    def __init__(
        self,
        model: HeadmaxForCausalLM,
        batch: Batch,
        *,
        pieces: Pieces,
        cache: PrefixCache | None = None,
        queue: int = 256,
        ahead: int | None = None,
        feed: int | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """
        Args:
            queue: most jobs that wait for a slot.
            feed: tokens at a prompt's end that steps read, in place of a pass of its own; by default 16 on a GPU, where a pass takes as
                long as many steps, and 1 elsewhere.
            ahead: steps that may be under way on the device while the host looks at an earlier one; by default 1 on a GPU.
        """
        self.model, self.batch, self.cache, self.pieces, self.queue = model, batch, cache, pieces, queue
        self.ahead = (1 if model.device.type == "cuda" else 0) if ahead is None else ahead
        self.feed = (16 if model.device.type == "cuda" else 1) if feed is None else feed
        self.metrics = Metrics() if metrics is None else metrics
        self.first = FirstTokens(model, 1 if pieces.exact else MOST_FIRST)
        self.prompts = Prompts(model, cache, pieces, self.wake)
        self.pace = Pace(pieces.chunk, pieces.most, model.device)
        self.changed = threading.Condition()
        self.version = 0
        self.waiting: deque[Job] = deque()
        self.cancelled: list[tuple[Job, int | None]] = []
        self.closing = self.draining = False
        self.broken: Exception | None = None
        self.ready: deque[tuple[Reading, list[int]]] = deque()
        """Prompts that have been read, and which of their choices have no slot yet."""
        self.running: dict[int, Choice] = {}
        self.pending: deque[tuple[dict[int, Choice], Wait]] = deque()
        self.failures = 0
        self.gates = GateReadings(self._tell)
        self.metrics.watch(self, cache)
        self.thread = threading.Thread(target=self._run, name="headmax-scheduler", daemon=True)

    def start(self) -> Scheduler:
        self.thread.start()
        return self

    def submit(self, *jobs: Job) -> None:
        """Takes all of these jobs or none: `Full` if too many wait, `Closed` once the scheduler ends."""
        with self.changed:
            if self.closing or self.broken is not None:
                raise Closed("the server is shutting down" if self.broken is None else f"the server has failed: {self.broken}")
            if len(self.waiting) + len(jobs) > self.queue:
                raise Full(f"{len(self.waiting)} requests wait already, at most {self.queue} may")
            self.waiting.extend(jobs)
            self._notify()

    def cancel(self, job: Job, choice: int | None = None) -> None:
        """Ends a job, or one of its choices, before the next step; nothing more comes of it but what is under way."""
        with self.changed:
            self.cancelled.append((job, choice))
            self._notify()

    def close(self, drain: bool = False, timeout: float | None = None) -> bool:
        """Ends the thread: at once, when what runs fails with `Closed`, or after all that was taken is done. Whether it has ended."""
        with self.changed:
            self.closing, self.draining = True, drain
            self._notify()
        if self.thread.ident is not None:
            self.thread.join(timeout)
        return not self.thread.is_alive()

    def wake(self) -> None:
        with self.changed:
            self._notify()

    def _notify(self) -> None:
        self.version += 1
        self.changed.notify()

    def _run(self) -> None:
        try:
            device = torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else contextlib.nullcontext()
            with torch.no_grad(), device:
                while self._turn():
                    pass
        except Exception as error:
            logger.exception("the scheduler has failed")
            self.broken = error
        with self.changed:
            self.closing = True
        reason = Closed("the server is shutting down") if self.broken is None else self.broken
        for job in {*self.waiting, *self._jobs()}:
            self._tell(job, Failed(reason))
        self.waiting.clear()
        if self.cache is not None:
            self.cache.close()

    def _jobs(self) -> set[Job]:
        """All that were admitted and have not ended."""
        reading = {reading.job for reading in (*self.prompts.reading, *(reading for reading, _ in self.ready))}
        return {job for job in reading if job is not None} | {choice.job for choice in self.running.values()} | set(self.gates.under_way)

    def _turn(self) -> bool:
        """One round of the loop; whether there is another."""
        seen = self.version
        self._cancel()
        busy = self._admit()
        self._skim()
        generating = bool(self.running)
        entered = self._enter()
        read = not (entered and generating) and self._read()  # either may take as long as a step
        busy = self._decode() or entered or read or busy
        busy = self._read_gates() or busy
        with self.changed:
            if self.closing and not (self.draining and (self.waiting or self._jobs())):
                return False
            if not busy and seen == self.version:
                self.changed.wait(1.0)
        return True

    def _cancel(self) -> None:
        with self.changed:
            cancelled, self.cancelled = self.cancelled, []
            for job in [job for job, choice in cancelled if choice is None]:
                job.cancelled = True
            if cancelled:
                self.waiting = deque(job for job in self.waiting if not job.cancelled)
        for job, choice in cancelled:
            if choice is None:
                self._drop(job)
            elif choice not in job.cancelled_choices:
                job.cancelled_choices.add(choice)
                self.gates.drop(job)
                for slot, running in list(self.running.items()):
                    if running.job is job and running.choice == choice:
                        self._leave(slot)
                        self._close(job)

    def _drop(self, job: Job) -> None:
        """Forgets a job wherever it is; its slots are free."""
        job.cancelled = True
        self.prompts.drop(job)
        self.gates.drop(job)
        self.ready = deque(entry for entry in self.ready if entry[0].job is not job)
        for slot, choice in list(self.running.items()):
            if choice.job is job:
                self._leave(slot)

    def _fail(self, job: Job, error: Exception) -> None:
        self._drop(job)
        self._tell(job, Failed(error))

    def _tell(self, job: Job, event: Event) -> None:
        try:
            job.listen(event)
        except Exception as error:  # a listener that fails is as good as gone
            logger.warning("a listener failed: %s", error)
            self.cancel(job)

    def _admit(self) -> bool:
        """Begins to read the prompts of those who waited longest, as many as there are slots for."""
        begun = False
        while self.waiting and len(self.prompts.reading) + sum(len(choices) for _, choices in self.ready) < self.batch.free():
            with self.changed:
                job = self.waiting.popleft()
            job.open = len(job.rules)
            try:
                self.prompts.begin(job)
            except Exception as error:
                logger.exception("a prompt could not be begun")
                self._fail(job, error)
            begun = True
        return begun

    def _skim(self) -> None:
        """Leaves the few tokens that are left of some prompts to the steps."""
        for reading in self.prompts.skim(self.feed):
            assert reading.job is not None
            self.metrics.read.inc(reading.left)
            self._has_read(reading, reading.job)

    def _read(self) -> bool:
        """Pieces of prompts, `pieces.most` tokens at most; beside those who generate for about as long as a step, one block at least."""
        beside = bool(self.running)
        most = left = self.pace.tokens() if beside else self.pieces.most
        seconds, busy = self.pace.budget, False
        while left > 0 and (piece := self.prompts.next(most, left)) is not None:
            blocks, cost = self.pace.blocks(piece.tokens, seconds) if beside else (piece.blocks, 0.0)
            if busy and not blocks:
                break
            blocks = min(max(1, blocks), piece.blocks)
            busy, seconds = True, seconds - blocks * cost
            if not self._read_piece(piece, blocks) or piece.group[0].job is None:
                break
            left -= max(1, piece.tokens)
        return busy

    def _read_piece(self, piece: Piece, blocks: int) -> bool:
        """Some blocks of a piece; whether they were its last."""
        watch = self.pace.start()
        try:
            ended = self.prompts.read(blocks) is not None
            self.pace.read(watch, piece.tokens, blocks)
        except Exception as error:  # such as too little memory for it
            self._reading_failed(piece.group, error)
            return True
        if not ended:
            return False
        for reading, start in zip(piece.group, piece.starts, strict=True):
            if reading.job is not None and not reading.job.cancelled:
                self.metrics.read.inc(reading.position - start)
                if reading.job.watched and reading.reader is not None:
                    self._tell(reading.job, gates_of(reading.reader, reading.position - start))
                if reading.over:
                    self._has_read(reading, reading.job)
        return True

    def _reading_failed(self, group: list[Reading], error: Exception) -> None:
        """Who was read alone fails; of several each is tried by itself."""
        if len(group) > 1:
            logger.warning("reading %d prompts together failed: %s", len(group), " ".join(str(error).split())[:200])
            for reading in group:
                reading.alone = True
            return
        logger.error("reading a prompt failed", exc_info=error)
        (reading,) = group
        reading.over = True
        if reading.job is None:
            self.prompts.later.remove(reading)
        else:
            self._fail(reading.job, error)
        self.check_device()

    def _has_read(self, reading: Reading, job: Job) -> None:
        if self.cache is not None:
            (self.metrics.hits if reading.cached else self.metrics.misses).inc()
        self.metrics.cached.inc(reading.cached)
        self._tell(job, Read(reading.cached, reading.scores if job.scored else None))
        if job.watched and reading.reader is not None:
            self.gates.begin(job, reading.reader)
        if job.max_new_tokens:
            self.ready.append((reading, list(range(len(job.rules)))))
        else:
            for choice in range(len(job.rules)):
                self._end(job, Ended(choice, "length"))

    def _enter(self) -> bool:
        """First tokens, and slots for those who go on, in the order in which prompts were read."""
        entered = False
        while self.ready and self.batch.free():
            begun: list[tuple[Reading, Choice]] = []
            while self.ready and len(begun) < min(self.batch.free(), self.first.rows):
                reading, choices = self.ready[0]
                number = choices.pop(0)
                if not choices:
                    self.ready.popleft()
                job = reading.job
                assert job is not None
                if number in job.cancelled_choices:
                    self._close(job)
                else:
                    begun.append((reading, Choice(job, number, job.rules[number], job.features(job.rules[number]))))
            try:
                self._begin(begun)
            except Exception as error:
                logger.exception("first tokens failed")
                for job in {choice.job for _, choice in begun}:
                    self._fail(job, error)
                self.check_device()
            entered = True
        return entered

    def _begin(self, begun: list[tuple[Reading, Choice]]) -> None:
        """The first tokens of choices, and slots for those that are to have more."""
        self._begin_short([(reading, choice) for reading, choice in begun if reading.logits is None])
        whole = [(reading, choice, reading.logits) for reading, choice in begun if reading.logits is not None]
        if not whole:
            return
        asked = [Asked(logits, choice.job.tokens, choice.rules, choice.features) for _, choice, logits in whole]
        going = []
        for (reading, choice, _), outcome in zip(whole, self.first(asked), strict=True):
            if not choice.job.cancelled and self._note(choice, outcome):
                going.append((reading, choice))
        going = [(reading, choice) for reading, choice in going if not choice.job.cancelled]
        if going:
            texts = [torch.cat([choice.job.tokens, torch.tensor(choice.new, dtype=torch.int64)]) for _, choice in going]
            entries = [Entry(reading.states(), text, 1, choice.rules) for (reading, choice), text in zip(going, texts, strict=True)]
            self.running.update(zip(self.batch.enter(entries), (choice for _, choice in going), strict=True))

    def _begin_short(self, begun: list[tuple[Reading, Choice]]) -> None:
        """Slots for choices whose prompt's end is left to steps."""
        if not begun:
            return
        entries = []
        for reading, choice in begun:
            at = reading.position
            choice.launched, choice.feed = 1 - reading.left, deque(choice.job.tokens[at:].tolist())
            entries.append(Entry(reading.states(), choice.job.tokens[: at + 1], 0, choice.rules))
        self.running.update(zip(self.batch.enter(entries), (choice for _, choice in begun), strict=True))

    def _decode(self) -> bool:
        """Launches a step of all that want one, and takes what an earlier one gave."""
        going = {slot: choice for slot, choice in self.running.items() if choice.launched < choice.job.max_new_tokens}
        if going:
            try:
                if fed := {slot: choice.feed.popleft() for slot, choice in going.items() if choice.feed}:
                    self.batch.feed(fed)
                watch = self.pace.start()
                wait = self.batch.run({slot: choice.features for slot, choice in going.items()})
                self.pace.stepped(watch)
                for choice in going.values():
                    choice.launched += 1
                self._mark(going)
            except Exception as error:
                self._step_failed(error)
                return True
            self.pending.append(({slot: choice for slot, choice in going.items() if choice.launched > 0}, wait))
        took = False
        while len(self.pending) > (self.ahead if going else 0):
            self._take(*self.pending.popleft())
            took = True
        if took:
            for source, target in self.batch.compact().items():
                self.running[target] = self.running.pop(source)
        return bool(going) or took

    def _step_failed(self, error: Exception) -> None:
        """Those in slots have lost their states; the others go on, unless it happens again and again."""
        logger.error("a step failed", exc_info=error)
        self.pending.clear()
        for job in {choice.job for choice in self.running.values()}:
            self._fail(job, error)
        self.failures += 1
        if self.failures >= MOST_FAILURES:
            raise error
        self.check_device()

    def check_device(self) -> None:
        """After a failure: raises if the device has failed for good, as after most CUDA errors, so that `broken` says so."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _read_gates(self) -> bool:
        """The gates of one text's new tokens; whether there were any."""
        job = self.gates.next()
        if job is not None:
            try:
                self.gates.read(job)
            except Exception as error:
                logger.exception("reading gates failed")
                self._fail(job, error)
                self.check_device()
        return job is not None

    def _take(self, launched: dict[int, Choice], wait: Wait) -> None:
        """Hands out what a step gave."""
        try:
            outcomes = wait()
        except Exception as error:
            return self._step_failed(error)
        self.failures = 0
        slots = {choice: slot for slot, choice in self.running.items()}
        for slot, choice in launched.items():
            if not choice.done and not self._note(choice, outcomes[slot]) and choice in slots and not choice.done:
                self._leave(slots[choice])
        return None

    def _note(self, choice: Choice, outcome: Outcome) -> bool:
        """Tells of one more token of a choice; whether there are to be others."""
        job, now = choice.job, time.monotonic()
        if outcome.token == NO_TOKEN:
            message = f"the model's logits are not finite after {len(choice.new)} new tokens: its weights hold NaN or infinity, or overflow"
            self._fail(job, ValueError(message))
            return False
        (self.metrics.between if choice.new else self.metrics.first).observe(now - (choice.last if choice.new else job.arrived))
        self.metrics.generated.inc()
        choice.last = now
        choice.new.append(outcome.token)
        self._tell(job, NewToken(choice.choice, *outcome))
        if job.watched:
            self.gates.token(job, outcome.token)
        stopped = outcome.token in job.stop_tokens
        if not stopped and len(choice.new) < job.max_new_tokens:
            return True
        self._end(job, Ended(choice.choice, "stop" if stopped else "length"))
        return False

    def _end(self, job: Job, event: Ended) -> None:
        self._close(job)
        (self.gates.end if job.watched else self._tell)(job, event)

    def _close(self, job: Job) -> None:
        """One choice less that is open."""
        job.open -= 1
        if not job.open:
            self.metrics.whole.observe(time.monotonic() - job.arrived)

    def _leave(self, slot: int) -> None:
        """Frees a slot, and keeps what the prefix cache may want of it."""
        choice = self.running.pop(slot)
        choice.done = True
        self.batch.leave(slot)
        if self.cache is None:
            return
        text = torch.cat([choice.job.tokens, torch.tensor(choice.new, dtype=torch.int64)])
        if self.pieces.exact:
            self.prompts.keep_later(text, len(choice.new))
        elif choice.mark is not None and choice.mark[0] <= len(text):
            with contextlib.suppress(torch.OutOfMemoryError):  # then it is not kept
                self.cache.put(text[: choice.mark[0]], choice.mark[1]())

    def _mark(self, going: dict[int, Choice]) -> None:
        """Copies the states of slots where a chunk ends: the last such copy is kept when the turn ends."""
        if self.cache is None or self.pieces.exact:
            return
        ends = {slot: choice for slot, choice in going.items() if choice.fed % self.pieces.chunk == 0}
        if not ends:
            return
        for choice in ends.values():
            choice.mark = None
        with contextlib.suppress(torch.OutOfMemoryError):
            taken = self.batch.take(list(ends), [choice.fed for choice in ends.values()])
            for choice, states in zip(ends.values(), taken, strict=True):
                choice.mark = choice.fed, states
