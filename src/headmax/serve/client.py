"""What a client of an OpenAI-compatible API must know: addresses, events of a stream, errors."""

from __future__ import annotations

import json
from typing import Any


def is_address(target: str) -> bool:
    """Whether this names a server, and not a checkpoint."""
    return target.startswith(("http://", "https://"))


def address_of(target: str) -> str:
    """Where the interface begins: http://host:8000/v1/ for http://host:8000 too."""
    root = target.rstrip("/")
    return root + "/" if root.endswith("/v1") else f"{root}/v1/"


class Lines:
    """The lines of a stream, whose text comes in parts. Only a line feed ends one: texts hold all else that Unicode calls a line's end."""

    def __init__(self) -> None:
        self.rest = ""

    def push(self, text: str) -> list[str]:
        *lines, self.rest = (self.rest + text).split("\n")
        return lines


def read_event(line: str) -> dict[str, Any]:
    """The event on a line of a stream, {} where there is none; ValueError where it is an error."""
    name, _, content = line.partition(":")
    content = content.strip()
    if name != "data" or content == "[DONE]":
        return {}
    event = json.loads(content)
    if "error" in event:
        raise ValueError(explained(content))
    return event


def explained(content: bytes | str) -> str:
    """The message of an error's body, in whatever form it comes."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = content.decode(errors="replace") if isinstance(content, bytes) else content
        return " ".join(text.split())[:300] or "the server gave an error without a message"
