"""Validation loss and gate health, in one pass over the same sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax.data.source import Batch, Source
from headmax.layers.loss import IGNORED
from headmax.models.modeling import Gates
from headmax.train.config import TrainConfig
from headmax.train.feed import micro_batches, next_labels, piece_of, to
from headmax.train.metrics import Line
from headmax.train.parallel import World
from headmax.train.parallelize import Replica

DEAD = 0.1
"""A head is dead if its mean share is below this fraction of an even share."""


@torch.no_grad()
def evaluate(replica: Replica, source: Source, config: TrainConfig, world: World) -> tuple[Line, Line]:
    """(loss, perplexity and, if requested, accuracy; gate health by layer and kind) on the first sequences of `source`."""
    sequences = max(1, config.eval.sequences // world.data_size) * world.data_size
    totals, health = torch.zeros(3, dtype=torch.float64), GateHealth()
    replica.model.eval()
    for indices in micro_batches(0, sequences, world, config.compute.micro_batch):
        with replica.autocast:
            batch = to(piece_of(source.batch(indices), world), world.device)
            loss, gates = score(replica, batch, config.eval.accuracy)
        totals = totals.to(world.device) + loss
        health.add(gates)
    replica.model.train()
    loss_sum, correct, count = world.sum(totals).tolist()
    mean = loss_sum / max(1, count)
    scores = {"loss": mean, "perplexity": math.exp(min(mean, 700.0))} | (
        {"accuracy": correct / max(1, count)} if config.eval.accuracy else {}
    )
    return scores, health.read(world)


def score(replica: Replica, batch: Batch, accuracy: bool) -> tuple[Tensor, Gates]:
    """([summed loss, exact predictions (0 without `accuracy`), predicted tokens], gates)."""
    options = {"cu_seqlens": batch.packing, "position_ids": batch.position_ids, "return_gates": True, "use_cache": False}
    targets = next_labels(batch)
    labelled = targets != IGNORED
    count = labelled.sum()
    if not accuracy:
        labels = {"labels": batch.labels, "shift_labels": targets, "num_items_in_batch": 1}
        output = replica.model(batch.input_ids, skip_logits=True, **labels, **options)
        return torch.stack([output.loss.double(), count.new_zeros(()).double(), count.double()]), output.gates
    columns = labelled.any(0).nonzero().flatten()
    output = replica.model(batch.input_ids, logits_to_keep=columns, **options)
    answers = targets[:, columns]
    loss = F.cross_entropy(output.logits.flatten(0, 1).float(), answers.flatten(), ignore_index=IGNORED, reduction="sum")
    return torch.stack([loss.double(), (output.logits.argmax(-1) == answers).sum().double(), count.double()]), output.gates


def shares(gates: Gates) -> Iterator[tuple[str, Tensor]]:
    """Each gate, by layer and kind, normalised over heads: [tokens, heads], summing to 1 for any gate and scale."""
    for layer, pair in enumerate(gates):
        for kind, gate in zip(("read", "write"), pair or (None, None), strict=True):
            if gate is not None:
                yield f"{layer}/{kind}", gate.flatten(0, 1) / gate.flatten(0, 1).sum(-1, keepdim=True)


class GateHealth:
    """Entropy and head shares of each gate, summed over tokens."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, gates: Gates) -> None:
        for name, p in shares(gates):
            entropy = torch.special.entr(p).sum(-1, keepdim=True) / math.log(max(2, p.shape[-1]))
            row = torch.cat([torch.ones_like(entropy), entropy, p], dim=-1).sum(0, dtype=torch.float64)
            self.sums[name] = self.sums[name] + row if name in self.sums else row

    def read(self, world: World) -> Line:
        """By gate: entropy (1 if all heads share evenly, 0 if one wins every token), each head's mean share, and the dead heads."""
        line: Line = {}
        for name, row in self.sums.items():
            tokens, entropy, *share = world.sum(row).tolist()
            share = [x / tokens for x in share]
            dead = [head for head, x in enumerate(share) if x < DEAD / len(share)]
            line[name] = {"entropy": entropy / tokens, "share": share, "dead": dead}
        return line


def balance(gates: Gates) -> Tensor:
    """Load-balancing loss: the mean over gates of H Σ_h p_h² - 1, where p_h is the mean share of head h."""
    means: Iterable[Tensor] = (p.mean(0) for _, p in shares(gates))
    return torch.stack([p.numel() * p.square().sum() - 1 for p in means]).mean()
