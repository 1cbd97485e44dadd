"""From the scheduler's thread to coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from headmax.serve.job import Event


class Mail:
    """Events for one event loop, which is woken once for all that are posted before it looks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.lock = threading.Lock()
        self.posted: list[tuple[Inbox, int, Event]] = []

    def post(self, inbox: Inbox, sender: int, event: Event) -> None:
        """From any thread; RuntimeError once the loop is closed."""
        with self.lock:
            self.posted.append((inbox, sender, event))
            first = len(self.posted) == 1
        if first:
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self.lock:
            posted, self.posted = self.posted, []
        for inbox, sender, event in posted:
            inbox.events.append((sender, event))
            inbox.filled.set()


class Inbox:
    """The events of one request's jobs."""

    def __init__(self, mail: Mail) -> None:
        self.mail = mail
        self.events: deque[tuple[int, Event]] = deque()
        self.filled = asyncio.Event()

    async def get(self) -> list[tuple[int, Event]]:
        """All that has come since the last call, at least one: (number of the job, event)."""
        await self.filled.wait()
        self.filled.clear()
        events = list(self.events)
        self.events.clear()
        return events
