"""Requests to a model as token ids, so that scoring needs neither tasks nor texts."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from headmax import durable, fields

Kind = Literal["loglikelihood", "generate", "recall"]
LINE: dict[str, Any] = {
    **dict.fromkeys(("task", "id", "kind"), str),
    **dict.fromkeys(("context", "targets"), list[int]),
    "until": list[str],
    "max_new_tokens": int,
    "cut": int,
}
"""Fields of a line and their types."""


@dataclass(frozen=True)
class Request:
    kind: Kind
    context: tuple[int, ...]
    """Tokens to read, at least one."""
    targets: tuple[int, ...] = ()
    """loglikelihood: the tokens after the context. recall: the token that should follow each of the context's last tokens."""
    until: tuple[str, ...] = ()
    """generate: stop strings."""
    max_new_tokens: int = 0
    cut: int = 0
    """Tokens truncated from the start of the context."""

    @functools.cached_property
    def id(self) -> str:
        """A hash of the content, which ties a score to exactly this request."""
        content = json.dumps([self.kind, self.context, self.targets, self.until, self.max_new_tokens])
        return hashlib.sha256(content.encode()).hexdigest()[:24]

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Request:
        fields.check(line, LINE, set(LINE))
        if line["kind"] not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {line['kind']!r}")
        lists = {name: tuple(line[name]) for name in ("context", "targets", "until")}
        request = cls(line["kind"], **lists, max_new_tokens=line["max_new_tokens"], cut=line["cut"])
        if request.id != line["id"]:
            raise ValueError(f"request {line['id']} does not match its id; make the requests again")
        return request


def write(path: Path, tasks: Mapping[str, Sequence[Request]]) -> None:
    """Writes the requests of all tasks atomically, one JSON line each."""
    with durable.replacing(path) as file:
        for task, requests in tasks.items():
            for request in requests:
                file.write((json.dumps({"task": task, "id": request.id} | asdict(request)) + "\n").encode())


def read(path: Path) -> dict[str, list[Request]]:
    """Requests by task."""
    tasks: dict[str, list[Request]] = {}
    contexts: dict[tuple[int, ...], tuple[int, ...]] = {}
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; make it with --stage requests")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = durable.parse_json(line)
                request = Request.from_json(row)
                context = contexts.setdefault(request.context, request.context)  # requests share equal contexts in memory
                tasks.setdefault(row["task"], []).append(replace(request, context=context))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not a request: {error}") from error
    return tasks


def cut(requests: Iterable[Request]) -> dict[str, int]:
    """Number of truncated requests, and of tokens truncated in total."""
    truncated = [request.cut for request in requests if request.cut]
    return {"requests": len(truncated), "tokens": sum(truncated)}
