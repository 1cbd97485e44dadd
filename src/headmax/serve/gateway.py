"""In front of several servers of one model: a conversation goes to the one that has its state."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headmax.serve.errors import ApiError
from headmax.serve.exchange import end, sse, until_disconnected

logger = logging.getLogger("headmax")

BEGINNING = 256
"""Tokens or characters of a prompt that say where it goes: a prefix cache keeps nothing of shorter ones, so that these may move."""
Call = Callable[[str, dict[str, Any], bytes], AsyncIterator[Message]]
"""A request, by its key, its head and its body, and the messages that answer it."""
Item = TypeVar("Item")


def affinity(body: bytes) -> str:
    """What requests have in common that should meet the same prefix cache; nothing where it does not matter.

    `prompt_cache_key` if it is given; else a chat's messages up to the user's first, or the beginning of a prompt.
    """
    try:
        fields = json.loads(body)
        if key := fields.get("prompt_cache_key"):
            return str(key)
        if messages := fields.get("messages"):
            first = next((n for n, message in enumerate(messages, 1) if message["role"] == "user"), len(messages))
            return json.dumps(messages[:first], sort_keys=True)
        prompt = fields["prompt"]
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return json.dumps(prompt[:BEGINNING])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # not for us to refuse
        return ""


def ranked(key: str, items: Sequence[Item], name: Callable[[Item], str]) -> list[Item]:
    """By rendezvous hashing: where an item goes away, only the keys that it had first move."""
    return sorted(items, key=lambda item: hashlib.blake2b(f"{key}\0{name(item)}".encode("utf-8", "surrogatepass")).digest())


async def answers(app: ASGIApp, request: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
    """What an application in this process says to a request; whoever closes this early has left."""
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "", **request}
    messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=64)
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for part in parts:
            return part
        return await asyncio.get_running_loop().create_future()

    async def run() -> None:
        try:
            await app(scope, receive, messages.put)
        finally:
            await messages.put(None)

    running = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await running
    finally:
        running.cancel()
        while not running.done():  # its last message may find the queue full
            with contextlib.suppress(asyncio.QueueEmpty):
                messages.get_nowait()
            await asyncio.wait({running}, timeout=0.01)


class Gateway:
    """An application whose requests are answered elsewhere."""

    def __init__(self, call: Call, lost: tuple[type[Exception], ...], max_body: int) -> None:
        """`lost` are the errors that say that a server went away."""
        self.call, self.lost, self.max_body = call, lost, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            if scope["path"] == "/metrics":
                raise ApiError(404, "counts are each server's own, and this is in front of several")
            body = await self._body(receive)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        if body is None:
            return
        answering = asyncio.create_task(self._answer(scope, body, receive, send))
        disconnected = asyncio.create_task(until_disconnected(receive))
        try:
            await asyncio.wait({answering, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done() and not isinstance(answering.exception(), OSError):
                answering.result()
        finally:
            await end(answering, disconnected)

    async def _body(self, receive: Receive) -> bytes | None:
        """None where the caller has gone."""
        parts, size = [], 0
        for _ in itertools.count():
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            if size <= self.max_body:
                parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        if size > self.max_body:
            raise ApiError(413, f"the body has more than {self.max_body} bytes", code="body_too_large")
        return b"".join(parts)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        request = {name: scope[name] for name in ("method", "path", "query_string")} | {"headers": list(scope["headers"])}
        request["raw_path"] = scope.get("raw_path") or scope["path"].encode()
        start: Message | None = None
        over = False
        try:
            async with contextlib.aclosing(self.call(affinity(body), request, body)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    start = message if message["type"] == "http.response.start" else start
                    over = message["type"] == "http.response.body" and not message.get("more_body", False)
                    await send(message)
        except self.lost as error:
            logger.warning("a server was lost: %s", " ".join(str(error).split())[:200])
            lost = ApiError(503, "the server that had this request was lost; send it again", code="server_lost")
            if not over:
                await self._report_loss(lost, start, scope, receive, send)

    @staticmethod
    async def _report_loss(lost: ApiError, start: Message | None, scope: Scope, receive: Receive, send: Send) -> None:
        """An error in place of an answer, or as the last event of one that has begun."""
        if start is None:
            answer: Response = lost.response()
            return await answer(scope, receive, send)
        streams = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])
        await send({"type": "http.response.body", "body": sse(lost.body()) if streams else b""})
