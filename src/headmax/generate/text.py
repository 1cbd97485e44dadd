"""Tokens into text as they come, and the strings at which a text ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT = 16
"""Most tokens before a text that are decoded along with its first ones."""


class TextStream:
    """The text of a growing list of tokens. What might be the start of a stop string, or half a character, is held back."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """`before` are the prompt's tokens: many tokenizers drop a text's first space, which is no longer the first after them."""
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.window: list[int] = []
        self.shown = ""
        """The part of the window's text that was taken already."""
        self.text = ""
        self.given = 0
        self.stopped = False
        for count in range(1, min(CONTEXT, len(before)) + 1):  # as few as have a text that does not end within a character
            window = list(before[-count:])
            shown = self._decode(window)
            if shown and not shown.endswith("�"):
                self.window, self.shown = window, shown
                break

    def push(self, token: int) -> str:
        """The text that is certain after one more token; sets `stopped` where a stop string appears, which is cut off."""
        if self.stopped:
            return ""
        self.window.append(token)
        text = self._decode(self.window)
        if not text.endswith("�"):  # a character whose bytes are not all there yet
            start = max(0, len(self.text) - max(map(len, self.stops), default=0))
            self.text += text[len(self.shown) :]
            self.shown = text
            if len(self.window) > 8:  # only a few tokens are decoded anew each time
                alone = self._decode(self.window[-1:])
                if alone and "�" not in alone:  # else it is part of a character, or hides how the next one begins
                    self.window, self.shown = self.window[-1:], alone
            ends = [at for stop in self.stops if (at := self.text.find(stop, start)) >= 0]
            if ends:
                self.text, self.stopped = self.text[: min(ends)], True
        return self._give(self._certain())

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if not self.stopped:
            self.text += self._decode(self.window)[len(self.shown) :]
        return self._give(len(self.text))

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _certain(self) -> int:
        """How much of the text no stop string can take back."""
        if self.stopped:
            return len(self.text)
        held = (n for stop in self.stops for n in range(len(stop) - 1, 0, -1) if self.text.endswith(stop[:n]))
        return len(self.text) - max(held, default=0)

    def _give(self, end: int) -> str:
        new = self.text[self.given : end]
        self.given = max(self.given, end)
        return new
