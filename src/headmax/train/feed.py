"""Batches of this rank, prefetched in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax.data.source import Batch, Source
from headmax.layers.loss import IGNORED
from headmax.train.config import TrainConfig
from headmax.train.faults import TrainingError
from headmax.train.parallel import World

PREFETCH = 2
"""Steps to prefetch."""


def micro_batches(first: int, size: int, world: World, limit: int) -> list[range]:
    """This rank's share of samples first, ..., first + size - 1, in as few and as even micro-batches of at most `limit` as possible."""
    share = size // world.data_size
    start, pieces = first + world.data_rank * share, -(-share // limit)
    bounds = [start + share * n // pieces for n in range(pieces + 1)]
    return [range(*ends) for ends in pairwise(bounds)]


def next_labels(batch: Batch) -> Tensor:
    """For each token the label of the next one, or -100: the first token of a sequence is not predicted."""
    if batch.shift_labels is not None:
        return batch.shift_labels
    labels = batch.labels if batch.packing is None else batch.labels.masked_fill(batch.packing.positions == 0, IGNORED)
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def count_targets(batch: Batch) -> int:
    """Number of predicted tokens in a batch."""
    return int((next_labels(batch) != IGNORED).sum())


def piece_of(batch: Batch, world: World) -> Batch:
    """This rank's piece of each sequence; the batch itself without context parallelism."""
    if world.context_group is None:
        return batch
    start, stop = (batch.input_ids.shape[1] * n // world.pieces for n in (world.piece, world.piece + 1))
    ids, labels, following = (x[:, start:stop].contiguous() for x in (batch.input_ids, batch.labels, next_labels(batch)))
    if batch.packing is not None:
        return Batch(ids, labels, batch.packing.piece(start, stop), None, following)
    return Batch(ids, labels, None, torch.arange(start, stop)[None], following)


def to(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, copied asynchronously from pinned memory."""
    return batch.map(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x.to(device))


class Feed:
    """Micro-batches, step by step. The samples of a step depend only on its number and the global batch size."""

    def __init__(self, source: Source, config: TrainConfig, world: World) -> None:
        if config.batch_size % world.data_size:
            processes = f"{world.size} processes"
            if world.data_size < world.size:
                processes += f" of which {world.size // world.data_size} share each sequence"
            raise ValueError(
                f"batch_tokens {config.batch_tokens} is {config.batch_size} sequences: must be a multiple of {world.data_size}, "
                f"for {processes}"
            )
        if source.length != config.sequence_length:
            raise ValueError(f"sequence_length is {config.sequence_length}, but samples have {source.length} tokens")
        self.source, self.config, self.world = source, config, world

    def read(self, step: int) -> list[Batch]:
        """This rank's micro-batches of step `step`, counted from 0."""
        size = self.config.batch_size
        batches = []
        for indices in micro_batches(step * size, size, self.world, self.config.compute.micro_batch):
            try:
                batch = self.source.batch(indices)
            except (OSError, ValueError) as error:
                raise TrainingError(f"step {step + 1}: cannot read samples {indices[0]} to {indices[-1]}: {error}") from error
            batch = piece_of(batch, self.world)
            if self.world.device.type == "cuda":
                batch = batch.map(lambda x: x.pin_memory())
            batches.append(batch)
        return batches

    def steps(self, first: int, end: int) -> Iterator[list[Batch]]:
        """The micro-batches of steps first, ..., end - 1, counted from 0."""
        with ThreadPoolExecutor(1, "headmax-feed") as reader:
            prefetched: deque[Future[list[Batch]]] = deque()
            try:
                for step in range(first, end + PREFETCH):
                    if step < end:
                        prefetched.append(reader.submit(self.read, step))
                    if step >= first + PREFETCH:
                        yield prefetched.popleft().result()
            finally:
                reader.shutdown(cancel_futures=True)
