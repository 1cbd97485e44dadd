"""Tokens into text as they come, and the strings and tokens at which a text ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headmax.models import HeadmaxForCausalLM

CONTEXT = 16
"""Most tokens before a text, or before a new one, that are decoded along with it."""
MOST_HELD = 64
"""Tokens without a whole character, of which valid UTF-8 has four at most; they are taken as they are then."""
BROKEN = "\ufffd"
"""Stands for bytes that are no character, or not yet."""


class TextStream:
    """The text of a growing list of tokens. What might be the start of a stop string, or half a character, is held back."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """`before` are the prompt's tokens: many tokenizers drop a text's first space, which is no longer the first after them."""
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.longest = max(map(len, self.stops), default=0)
        self.window: list[int] = []
        self.shown = ""
        """The part of the window's text that was taken already."""
        self.text = ""
        self.given = 0
        self.stopped = False
        self._decode_from(list(before[-CONTEXT:]))

    def push(self, token: int) -> str:
        """The text that is certain after one more token; sets `stopped` where a stop string appears, which is cut off."""
        if self.stopped:
            return ""
        self.window.append(token)
        text = self._decode(self.window)
        if text.endswith(BROKEN) and len(self.window) <= MOST_HELD:  # a character whose bytes are not all there yet
            return ""
        self._take(text)
        if len(self.window) > 8 and not self._decode_from(self.window) and len(self.window) > MOST_HELD:
            self.window = self.window[-1:]
            self.shown = self._decode(self.window)
        return self._give(self._certain())

    def finish(self) -> str:
        """What was held back, when no more tokens come; a stop string may be in it."""
        if not self.stopped:
            self._take(self._decode(self.window))
        return self._give(len(self.text))

    def _take(self, text: str) -> None:
        """Adds what is new in the window's text, up to the first stop string."""
        start = max(0, len(self.text) - self.longest)
        self.text += text[len(self.shown) :]
        self.shown = text
        if ends := [at for stop in self.stops if (at := self.text.find(stop, start)) >= 0]:
            self.text, self.stopped = self.text[: min(ends)], True

    def _decode_from(self, tokens: list[int]) -> bool:
        """Makes as few of the last of these tokens as have whole characters the window, so that only a few are decoded anew each time;
        whether there are such."""
        for count in range(1, min(CONTEXT, len(tokens)) + 1):
            text = self._decode(tokens[-count:])
            if text and BROKEN not in text:
                self.window, self.shown = tokens[-count:], text
                return True
        return False

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _certain(self) -> int:
        """How much of the text no stop string can take back."""
        return len(self.text) - (0 if self.stopped else max((_held(self.text, stop) for stop in self.stops), default=0))

    def _give(self, end: int) -> str:
        new = self.text[self.given : end]
        self.given = max(self.given, end)
        return new


def _held(text: str, stop: str) -> int:
    """Characters at a text's end that are the beginning of a stop string."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0


def end_tokens(model: HeadmaxForCausalLM, tokenizer: Any) -> frozenset[int]:
    """Those that end a text: the model's and the tokenizer's."""
    ends = model.generation_config.eos_token_id
    tokens = [*(ends if isinstance(ends, list) else [ends]), getattr(tokenizer, "eos_token_id", None)]
    return frozenset(token for token in tokens if token is not None)
