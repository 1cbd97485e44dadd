"""GPUs, the links between them, and how long a message takes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from headmax.ops.registry import suggest

USABLE = 0.92
"""Of a card's memory; the rest is the driver's, NCCL's and lost between blocks."""
LINK_EFFICIENCY = 0.8
"""Of a link's bandwidth that a message reaches."""
HOP = 20e-6
"""Seconds that a message takes per doubling of the GPUs, whatever its size."""
Kind = Literal["gather", "reduce", "next"]
"""All-gather or reduce-scatter; all-reduce, which is both; to the neighbour alone."""


@dataclass(frozen=True)
class Card:
    """A GPU as its maker describes it."""

    tflops: float
    """bfloat16, dense, float32 sums."""
    memory: float
    """GB."""
    bandwidth: float
    """GB/s of its memory."""
    link: float
    """GB/s in one direction to the GPUs of its node."""
    network: float
    """GB/s in one direction to other nodes: one adapter per GPU, as the usual cluster of that generation has."""


# NVIDIA's data sheets: A100 80GB and 40GB SXM, H100 SXM, H200 SXM, DGX B200 (an eighth of it), L40S; the GA102 and AD102 white papers
# for the GeForce cards (no NVLink there: PCIe 4.0 x16). A800 and H800 are A100 and H100 with slower NVLink. There is no public sheet of
# the H20: 148 TFLOP/s, 96 GB, 4 TB/s and 900 GB/s of NVLink are what resellers and benchmarks of it state.
# Network: InfiniBand HDR (200 Gb/s) for Ampere, NDR (400 Gb/s) for Hopper and Blackwell, 100 Gb/s Ethernet for cards without NVLink.
CARDS = {
    "a100": Card(312, 80, 2039, 300, 25),
    "a100-40gb": Card(312, 40, 1555, 300, 25),
    "a800": Card(312, 80, 2039, 200, 25),
    "h100": Card(989, 80, 3350, 450, 50),
    "h800": Card(989, 80, 3350, 200, 50),
    "h200": Card(989, 141, 4800, 450, 50),
    "h20": Card(148, 96, 4000, 450, 50),
    "b200": Card(2250, 180, 8000, 900, 50),
    "l40s": Card(362, 48, 864, 32, 12.5),
    "rtx4090": Card(165, 24, 1008, 32, 12.5),
    "rtx3090": Card(71, 24, 936, 32, 12.5),
}


def card_of(device: str) -> str | None:
    """The card that torch calls so; an A100 of 40 GB says that it is one."""
    words = re.sub(r"\W", " ", device.lower().replace("rtx ", "rtx")).split()
    names = [name for name in CARDS if set(name.split("-")) <= set(words)]
    return max(names, key=len, default=None)


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs of one kind."""

    name: str
    card: Card
    per_node: int = 8

    @classmethod
    def of(cls, name: str, per_node: int = 8, link: float | None = None, network: float | None = None) -> Cluster:
        """Of cards by name, with their usual links unless others are given, in GB/s and one direction."""
        if name not in CARDS:
            raise ValueError(f"unknown GPU {name!r}{suggest(name, CARDS)}")
        for what, speed in (("link", link), ("network", network)):
            if speed is not None and not 0 < speed < math.inf:
                raise ValueError(f"--{what} must be positive, got {speed:g}")
        card = CARDS[name]
        return cls(name, replace(card, link=link or card.link, network=network or card.network), per_node)

    def inside(self, ranks: int, stride: int) -> int:
        """How many of the ranks, of which one follows another after `stride`, are in one node."""
        return max(1, min(ranks, self.per_node // stride))

    def seconds(self, kind: Kind, size: float, ranks: int, stride: int = 1) -> float:
        """Of one message about `size` bytes in all: within nodes, and between those of the same place in each."""
        if ranks == 1:
            return 0.0
        inside = self.inside(ranks, stride)
        if kind == "next":
            return size / (self.card.link if inside == ranks else self.card.network) / (LINK_EFFICIENCY * 1e9) + HOP
        nodes = ranks / inside
        near = (inside - 1) / inside * size / self.card.link
        far = (nodes - 1) / nodes * size / inside / self.card.network
        once = (near + far) / (LINK_EFFICIENCY * 1e9) + HOP * math.log2(ranks)
        return 2 * once if kind == "reduce" else once
