"""`headmax chat`: a conversation in the terminal, with a checkpoint or with a server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headmax.data.template import Chat
from headmax.generate.engine import Engine, Request
from headmax.generate.prefix import PrefixState
from headmax.generate.terminal import Settings, Shown
from headmax.generate.text import end_tokens
from headmax.serve.client import Lines, address_of, explained, read_event

if TYPE_CHECKING:
    import httpx2

Messages = list[dict[str, str]]


class Usage(NamedTuple):
    """Of one reply, in tokens."""

    prompt: int
    cached: int
    """Of the prompt, those that had been read before."""
    generated: int
    finish: str


class Partner(Protocol):
    def reply(self, messages: Messages, show: Callable[[str], None]) -> Usage:
        """Shows the reply to a conversation as it comes; ValueError where there can be none."""


class Local:
    """A model in this process. A turn goes on from the state after the longest earlier prompt that it begins with."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings, self.ends = engine, settings, end_tokens(engine.model, engine.tokenizer)
        self.chat = Chat(engine.tokenizer)
        self.prompts: list[PrefixState] = []

    def reply(self, messages: Messages, show: Callable[[str], None]) -> Usage:
        ids = self.chat.encode(messages)
        self.prompts = [prompt for prompt in self.prompts if prompt.tokens.tolist() == ids[: len(prompt)]]
        known = max(self.prompts, key=len, default=None)
        cached = 0 if known is None else len(known)
        if known is None or cached < len(ids):
            known = self.engine.prefill(ids[cached:], known)
            self.prompts.append(known)
        request = Request([], known, self.settings.max_new_tokens, self.settings.sampling, sorted(self.ends), self.settings.stop_strings)
        completion = self.engine.generate(request, on_token=lambda _, token, text: show(text))[0]
        return Usage(len(ids), cached, len(completion.tokens), completion.finish)


class Remote:
    """A server with an OpenAI-compatible API."""

    def __init__(self, http: httpx2.Client, model: str | None, fields: dict[str, Any]) -> None:
        """`fields` go into every request; without a `model` the first that the server has is taken."""
        self.http, self.fields = http, fields
        self.model = model or self._first_model()

    def reply(self, messages: Messages, show: Callable[[str], None]) -> Usage:
        body = {"model": self.model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}, **self.fields}
        usage: dict[str, Any] = {}
        finish = ""
        with self.http.stream("POST", "chat/completions", json=body) as answer:
            if answer.is_error:
                raise ValueError(explained(answer.read()))
            lines = Lines()
            for event in (read_event(line) for text in answer.iter_text() for line in lines.push(text)):
                usage = event.get("usage") or usage
                for choice in event.get("choices", []):
                    finish = choice.get("finish_reason") or finish
                    show(choice["delta"].get("content") or "")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Usage(usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0), finish)

    def _first_model(self) -> str:
        answer = self.http.get("models")
        if answer.is_error:
            raise ValueError(explained(answer.content))
        return answer.json()["data"][0]["id"]


def converse_with_server(address: str, key: str | None, model: str | None, fields: dict[str, Any], system: str | None) -> None:
    """`converse` over HTTP; ValueError where the server cannot be reached."""
    import httpx2

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx2.Client(base_url=address_of(address), headers=headers, timeout=httpx2.Timeout(10, read=600)) as http:
        try:
            converse(Remote(http, model, fields), system)
        except httpx2.HTTPError as error:
            raise ValueError(f"{address}: {error}") from None


def converse(partner: Partner, system: str | None) -> None:
    """Each line of standard input is a turn; /new forgets the conversation, the end of input ends it, Ctrl-C ends a reply."""
    start: Messages = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    while (line := next_line()) is not None:
        if line == "/new":
            messages = list(start)
        elif line.strip():
            messages.append({"role": "user", "content": line})
            text = show_reply(partner, messages)
            if text:
                messages.append({"role": "assistant", "content": text})
            else:
                messages.pop()


def next_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


def show_reply(partner: Partner, messages: Messages) -> str:
    """The reply, shown on standard output as it comes, with a line about it on standard error."""
    parts: list[str] = []

    def write(text: str) -> None:
        parts.append(text)
        print(text, end="", flush=True)

    shown = Shown(write)
    try:
        usage = partner.reply(messages, lambda text: shown(0, 0, text))
    except KeyboardInterrupt:
        print(flush=True)
        return "".join(parts)
    print(flush=True)
    line = shown.summary(usage.generated, usage.finish, usage.prompt - usage.cached)
    print(f"headmax: {usage.cached:,} tokens cached, {line}", file=sys.stderr)
    return "".join(parts)
