"""How much of a prompt is read between two steps: about as much as takes as long as a step does."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import torch

SHARE = 0.75
"""Of a step's time, what reading may take between two: with a step, and some variance, twice the step's time in all."""
RECENT = 0.2
"""Weight of a new measurement."""
FORGET = 0.9999
"""What is left of the time of a size that takes too long with each measurement of a smaller one: after some thousands it is tried again, so
that fewer than one gap in a hundred is too long for it."""


class Stopwatch:
    """Seconds between two moments: the host's, or the device's where those are more."""

    def __init__(self, device: torch.device, now: Callable[[], float]) -> None:
        self.now, self.begin, self.host = now, now(), 0.0
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        for event in self.events[:1]:
            event.record()

    def stop(self) -> None:
        self.host = self.now() - self.begin
        for event in self.events[1:]:
            event.record()

    def seconds(self) -> float | None:
        """None while the device is not there yet: nothing waits for it."""
        if not self.events:
            return self.host
        first, last = self.events
        return max(self.host, first.elapsed_time(last) / 1e3) if last.query() else None


class Pace:
    """Cuts prompts into pieces, by `tokens`, and passes over pieces into blocks of the model, by `blocks`. On a GPU a whole pass over even
    a few tokens takes as long as several steps, since its kernels are launched one by one; one block does not."""

    def __init__(self, least: int, most: int, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        """Pieces are of `least` tokens, twice as many and so on, or `most`."""
        self.device, self.now = device, now
        self.sizes = [least << n for n in range(max(1, math.ceil(math.log2(most / least))))]
        self.sizes += [most] if most > self.sizes[-1] else []
        self.step: float | None = None
        """Seconds of a step."""
        self.block: dict[int, float] = {}
        """Seconds of a block of a piece, by size."""
        self.tried: set[int] = set()
        self.measuring: deque[tuple[Stopwatch, int, int]] = deque()

    def start(self) -> Stopwatch:
        return Stopwatch(self.device, self.now)

    def stepped(self, watch: Stopwatch) -> None:
        """Notes how long a step takes."""
        self.read(watch, 0, 1)

    def read(self, watch: Stopwatch, tokens: int, blocks: int) -> None:
        """Notes how long so many blocks over a piece of so many tokens take."""
        watch.stop()
        self.measuring.append((watch, tokens, blocks))
        while self.measuring and (seconds := self.measuring[0][0].seconds()) is not None:
            _, tokens, blocks = self.measuring.popleft()
            self._note(seconds / blocks, tokens)

    def _note(self, seconds: float, tokens: int) -> None:
        if not tokens:
            self.step = seconds if self.step is None else self.step + RECENT * (seconds - self.step)
            return
        size = self._size(tokens)
        if 2 * tokens <= size:  # so few say nothing about a piece of that size
            return
        if size not in self.tried:  # kernels are compiled the first time
            self.tried.add(size)
            return
        before = self.block.get(size, seconds)
        self.block[size] = before + RECENT * (seconds - before)
        for larger in self.sizes[self.sizes.index(size) + 1 :]:
            if self.block.get(larger, 0.0) > self.budget:
                self.block[larger] *= FORGET
                if self.block[larger] <= self.budget:
                    del self.block[larger]

    def _size(self, tokens: int) -> int:
        return next((size for size in self.sizes if size >= tokens), self.sizes[-1])

    @property
    def budget(self) -> float:
        """Seconds for reading between two steps."""
        return SHARE * (self.step or 0.0)

    def tokens(self) -> int:
        """Most tokens of a piece: the largest size of which a block is within the budget, and now and then the next, to learn of it."""
        chosen = self.sizes[0]
        for larger in self.sizes[1:]:
            if self.block.get(chosen, math.inf) > self.budget or self.block.get(larger, 0.0) > self.budget:
                break
            chosen = larger
        return chosen

    def blocks(self, tokens: int, seconds: float) -> tuple[int, float]:
        """How many blocks over a piece of so many tokens take so long, 0 if not even one, and how long each takes as far as is known."""
        known = (self.block[size] for size in self.sizes if size >= self._size(tokens) and size in self.block)
        cost = next(known, None)
        if cost is None:
            return 1, seconds
        return (int(seconds / cost), cost) if cost > 0 else (2**31, 0.0)
