"""The application: routes, who may call them, and errors in one form."""

from __future__ import annotations

import secrets

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headmax.serve.errors import ApiError
from headmax.serve.metrics import Metrics
from headmax.serve.service import Service

OPEN = ("/health",)
"""Paths that need no key."""


class Gate:
    """Lets callers with the key through, and counts the answers."""

    def __init__(self, app: ASGIApp, key: str | None, metrics: Metrics, paths: frozenset[str]) -> None:
        self.app, self.key, self.metrics, self.paths = app, key, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self.paths else "other"
                self.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        if self.allowed(scope):
            return await self.app(scope, receive, counted)
        error = ApiError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY", code="invalid_api_key")
        return await error.response()(scope, receive, counted)

    def allowed(self, scope: Scope) -> bool:
        if self.key is None or scope["path"] in OPEN:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, b"Bearer " + self.key.encode())


async def api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not possible on {request.url.path}"}
    return ApiError(error.status_code, said.get(error.status_code, error.detail)).response()


async def left(request: Request, error: Exception) -> Response:
    """The caller went before the body was whole; nobody reads this."""
    return Response(status_code=400)


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
    ]
    handlers = {ApiError: api_error, HTTPException: http_error, ClientDisconnect: left, Exception: unexpected}
    gate = Middleware(Gate, key=service.config.api_key, metrics=service.scheduler.metrics, paths=frozenset(route.path for route in routes))
    return Starlette(routes=routes, middleware=[gate], exception_handlers=handlers)
