"""Decoding: choices in slots, each moved on by one token in every step; their first tokens, and the states kept when they end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from typing import Protocol

import torch

from headmax.generate.sampling import NO_TOKEN
from headmax.generate.step import Entry
from headmax.serve.batch import Asked, Batch, FirstTokens, Outcome, Wait
from headmax.serve.job import Choice, Ended, Event, Job, NewToken
from headmax.serve.metrics import Metrics
from headmax.serve.pace import Pace
from headmax.serve.prompts import Prompts
from headmax.serve.reading import Reading

logger = logging.getLogger("headmax")

MOST_FIRST = 64
"""First tokens that are sampled at a time."""
MOST_FAILURES = 3
"""Steps in a row that may fail before the scheduler gives up."""


class Jobs(Protocol):
    """What decoding asks of the scheduler, to which the jobs belong."""

    def tell(self, job: Job, event: Event) -> None:
        """Passes an event on to the job's listener."""

    def end_choice(self, job: Job, event: Ended | None = None) -> None:
        """One choice less is open: it has ended, or was cancelled."""

    def fail(self, job: Job, error: Exception) -> None:
        """Ends a job wherever it is."""

    def check_device(self) -> None:
        """Raises if the device has failed for good."""


class Decoding:
    """For the scheduler's thread."""

    def __init__(self, batch: Batch, prompts: Prompts, jobs: Jobs, metrics: Metrics, pace: Pace, ahead: int) -> None:
        """`ahead`: steps that may be under way on the device while the host looks at an earlier one."""
        self.batch, self.prompts, self.cache = batch, prompts, prompts.cache
        self.jobs, self.metrics, self.pace, self.ahead = jobs, metrics, pace, ahead
        self.first = FirstTokens(prompts.model, 1 if prompts.pieces.exact else MOST_FIRST)
        self.entering: deque[tuple[Reading, list[int]]] = deque()
        """Prompts that have been read, and which of their choices have no slot yet."""
        self.running: dict[int, Choice] = {}
        """By slot."""
        self.launched: deque[tuple[dict[int, Choice], Wait]] = deque()
        """Steps whose tokens have not been handed out."""
        self.failures = 0

    def free(self) -> int:
        """Slots that nobody has or is about to take."""
        return self.batch.free() - sum(len(choices) for _, choices in self.entering)

    def jobs_under_way(self) -> set[Job]:
        entering = {reading.job for reading, _ in self.entering if reading.job is not None}
        return entering | {choice.job for choice in self.running.values()}

    def add(self, reading: Reading, job: Job) -> None:
        """The choices of a prompt that has been read, up to the tail that steps read."""
        self.entering.append((reading, list(range(len(job.rules)))))

    def drop(self, job: Job, choice: int | None = None) -> bool:
        """Frees the slots of a job, or of one of its choices; whether there were any."""
        if choice is None:
            self.entering = deque(entry for entry in self.entering if entry[0].job is not job)
        slots = [slot for slot, own in self.running.items() if own.job is job and choice in (None, own.choice)]
        for slot in slots:
            self._leave(slot)
        return bool(slots)

    def enter(self) -> bool:
        """First tokens, and slots for those who go on, in the order in which prompts were read; whether there were any."""
        entered = False
        while self.entering and self.batch.free():
            group = self._next_choices(min(self.batch.free(), self.first.rows))
            try:
                self._enter_with_tail([(reading, choice) for reading, choice in group if reading.logits is None])
                self._enter_after_first_token([(reading, choice) for reading, choice in group if reading.logits is not None])
            except Exception as error:
                logger.exception("first tokens failed")
                for job in {choice.job for _, choice in group}:
                    self.jobs.fail(job, error)
                self.jobs.check_device()
            entered = True
        return entered

    def _next_choices(self, most: int) -> list[tuple[Reading, Choice]]:
        """Those first in line, without the cancelled ones."""
        group: list[tuple[Reading, Choice]] = []
        while self.entering and len(group) < most:
            reading, choices = self.entering[0]
            number = choices.pop(0)
            if not choices:
                self.entering.popleft()
            job = reading.job
            assert job is not None
            if number in job.cancelled_choices:
                self.jobs.end_choice(job)
            else:
                group.append((reading, Choice(job, number, job.rules[number], job.features(job.rules[number]))))
        return group

    def _enter_after_first_token(self, group: list[tuple[Reading, Choice]]) -> None:
        """Samples the first tokens of choices; slots for those that are to have more."""
        if not group:
            return
        pairs = [(reading.logits, choice) for reading, choice in group]
        asked = [Asked(logits, choice.job.tokens, choice.rules, choice.features) for logits, choice in pairs if logits is not None]
        active = []
        for (reading, choice), outcome in zip(group, self.first(asked), strict=True):
            if not choice.job.cancelled and self._note(choice, outcome):
                active.append((reading, choice))
        active = [(reading, choice) for reading, choice in active if not choice.job.cancelled]  # by another of its choices
        if active:
            entries = [Entry(reading.states(), choice.text(), 1, choice.rules) for reading, choice in active]
            self.running.update(zip(self.batch.enter(entries), (choice for _, choice in active), strict=True))

    def _enter_with_tail(self, group: list[tuple[Reading, Choice]]) -> None:
        """Slots for choices whose prompt's tail is left to steps."""
        entries = []
        for reading, choice in group:
            at = reading.position
            choice.launched, choice.tail = 1 - reading.left, deque(choice.job.tokens[at:].tolist())
            entries.append(Entry(reading.states(), choice.job.tokens[: at + 1], 0, choice.rules))
        if entries:
            self.running.update(zip(self.batch.enter(entries), (choice for _, choice in group), strict=True))

    def step(self) -> bool:
        """Launches a step of all that want one, and hands out the tokens of an earlier one; whether there was either."""
        active = {slot: choice for slot, choice in self.running.items() if choice.launched < choice.job.max_new_tokens}
        if active:
            try:
                self._launch(active)
            except Exception as error:
                self._step_failed(error)
                return True
        took = False
        while len(self.launched) > (self.ahead if active else 0):
            self._take(*self.launched.popleft())
            took = True
        if took:
            for source, target in self.batch.compact().items():
                self.running[target] = self.running.pop(source)
        return bool(active) or took

    def _launch(self, active: dict[int, Choice]) -> None:
        if tails := {slot: choice.tail.popleft() for slot, choice in active.items() if choice.tail}:
            self.batch.feed(tails)
        watch = self.pace.start()
        wait = self.batch.run({slot: choice.features for slot, choice in active.items()})
        self.pace.stepped(watch)
        for choice in active.values():
            choice.launched += 1
        self._snapshot(active)
        self.launched.append(({slot: choice for slot, choice in active.items() if choice.launched > 0}, wait))

    def _step_failed(self, error: Exception) -> None:
        """Those in slots have lost their states; the others go on, unless it happens again and again."""
        logger.error("a step failed", exc_info=error)
        self.launched.clear()
        for job in {choice.job for choice in self.running.values()}:
            self.jobs.fail(job, error)
        self.failures += 1
        if self.failures >= MOST_FAILURES:
            raise error
        self.jobs.check_device()

    def _take(self, launched: dict[int, Choice], wait: Wait) -> None:
        """Hands out a step's tokens."""
        try:
            outcomes = wait()
        except Exception as error:
            return self._step_failed(error)
        self.failures = 0
        slots = {choice: slot for slot, choice in self.running.items()}
        for slot, choice in launched.items():
            if not choice.done and not self._note(choice, outcomes[slot]) and not choice.done:
                self._leave(slots[choice])
        return None

    def _note(self, choice: Choice, outcome: Outcome) -> bool:
        """Tells of one more token of a choice; whether there are to be others."""
        job, now = choice.job, time.monotonic()
        if outcome.token == NO_TOKEN:
            message = f"the model's logits are not finite after {len(choice.new)} new tokens: its weights hold NaN or infinity, or overflow"
            self.jobs.fail(job, ValueError(message))
            return False
        if choice.new:
            self.metrics.between.observe(now - choice.last)
        else:
            self.metrics.first.observe(now - job.arrived)
        self.metrics.generated.inc()
        choice.last = now
        choice.new.append(outcome.token)
        self.jobs.tell(job, NewToken(choice.choice, *outcome))
        stopped = outcome.token in job.stop_tokens
        if not stopped and len(choice.new) < job.max_new_tokens:
            return True
        self.jobs.end_choice(job, Ended(choice.choice, "stop" if stopped else "length"))
        return False

    def _leave(self, slot: int) -> None:
        """Frees a slot, and keeps what the prefix cache may want of it."""
        choice = self.running.pop(slot)
        choice.done = True
        self.batch.leave(slot)
        if self.cache is None:
            return
        text = choice.text()
        if self.prompts.pieces.exact:
            self.prompts.recompute(text, len(choice.new))
        elif choice.snapshot is not None and choice.snapshot[0] <= len(text):
            with contextlib.suppress(torch.OutOfMemoryError):  # then it is not kept
                self.cache.put(text[: choice.snapshot[0]], choice.snapshot[1]())

    def _snapshot(self, active: dict[int, Choice]) -> None:
        """Copies the states of slots where a chunk ends: the last such copy is kept when the turn ends."""
        if self.cache is None or self.prompts.pieces.exact:
            return
        ends = {slot: choice for slot, choice in active.items() if choice.fed % self.cache.chunk == 0}
        if not ends:
            return
        for choice in ends.values():
            choice.snapshot = None
        with contextlib.suppress(torch.OutOfMemoryError):
            taken = self.batch.take(list(ends), [choice.fed for choice in ends.values()])
            for choice, states in zip(ends.values(), taken, strict=True):
                choice.snapshot = choice.fed, states
