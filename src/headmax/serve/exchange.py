"""One request from its submission to its answer, whole or as a stream; whatever ends it frees its slots."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headmax.serve.errors import ApiError, NoResponse, json_response, to_json
from headmax.serve.job import Closed, Ended, Event, Failed, Full, Job, NewGates, NewToken, Read
from headmax.serve.reply import Reply
from headmax.serve.scheduler import Scheduler

GRACE = 5.0
"""Seconds that a reader has, after a stream's time is up, to take what says so."""


class EventLoop:
    """Events for one event loop, which is woken once for all that are posted before it looks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.lock = threading.Lock()
        self.posted: list[tuple[EventQueue, int, Event]] = []

    def post(self, queue: EventQueue, sender: int, event: Event) -> None:
        """From any thread; RuntimeError once the loop is closed."""
        with self.lock:
            self.posted.append((queue, sender, event))
            first = len(self.posted) == 1
        if first:
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self.lock:
            posted, self.posted = self.posted, []
        for queue, sender, event in posted:
            queue.events.append((sender, event))
            queue.filled.set()


class EventQueue:
    """The events of one request's jobs."""

    def __init__(self) -> None:
        self.events: deque[tuple[int, Event]] = deque()
        self.filled = asyncio.Event()

    async def get(self) -> list[tuple[int, Event]]:
        """All that has come since the last call, at least one: (number of the job, event)."""
        await self.filled.wait()
        self.filled.clear()
        events = list(self.events)
        self.events.clear()
        return events


class Exchange:
    """Jobs under way, and the reply they make. `jobs[p]` makes the choices from p * n on."""

    def __init__(self, scheduler: Scheduler, loop: EventLoop, jobs: Sequence[Job], reply: Reply, timeout: float) -> None:
        self.scheduler, self.jobs, self.reply, self.timeout = scheduler, jobs, reply, timeout
        self.queue = EventQueue()
        self.per_job = len(reply.choices) // len(jobs)
        for number, job in enumerate(jobs):
            job.listen = functools.partial(loop.post, self.queue, number)
        try:
            scheduler.submit(*jobs)
        except Full as error:
            raise ApiError(503, f"the server is full: {error}; try again later", code="full") from None
        except Closed as error:
            raise ApiError(503, str(error), code="closed") from None

    def cancel(self) -> None:
        """Nobody waits for this any more."""
        if not self.reply.done:
            for job in self.jobs:
                self.scheduler.cancel(job)

    async def advance(self) -> None:
        """Waits for events and takes them in."""
        for number, event in await self.queue.get():
            self._take(number, event)

    def _take(self, number: int, event: Event) -> None:
        if isinstance(event, Failed):
            raise failure(event.error)
        if isinstance(event, Read):
            self.reply.cached_tokens += event.cached
            if event.scores is not None:
                first = NewToken(0, int(self.jobs[number].tokens[0]), None, None)
                for choice in self.reply.choices[number * self.per_job : (number + 1) * self.per_job]:
                    choice.scores = [first, *event.scores, *choice.scores]
            return
        if isinstance(event, NewGates):
            self.reply.choices[number * self.per_job].gates.append(event)
            return
        choice = self.reply.choices[number * self.per_job + event.choice]
        if isinstance(event, Ended):
            choice.end(event.reason)
        elif choice.take(event):
            self.scheduler.cancel(self.jobs[number], event.choice)

    async def whole(self, request: Request) -> Response:
        """The answer once all of it is there, unless the caller goes or its time is up."""

        async def collect() -> None:
            while not self.reply.done:
                await self.advance()

        collecting, disconnected = asyncio.create_task(collect()), asyncio.create_task(until_disconnected(request.receive))
        try:
            done, _ = await asyncio.wait({collecting, disconnected}, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
            if collecting in done:
                collecting.result()
                return json_response(self.reply.whole())
            if disconnected in done:
                return NoResponse()
            raise too_long(self.timeout)
        finally:
            self.cancel()
            await end(collecting, disconnected)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of a stream, an error as the last one."""
        deadline = asyncio.get_running_loop().time() + self.timeout
        try:
            for chunk in self.reply.first_chunks():
                yield sse(chunk)
            while not self.reply.done:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self.advance()
                except TimeoutError:
                    raise too_long(self.timeout) from None
                parts = [part for choice in self.reply.choices if (part := self.reply.chunk(choice)) is not None]
                if parts:
                    yield b"".join(map(sse, parts))
            if self.reply.extras.usage:
                yield sse(self.reply.usage_chunk())
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield sse(error.body())


class EventStream(Response):
    """Server-sent events of an exchange. A caller that goes, or does not read, ends it."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with contextlib.aclosing(self.exchange.chunks()) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        sending, disconnected = asyncio.create_task(send_all()), asyncio.create_task(until_disconnected(receive))
        try:
            limit = self.exchange.timeout + GRACE
            done, _ = await asyncio.wait({sending, disconnected}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if sending in done and not isinstance(sending.exception(), OSError | None):
                sending.result()
        finally:
            self.exchange.cancel()
            await end(sending, disconnected)


def failure(error: Exception) -> ApiError:
    """What the scheduler says of a job that failed, to its caller."""
    if isinstance(error, Closed):
        return ApiError(503, str(error), code="closed")
    if isinstance(error, torch.OutOfMemoryError):
        return ApiError(503, "the server has too little memory for this now; try again later", code="memory")
    return ApiError(500, f"the model failed: {' '.join(str(error).split())[:300]}")


def too_long(seconds: float) -> ApiError:
    return ApiError(503, f"the request took longer than {seconds:g} seconds", code="timeout")


def sse(content: Any) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"


async def until_disconnected(receive: Receive) -> None:
    """Returns when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: asyncio.Task) -> None:
    """Cancels tasks and sees them end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
