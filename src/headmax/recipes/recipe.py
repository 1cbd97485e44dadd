"""What a recipe is."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from headmax.data.dataset import TokenShards
from headmax.data.mqar import MQAR
from headmax.data.shards import Index
from headmax.data.source import Source
from headmax.models import HeadmaxConfig
from headmax.train import TrainConfig

logger = logging.getLogger("headmax")


@dataclass(frozen=True)
class Recipe:
    """A model and how to train it."""

    name: str
    model: HeadmaxConfig
    train: TrainConfig
    task: MQAR | None = None
    """What it trains on, where that is not text."""

    def on(self, task: MQAR) -> Recipe:
        """The recipe for another size of its task: as many steps of as many sequences."""
        if self.task is None:
            raise ValueError(f"{self.name} trains on text, not on a task")
        train, before = self.train, self.task.length
        budget, batch, warmup = (
            tokens // before * task.length for tokens in (train.token_budget, train.batch_tokens, train.schedule.warmup_tokens)
        )
        schedule = replace(train.schedule, warmup_tokens=warmup)
        train = replace(train, token_budget=budget, batch_tokens=batch, sequence_length=task.length, schedule=schedule)
        model = HeadmaxConfig.from_dict(self.model.to_dict() | {"vocab_size": task.vocab_size})
        return replace(self, model=model, train=train, task=task)

    def speaking(self, data: Path) -> Recipe:
        """The recipe with the token that begins the documents of a prepared folder; one that is not the recipe's own ends them too."""
        token = Index.read(data).document_token
        if token == self.model.bos_token_id:
            return self
        tokens = {"bos_token_id": token, "eos_token_id": token}
        return replace(self, model=HeadmaxConfig.from_dict(self.model.to_dict() | tokens))

    def sources(self, data: Path | None) -> tuple[Source, Source | None]:
        """What to train on and what to validate on: the task, or a folder that `headmax data prepare` wrote."""
        if self.task is not None:
            if data is not None:
                raise ValueError(f"--data: {self.name} makes its own samples")
            return self.task.samples(self.train.seed), self.task.held_out(self.train.seed)
        if data is None:
            raise ValueError(f"--data must name a folder that `headmax data prepare` wrote: {self.name} trains on text")
        train, index = self.train, Index.read(data)
        source = TokenShards(data, length=train.sequence_length, seed=train.seed, documents=train.documents)
        if index.tokens("valid") < train.sequence_length:
            logger.warning("%s: no validation, as %d tokens are held out for it", data, index.tokens("valid"))
            return source, None
        return source, TokenShards(data, length=train.sequence_length, seed=0, documents=train.documents, split="valid")
