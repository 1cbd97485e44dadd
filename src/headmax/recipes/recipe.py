"""Recipes: a model, its training settings and its data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmax.data.chat import Chats
from headmax.data.dataset import TokenShards
from headmax.data.mixture import Mixture
from headmax.data.mqar import MQAR
from headmax.data.shards import Index
from headmax.data.source import Source
from headmax.models import HeadmaxConfig
from headmax.models.softmaxify import softmaxify
from headmax.train import TrainConfig
from headmax.train.loading import load_model

logger = logging.getLogger("headmax")


@dataclass(frozen=True)
class Recipe:
    """A model and how to train it."""

    name: str
    model: HeadmaxConfig
    train: TrainConfig
    task: MQAR | None = None
    """The task to train on; None for text."""

    def on(self, task: MQAR) -> Recipe:
        """The recipe with another size of its task, and the same number of steps and sequences per step."""
        if self.task is None:
            raise ValueError(f"{self.name} trains on text, not on a task")
        train, old_length = self.train, self.task.length
        budget, batch, warmup = (
            tokens // old_length * task.length for tokens in (train.token_budget, train.batch_tokens, train.schedule.warmup_tokens)
        )
        schedule = replace(train.schedule, warmup_tokens=warmup)
        train = replace(train, token_budget=budget, batch_tokens=batch, sequence_length=task.length, schedule=schedule)
        model = HeadmaxConfig.from_dict(self.model.to_dict() | {"vocab_size": task.vocab_size})
        return replace(self, model=model, train=train, task=task)

    def speaking(self, data: Path) -> Recipe:
        """The recipe with the document token of a prepared folder, if it is another, as its beginning and end of text."""
        token = Index.read(data).document_token
        if token == self.model.bos_token_id:
            return self
        tokens = {"bos_token_id": token, "eos_token_id": token}
        return replace(self, model=HeadmaxConfig.from_dict(self.model.to_dict() | tokens))

    def after(self, checkpoint: Path) -> tuple[Recipe, dict[str, Tensor]]:
        """The recipe to continue from a trained model, and the model's weights.

        If the recipe has head gates and the model none, it gets gates that start as 1.
        """
        model = load_model(checkpoint, dtype=torch.float32)
        ours, theirs = (sorted({mixer.name for mixer in config.mixers}) for config in (self.model, model.config))
        if ours != theirs:
            raise ValueError(f"--from: {checkpoint} has layers of {', '.join(theirs)}, recipe {self.name} of {', '.join(ours)}")
        if self.model.head_gate is not None and model.config.head_gate is None:
            softmaxify(model)
        execution = {"backend": self.model.backend, "fused": self.model.fused}
        return replace(self, model=HeadmaxConfig.from_dict(model.config.to_dict() | execution)), dict(model.state_dict())

    def mixture(self, data: Path, shares: Mapping[Path, float]) -> tuple[Source, Source | None]:
        """(training source, validation source) with `shares` of the samples from other folders and the rest from `data`."""
        source, validation = self.sources(data)
        if not isinstance(source, TokenShards):
            raise ValueError(f"--mix: {data} is not a folder written by `headmax data prepare`")
        for folder in shares:
            if (Index.read(folder).tokenizer_sha256, Index.read(folder).document_token) != (source.tokenizer_sha256, source.document_token):
                raise ValueError(f"--mix: {folder} was prepared with another tokenizer or document token than {data}")
        mixed_in = [self.sources(folder)[0] for folder in shares]
        return Mixture([source, *mixed_in], [1 - sum(shares.values()), *shares.values()], self.train.seed), validation

    def chats(self, file: Path, tokenizer: Any) -> Source:
        """A source of conversations, one per line of a JSON Lines file."""
        return Chats(file, tokenizer, length=self.train.sequence_length, seed=self.train.seed)

    def sources(self, data: Path | None) -> tuple[Source, Source | None]:
        """(training source, validation source): the task, or a folder written by `headmax data prepare`."""
        if self.task is not None:
            if data is not None:
                raise ValueError(f"--data: {self.name} generates its samples; leave --data out")
            return self.task.samples(self.train.seed), self.task.held_out(self.train.seed)
        if data is None:
            raise ValueError(f"--data must name a folder that `headmax data prepare` wrote: {self.name} trains on text")
        train, index = self.train, Index.read(data)
        source = TokenShards(data, length=train.sequence_length, seed=train.seed, documents=train.documents)
        if index.tokens("valid") < train.sequence_length:
            held_out, length = index.tokens("valid"), train.sequence_length
            logger.warning("%s: no validation: %d tokens are held out, fewer than a sequence of %d", data, held_out, length)
            return source, None
        return source, TokenShards(data, length=train.sequence_length, seed=0, documents=train.documents, split="valid")
