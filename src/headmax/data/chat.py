"""Conversations to fine-tune on: the tokenizer's template, and a loss on the answers alone."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headmax import durable
from headmax.data.permutation import permute
from headmax.data.source import Batch
from headmax.data.template import Chat
from headmax.ops.packing import Packing

logger = logging.getLogger("headmax")

IGNORED = -100
Encoded = tuple[np.ndarray, np.ndarray]
"""Tokens, and labels: the tokens of answers."""


def encode_chat(template: Chat, messages: Sequence[dict[str, Any]]) -> Encoded:
    """A conversation as a model reads it later. An answer is what the template adds with it, after what begins every answer."""
    ids = template.encode(messages, reply=False)
    labels = np.full(len(ids), IGNORED, dtype=np.int64)
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = template.encode(messages[:n]) if n else [], template.encode(messages[: n + 1], reply=False)
            if after[: len(before)] != before or ids[: len(after)] != after:
                raise ValueError(
                    f"the chat template writes message {n + 1} otherwise when others follow it, so that its answer has no place"
                )
            labels[len(before) : len(after)] = after[len(before) :]
    return np.asarray(ids, dtype=np.int64), labels


def read_chats(file: Path) -> list[list[dict[str, Any]]]:
    """The `messages` of each line."""
    chats = []
    for number, line in enumerate(durable.read_text(file).removesuffix("\n").split("\n"), 1):  # texts hold all else that ends a line
        try:
            messages = durable.parse_json(line)["messages"]
            if not (isinstance(messages, list) and messages):
                raise ValueError("no messages")
            if not all(isinstance(message[name], str) for message in messages for name in ("role", "content")):
                raise TypeError("no text")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{file}:{number}: not a conversation, {{"messages": [{{"role": TEXT, "content": TEXT}}, ...]}}') from error
        chats.append(messages)
    return chats


class Chats:
    """A `Source` of rows of `length` tokens, each with as many whole conversations as fit; nothing crosses from one to the next.

    A conversation that is longer is cut. The rows are made once; every epoch has its own shuffle of them.
    """

    def __init__(self, file: Path, tokenizer: Any, *, length: int, seed: int) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(f"{file}: the tokenizer has no chat template; name a tokenizer with one (--tokenizer)")
        self.file, self.vocab_size, self.length, self.seed = file, len(tokenizer), length, seed
        read, template = [], Chat(tokenizer)
        for number, messages in enumerate(read_chats(file), 1):
            try:
                read.append(encode_chat(template, messages))
            except ValueError as error:
                raise ValueError(f"{file}:{number}: {error}") from error
        chats = [(ids, labels) for ids, labels in read if (labels[1:length] != IGNORED).any()]
        if not chats:
            raise ValueError(f"{file}: no conversation has an answer within {length} tokens")
        if lost := len(read) - len(chats):
            logger.warning("%s: %d of %d conversations have no answer within %d tokens and are left out", file, lost, len(read), length)
        if cut := sum(len(ids) > length for ids, _ in chats):
            logger.warning("%s: %d of %d conversations are longer than %d tokens and are cut", file, cut, len(read), length)
        order = permute(np.arange(len(chats)), len(chats), (seed, -1))
        self.rows = self._fill([(chats[n][0][:length], chats[n][1][:length]) for n in order])
        self._template = hashlib.sha256(json.dumps([tokenizer.chat_template, *map(str, read[0][0])]).encode()).hexdigest()

    def _fill(self, chats: Sequence[Encoded]) -> list[list[Encoded]]:
        rows: list[list[Encoded]] = [[]]
        for chat in chats:
            if sum(len(ids) for ids, _ in rows[-1]) + len(chat[0]) > self.length:
                rows.append([])
            rows[-1].append(chat)
        return rows

    @property
    def identity(self) -> dict[str, str | int]:
        checksum = hashlib.sha256(self.file.read_bytes()).hexdigest()
        return {"chats": checksum, "template": self._template, "length": self.length, "seed": self.seed}

    def batch(self, indices: Sequence[int]) -> Batch:
        ids, labels = np.zeros((len(indices), self.length), dtype=np.int64), np.full((len(indices), self.length), IGNORED)
        bounds: list[int] = []
        for n, index in enumerate(indices):
            epoch, place = divmod(int(index), len(self.rows))
            at = 0
            for tokens, answers in self.rows[int(permute(np.array([place]), len(self.rows), (self.seed, epoch))[0])]:
                ids[n, at : at + len(tokens)], labels[n, at : at + len(tokens)] = tokens, answers
                bounds.append(n * self.length + at)
                at += len(tokens)
            if at < self.length:  # what is left over is a sequence of its own, without a loss
                bounds.append(n * self.length + at)
        packing = Packing(torch.tensor([*bounds, ids.size]))
        return Batch(torch.from_numpy(ids).reshape(1, -1), torch.from_numpy(labels).reshape(1, -1), packing)
