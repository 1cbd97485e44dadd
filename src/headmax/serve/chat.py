"""Conversations as tokens, by the tokenizer's own template. Control tokens come from the template alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headmax.data.tokenizer import encode_text
from headmax.models import HeadmaxForCausalLM

NO_TEMPLATE = (
    "this model's tokenizer has no chat template: continue texts with it, by /v1/completions, or give it one by --chat-template FILE"
)


def end_tokens(model: HeadmaxForCausalLM, tokenizer: Any) -> frozenset[int]:
    """Those that end a text: the model's and the tokenizer's."""
    ends = model.generation_config.eos_token_id
    tokens = [*(ends if isinstance(ends, list) else [ends]), getattr(tokenizer, "eos_token_id", None)]
    return frozenset(token for token in tokens if token is not None)


class Chat:
    """A message may hold the names of control tokens, such as "</s>". They are put aside before the template is filled in, so that all
    that are there afterwards are its own, and are put back as plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = {token.content: token for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
        self.control = {name: added.get(name) for name in {*added, *tokenizer.all_special_tokens} if name}
        self.names = sorted(self.control, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's next words begin; ValueError where the template refuses it."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(NO_TEMPLATE)
        mark = self._mark(messages)
        safe = [{name: self._aside(text, mark) for name, text in message.items()} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(safe, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # such as the template's own for roles that do not take turns
            raise ValueError(f"messages do not fit the chat template: {error}") from None
        return self._encode(text, mark)

    @staticmethod
    def _mark(messages: Sequence[dict[str, str]]) -> str:
        """A character for private use that no message has."""
        said = set().union(*(text for message in messages for text in message.values()))
        return next(letter for letter in map(chr, range(0xE000, 0xF8FF)) if letter not in said)

    def _aside(self, text: str, mark: str) -> str:
        """The text with numbers between marks in place of the names of control tokens."""
        return self.pattern.sub(lambda found: f"{mark}{self.names.index(found[0])}{mark}", text)

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
