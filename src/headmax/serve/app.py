"""The application: routes, who may call them, and errors in one form."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headmax.serve.errors import ApiError, NoResponse
from headmax.serve.metrics import Metrics
from headmax.serve.pages import PARTS
from headmax.serve.service import Service

OPEN = ("/health", *PARTS)
"""Paths that need no key: the page asks for it."""
MOST_DISCARDED = 64 * 2**20
"""Bytes that are read of a body which nobody wants."""


class RequestBody:
    """What a caller sends, read to its end before it is answered: a connection that is closed with bytes unread is reset, and the answer
    lost with it."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.whole = self.gone = False

    async def __call__(self) -> Message:
        message = await self.receive()
        self.gone = self.gone or message["type"] == "http.disconnect"
        self.whole = self.whole or self.gone or not message.get("more_body", False)
        return message

    async def discard(self, seconds: float) -> None:
        """Reads the rest, if it comes in time and is not too long."""
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.whole and size < MOST_DISCARDED:
                    size += len((await self()).get("body", b""))


class Access:
    """Lets callers with the key through, and counts the answers."""

    def __init__(self, app: ASGIApp, key: str | None, metrics: Metrics, paths: frozenset[str], patience: float) -> None:
        """`patience`: seconds that a body has to come which nobody wants."""
        self.app, self.key, self.metrics, self.paths, self.patience = app, key, metrics, paths, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = RequestBody(receive)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                await body.discard(self.patience)
                path = scope["path"] if scope["path"] in self.paths else "other"
                self.metrics.requests.labels(path, str(message["status"])).inc()
            if not body.gone:
                await send(message)

        if self.allowed(scope):
            return await self.app(scope, body, counted)
        error = ApiError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY", code="invalid_api_key")
        return await error.response()(scope, body, counted)

    def allowed(self, scope: Scope) -> bool:
        if self.key is None or scope["path"] in OPEN:
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(key, self.key.encode())


async def api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not possible on {request.url.path}"}
    answer = ApiError(error.status_code, messages.get(error.status_code, error.detail)).response()
    answer.headers.update(error.headers or {})  # such as Allow
    return answer


async def client_gone(request: Request, error: Exception) -> Response:
    """The caller went before the body was whole."""
    return NoResponse()


async def unexpected(request: Request, error: Exception) -> Response:
    return ApiError(500, f"internal error: {type(error).__name__}").response()


def make_app(service: Service) -> Starlette:
    routes = [
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/health", service.health),
        Route("/metrics", service.metrics),
        Route("/openapi.json", service.openapi),
        Route("/docs", service.docs),
        *(Route(path, service.page) for path in PARTS),
    ]
    handlers = {ApiError: api_error, HTTPException: http_error, ClientDisconnect: client_gone, Exception: unexpected}
    gate = Middleware(
        Access,
        key=service.config.api_key,
        metrics=service.scheduler.metrics,
        paths=frozenset(route.path for route in routes),
        patience=service.config.body_timeout,
    )
    return Starlette(routes=routes, middleware=[gate], exception_handlers=handlers)
