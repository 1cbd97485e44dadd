"""The one form in which errors leave the server."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KINDS = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 500: "server_error", 503: "server_error"}
LONGEST = 1000
"""Characters of a message: it may repeat what the caller sent."""


class ApiError(Exception):
    """An answer with a status of 4xx, for what the caller did, or 503, for what may be tried again."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message if len(message) <= LONGEST else f"{message[:LONGEST]}...")
        self.status, self.param, self.code = status, param and param[:LONGEST], code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}.get(self.status)
        return json_response(self.body(), self.status, headers)


class NoResponse(Response):
    """For a caller who has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass


BREAKS = str.maketrans({letter: f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"})
"""Characters at which some clients of streams, httpx among them, break lines."""


def to_json(content: Any) -> bytes:
    """UTF-8 on one line; half a surrogate pair, which a caller may have sent, is escaped."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (text if text.isascii() else text.translate(BREAKS)).encode("utf-8", "backslashreplace")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, "application/json")
