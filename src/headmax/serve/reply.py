"""What a request's events make, in OpenAI's forms: whole, or as the pieces of a stream."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from headmax.analysis.gates import Gate
from headmax.serve.job import Likeliest, NewGates, NewToken
from headmax.serve.tokenizer import ServedTokenizer

MIN_LOGPROB = -9999.0
"""Stands for log-probabilities that JSON has no number for."""


class Extras(NamedTuple):
    """What else to tell of each choice, and in each event of a stream."""

    token_ids: bool = False
    gates: bool = False
    usage: bool = False
    """A stream's last event counts tokens, and all others have null there."""


class Delta(NamedTuple):
    """A part of a choice."""

    text: str
    scores: list[NewToken]
    """Of its tokens, and of the prompt's where that is echoed and scored."""
    tokens: list[int]
    gates: list[NewGates]


class Continuation:
    """One choice: its tokens and text so far, and how much of them has been told."""

    def __init__(self, index: int, tokenizer: ServedTokenizer | None, stops: Sequence[str], prompt: Sequence[int], start: str = "") -> None:
        """`start` is what the text begins with: the `prompt`, where that is echoed."""
        self.index = index
        self.stream = None if tokenizer is None else tokenizer.stream(stops, prompt)
        self.text, self.echoed = start, bool(start)
        self.tokens: list[int] = []
        self.scores: list[NewToken] = []
        self.gates: list[NewGates] = []
        """As `scores`, what has not been sent."""
        self.finish: str | None = None
        self.sent = (0, 0)
        """Characters of the text, and tokens."""
        self.offset = 0
        """Characters of the text before the next token that is told."""
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.closed = False
        """Whether the end has been told."""

    def take(self, event: NewToken) -> bool:
        """Notes a token; whether a stop string has ended the text with it."""
        if self.finish is not None:
            return False
        self.tokens.append(event.token)
        self.scores.append(event)
        if self.stream is not None:
            self.text += self.stream.push(event.token)
            if self.stream.stopped:
                self.finish = "stop"
        return self.finish is not None

    def end(self, reason: str) -> None:
        if self.finish is None:
            self.text += "" if self.stream is None else self.stream.finish()
            self.finish = "stop" if self.stream is not None and self.stream.stopped else reason

    def delta(self) -> Delta:
        """What has come since the last call."""
        text, tokens = self.sent
        self.sent = len(self.text), len(self.tokens)
        scores, self.scores, gates, self.gates = self.scores, [], self.gates, []
        return Delta(self.text[text:], scores, self.tokens[tokens:], gates)


class Reply:
    """A request's choices, and what is said about them all."""

    kind, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, model: str, tokenizer: ServedTokenizer | None, choices: list[Continuation], *, logprobs: int | None, extras: Extras
    ) -> None:
        """`logprobs`: how many of the likeliest tokens to tell; None to tell of none."""
        self.tokenizer, self.choices, self.logprobs, self.extras = tokenizer, choices, logprobs, extras
        self.head = {"id": f"{self.kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.prompt_tokens = self.cached_tokens = 0

    @property
    def done(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        generated = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(choice, choice.delta()) for choice in self.choices]
        return {**self.head, "object": self.object, "choices": choices, "usage": self.usage()}

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        """What a stream begins with."""
        return ()

    def chunk(self, choice: Continuation) -> dict[str, Any] | None:
        """What is new of a choice, if anything is."""
        ended, delta = choice.finish is not None and not choice.closed, choice.delta()
        scored, named = self.logprobs is not None and delta.scores, self.extras.token_ids and delta.tokens
        if not (ended or delta.text or scored or named or delta.gates):
            return None
        choice.closed = choice.finish is not None
        return self._event(self._part(choice, delta))

    def usage_chunk(self) -> dict[str, Any]:
        return self._event() | {"usage": self.usage()}

    def _event(self, *choices: dict[str, Any]) -> dict[str, Any]:
        event = {**self.head, "object": self.chunk_object, "choices": choices}
        return event | ({"usage": None} if self.extras.usage else {})

    def _choice(self, choice: Continuation, delta: Delta) -> dict[str, Any]:
        """Of a whole reply."""
        return self._part(choice, delta)

    def _part(self, choice: Continuation, delta: Delta) -> dict[str, Any]:
        """Of a stream."""
        logprobs = self._logprobs(choice, delta.scores) if self.logprobs is not None and delta.scores else None
        part = {"index": choice.index, **self._content(delta.text), "logprobs": logprobs, "finish_reason": choice.finish}
        part |= {"token_ids": delta.tokens} if self.extras.token_ids else {}
        return part | ({"gates": list(map(gates_shown, delta.gates))} if self.extras.gates else {})

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, choice: Continuation, scores: list[NewToken]) -> dict[str, Any]:
        """Of completions: lists side by side."""
        names = [self._name(score.token) for score in scores]
        offsets = [self._offset(choice, score.token, name) for score, name in zip(scores, names, strict=True)]
        tops = [None if score.likeliest is None else dict(map(self._pair, self._top(score.likeliest))) for score in scores]
        return {
            "tokens": names,
            "token_logprobs": [None if score.logprob is None else finite(score.logprob) for score in scores],
            "top_logprobs": tops if self.logprobs else None,
            "text_offset": offsets,
        }

    def _offset(self, choice: Continuation, token: int, name: str) -> int:
        """Characters of the text before a token, which adds none if it is a control token or ends within a character."""
        if self.tokenizer is None or token in self.tokenizer.special:
            return choice.offset
        if not name.startswith("bytes:"):
            choice.offset += len(choice.utf8.decode(b"", True))
        before = choice.offset
        if choice.echoed and not before and name.startswith(" "):  # many tokenizers drop a text's first space
            choice.offset += len(self.tokenizer.decode([token]))
        else:
            choice.offset += len(choice.utf8.decode(bytes(self.tokenizer.token(token)[1])))
        return before

    def _top(self, likeliest: Likeliest) -> Likeliest:
        return likeliest[: self.logprobs or 0]

    def _pair(self, pair: tuple[int, float]) -> tuple[str, float]:
        return self._name(pair[0]), finite(pair[1])

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.token(token)[0]


def gates_shown(gates: NewGates) -> dict[str, Any]:
    """Each gate as the winner of each token, -1 for none, and the shares of its heads."""

    def shown(gate: Gate | None) -> dict[str, Any] | None:
        if gate is None:
            return None
        return {"winners": gate.winners.tolist(), "shares": [[round(x, 4) for x in row] for row in gate.shares.tolist()]}

    layers = [{"layer": layer.index, "read": shown(layer.read), "write": shown(layer.write)} for layer in gates.layers]
    return {"start": gates.start, "layers": layers}


class ChatReply(Reply):
    kind, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        for choice in self.choices:
            delta = {"role": "assistant", "content": ""}
            part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self._event(part)

    def _choice(self, choice: Continuation, delta: Delta) -> dict[str, Any]:
        part = super()._choice(choice, delta)
        del part["delta"]
        return part | {"message": {"role": "assistant", "content": delta.text, "refusal": None}}

    def _content(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, choice: Continuation, scores: list[NewToken]) -> dict[str, Any]:
        """Of chats: one entry a token."""
        return {"content": list(map(self._scored, scores)), "refusal": None}

    def _scored(self, score: NewToken) -> dict[str, Any]:
        tops = [self._entry(token, p) for token, p in self._top(score.likeliest or [])]
        return self._entry(score.token, score.logprob) | {"top_logprobs": tops}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        assert self.tokenizer is not None
        name, raw = self.tokenizer.token(token)
        return {"token": name, "bytes": raw, "logprob": MIN_LOGPROB if logprob is None else finite(logprob)}


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
