"""Conversations as tokens, by the tokenizer's own template. Control tokens come from the template alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headmax.data.tokenizer import encode_text

NO_TEMPLATE = "this model's tokenizer has no chat template: continue texts instead (/v1/completions), or give one with --chat-template FILE"


class Chat:
    """A message may hold the names of control tokens, such as "</s>". They are put aside before the template is filled in, so that all
    that are there afterwards are its own, and are put back as plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = {token.content: token for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
        self.control = {name: added.get(name) for name in {*added, *tokenizer.all_special_tokens} if name}
        self.names = sorted(self.control, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")

    def encode(self, messages: Sequence[Mapping[str, Any]], reply: bool = True) -> list[int]:
        """Tokens of a conversation, for a `reply` up to where its words begin; ValueError where the template refuses it."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(NO_TEMPLATE)
        mark = self._mark(messages)
        safe = [self._aside(message, mark) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(safe, tokenize=False, add_generation_prompt=reply)
        except Exception as error:  # such as the template's own for roles that do not take turns
            raise ValueError(f"messages do not fit the chat template: {error}") from None
        return self._encode(text, mark)

    @staticmethod
    def _mark(messages: Sequence[Mapping[str, Any]]) -> str:
        """A character for private use that no message has."""
        said = set(json.dumps(list(messages), ensure_ascii=False))
        return next(letter for letter in map(chr, range(0xE000, 0xF8FF)) if letter not in said)

    def _aside(self, said: Any, mark: str) -> Any:
        """All text of a message with numbers between marks in place of the names of control tokens."""
        if isinstance(said, str):
            return self.pattern.sub(lambda found: f"{mark}{self.names.index(found[0])}{mark}", said)
        if isinstance(said, Mapping):
            return {name: self._aside(x, mark) for name, x in said.items()}
        return [self._aside(x, mark) for x in said] if isinstance(said, list) else said

    def _back(self, text: str, mark: str) -> str:
        return re.sub(f"{mark}([0-9]+){mark}", lambda found: self.names[int(found[1])], text)

    def _encode(self, text: str, mark: str) -> list[int]:
        """Control tokens as such, and what is between them as the tokenizer reads any text."""
        ids: list[int] = []
        start, before = 0, None
        for found in self.pattern.finditer(text):
            after = self.control[found[0]]
            ids += self._plain(text[start : found.start()], mark, before, after)
            ids.append(self.tokenizer.convert_tokens_to_ids(found[0]))
            start, before = found.end(), after
        return ids + self._plain(text[start:], mark, before, None)

    def _plain(self, text: str, mark: str, before: Any, after: Any) -> list[int]:
        """Text between two control tokens, which may take the spaces next to them."""
        text = self._back(text, mark)
        text = text.lstrip() if before is not None and before.rstrip else text
        text = text.rstrip() if after is not None and after.lstrip else text
        return encode_text(self.tokenizer, text, start=False)["input_ids"] if text else []
