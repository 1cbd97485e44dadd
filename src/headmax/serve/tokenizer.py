"""Text to tokens and back for many requests at once: a tokenizer's copy for each direction, since one must not be used by two threads."""

from __future__ import annotations

import asyncio
import copy
import functools
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenizers import pre_tokenizers

from headmax.data.template import Chat
from headmax.data.tokenizer import encode_text
from headmax.generate.text import TextStream
from headmax.serve.errors import ApiError

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_letters() -> dict[str, int]:
    """Which byte each letter of a byte-level tokenizer's pieces stands for: most for themselves, the others from U+0100 on, in order."""
    shown = {letter: ord(letter) for letter in pre_tokenizers.ByteLevel.alphabet() if ord(letter) < 256}
    hidden = sorted(set(range(256)) - set(shown.values()))
    return shown | {chr(256 + n): byte for n, byte in enumerate(hidden)}


class ServedTokenizer:
    """For the coroutines of one event loop."""

    def __init__(self, tokenizer: Any) -> None:
        self.encoder, self.decoder = tokenizer, copy.deepcopy(tokenizer)
        self.chat = Chat(self.encoder)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="headmax-tokenizer")
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        self.longest = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token."""
        self.letters = byte_letters() if "ByteLevel" in repr(getattr(tokenizer, "backend_tokenizer", tokenizer).decoder) else None

    async def encode(self, text: str) -> list[int]:
        """A prompt's tokens, as `Engine.encode` has them."""
        return await self._apart(lambda: encode_text(self.encoder, text)["input_ids"])

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A conversation's tokens, up to where the assistant's next words begin."""
        return await self._apart(lambda: self.chat.encode(messages))

    async def _apart(self, work: Any) -> list[int]:
        """Work in the encoder's thread; what it cannot encode is the caller's mistake."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, work)
        except ValueError as error:
            raise ApiError(400, str(error)) from None

    def stream(self, stops: Sequence[str], before: Sequence[int] = ()) -> TextStream:
        """The text of tokens that come one by one after those of a prompt."""
        return TextStream(self.decoder, stops, before)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.decoder.decode(tokens, skip_special_tokens=True)

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - there is one of these for a server's life
    def token(self, token: int) -> tuple[str, list[int]]:
        """A token by itself, as text and as bytes."""
        piece = self.decoder.convert_ids_to_tokens(token) or ""
        if found := BYTE.fullmatch(piece):
            raw = bytes([int(found[1], 16)])
        elif self.letters is not None and all(letter in self.letters for letter in piece):
            raw = bytes(self.letters[letter] for letter in piece)
        else:
            once, twice = (self.decoder.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
            text = twice[len(once) :]  # with its space, which many tokenizers drop at the start of a text
            return text, list(text.encode())
        try:
            return raw.decode(), list(raw)
        except UnicodeDecodeError:  # part of a character; named so that no two are alike
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)
