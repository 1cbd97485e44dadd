"""Continuous batching: one thread owns model and slots; jobs come and go at any time, from any thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque

import torch

from headmax.models import HeadmaxForCausalLM
from headmax.serve.batch import Batch
from headmax.serve.cache import PrefixCache
from headmax.serve.decoding import Decoding
from headmax.serve.gates import GateReadings, gates_of
from headmax.serve.job import Closed, Ended, Event, Failed, Full, Job, NewToken, Read
from headmax.serve.metrics import Metrics
from headmax.serve.pace import Pace
from headmax.serve.prompts import Prompts
from headmax.serve.reading import Piece, Pieces, Reading

logger = logging.getLogger("headmax")


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
        tail: int | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """
        Args:
            queue: most jobs that wait for a slot.
            tail: tokens at a prompt's end that steps read, in place of a pass of its own; by default 16 on a GPU, where a pass takes as
                long as many steps, and 1 elsewhere.
            ahead: steps that may be under way on the device while the host looks at an earlier one; by default 1 on a GPU.
        """
        self.model, self.cache, self.pieces, self.queue = model, cache, pieces, queue
        on_gpu = model.device.type == "cuda"
        ahead = (1 if on_gpu else 0) if ahead is None else ahead
        self.tail = (16 if on_gpu else 1) if tail is None else tail
        self.metrics = Metrics() if metrics is None else metrics
        self.prompts = Prompts(model, cache, pieces, self.wake)
        self.pace = Pace(pieces.chunk, pieces.most, model.device)
        self.decoding = Decoding(batch, self.prompts, self, self.metrics, self.pace, ahead)
        self.changed = threading.Condition()
        self.version = 0
        self.waiting: deque[Job] = deque()
        self.cancelled: list[tuple[Job, int | None]] = []
        self.closing = self.draining = False
        self.broken: Exception | None = None
        self.gates = GateReadings(self._send)
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
            self.tell(job, Failed(reason))
        self.waiting.clear()
        if self.cache is not None:
            self.cache.close()

    def _jobs(self) -> set[Job]:
        """All that were admitted and have not ended."""
        reading = {reading.job for reading in self.prompts.reading if reading.job is not None}
        return reading | self.decoding.jobs_under_way() | set(self.gates.under_way)

    def _turn(self) -> bool:
        """One round of the loop; whether there is another."""
        seen = self.version
        self._cancel()
        busy = self._admit()
        self._leave_tails_to_steps()
        generating = bool(self.decoding.running)
        entered = self.decoding.enter()
        read = not (entered and generating) and self._read()  # either may take as long as a step
        busy = self.decoding.step() or entered or read or busy
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
                if self.decoding.drop(job, choice):
                    self.end_choice(job)

    def _drop(self, job: Job) -> None:
        """Forgets a job wherever it is; its slots are free."""
        job.cancelled = True
        self.prompts.drop(job)
        self.gates.drop(job)
        self.decoding.drop(job)

    def fail(self, job: Job, error: Exception) -> None:
        """Ends a job wherever it is."""
        self._drop(job)
        self._send(job, Failed(error))

    def end_choice(self, job: Job, event: Ended | None = None) -> None:
        """One choice less is open: it has ended, or was cancelled."""
        job.open -= 1
        if not job.open:
            self.metrics.whole.observe(time.monotonic() - job.arrived)
        if event is not None:
            self.tell(job, event)

    def tell(self, job: Job, event: Event) -> None:
        """Passes an event on to the job's listener; where gates are wanted too, the end of a choice comes after those."""
        if job.watched and isinstance(event, Ended):
            self.gates.end(job, event)
            return
        self._send(job, event)
        if job.watched and isinstance(event, NewToken):
            self.gates.token(job, event.token)

    def _send(self, job: Job, event: Event) -> None:
        try:
            job.listen(event)
        except Exception as error:  # a listener that fails is as good as gone
            logger.warning("a listener failed: %s", error)
            self.cancel(job)

    def _admit(self) -> bool:
        """Begins to read the prompts of those who waited longest, as many as there are slots for."""
        admitted = False
        while self.waiting and len(self.prompts.reading) < self.decoding.free():
            with self.changed:
                job = self.waiting.popleft()
            job.open = len(job.rules)
            try:
                self.prompts.begin(job)
            except Exception as error:
                logger.exception("a prompt could not be begun")
                self.fail(job, error)
            admitted = True
        return admitted

    def _leave_tails_to_steps(self) -> None:
        for reading in self.prompts.take_tails(self.tail):
            assert reading.job is not None
            self.metrics.read.inc(reading.left)
            self._has_read(reading, reading.job)

    def _read(self) -> bool:
        """Pieces of prompts, `pieces.most` tokens at most; beside those who generate for about as long as a step, one block at least."""
        decoding = bool(self.decoding.running)
        most = left = self.pace.tokens() if decoding else self.pieces.most
        seconds, busy = self.pace.budget, False
        while left > 0 and (piece := self.prompts.next(most, left)) is not None:
            blocks, cost = self.pace.blocks(piece.tokens, seconds) if decoding else (piece.blocks, 0.0)
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
                    self.tell(reading.job, gates_of(reading.reader, reading.position - start))
                if reading.done:
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
        reading.done = True
        if reading.job is None:
            self.prompts.recomputed.remove(reading)
        else:
            self.fail(reading.job, error)
        self.check_device()

    def _has_read(self, reading: Reading, job: Job) -> None:
        if self.cache is not None:
            (self.metrics.hits if reading.cached else self.metrics.misses).inc()
        self.metrics.cached.inc(reading.cached)
        self.tell(job, Read(reading.cached, reading.scores if job.scored else None))
        if job.watched and reading.reader is not None:
            self.gates.begin(job, reading.reader)
        if job.max_new_tokens:
            self.decoding.add(reading, job)
        else:
            for choice in range(len(job.rules)):
                self.end_choice(job, Ended(choice, "length"))

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
                self.fail(job, error)
                self.check_device()
        return job is not None
