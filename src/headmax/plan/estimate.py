"""What would it take? Memory, step time, days and GPU-hours of a training run, from FLOPs, bytes, links and what was measured."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn

from headmax import HeadmaxForCausalLM, recipes
from headmax.layers.block import Block
from headmax.layers.loss import LOGITS_AT_ONCE
from headmax.layers.mixers.base import RecurrentMixer
from headmax.ops.registry import suggest
from headmax.ops.spec import CHUNK_FOR_FLOPS
from headmax.recipes import Recipe

MEASURED = Path(__file__).with_name("measured.json")
Parallel = Literal["ddp", "fsdp"]
MAX_GPUS, GPUS_PER_NODE = 1024, 8
STATE_BYTES = {"parameters": 4, "gradients": 4, "AdamW": 8}
"""Of a parameter; float32, and sharded by FSDP."""
COPY_BYTES = 2
"""Of a parameter in bfloat16, which the products read."""
OPTIMIZER_TRAFFIC = 36
"""Bytes an optimizer step moves per parameter: the norm and the clipping read and write gradients, AdamW reads 16 and writes 12."""
WEIGHT_TRAFFIC = 14
"""Bytes of a micro-batch per parameter: float32 read, bfloat16 written and read twice, the gradient written."""
ACTIVATION_TOUCHES = 5
"""Times that a kept activation moves: written, read, read again going back, its gradient written and read."""
USABLE = 0.92
"""Of a card's memory; the rest is the driver's, NCCL's and lost between blocks."""
ASSUMED_EFFICIENCY = 0.5
"""Where nothing was measured: the time of both roofs, one after the other, over the time of a step."""
LINK_EFFICIENCY = 0.8
"""Of a link's bandwidth that a collective reaches."""
NEVER_HIDDEN = 0.1
"""The share of communication that does not overlap with work: the last bucket, the first gather."""
HOP = 20e-6
"""Seconds a collective takes per doubling of the ranks, whatever its size."""


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


@dataclass(frozen=True)
class Work:
    """What a model costs at a length, counted on the meta device."""

    parameters: int
    layers: int
    flops: float
    """Per token, forward and backward."""
    activations: float
    """Bytes per token kept for the backward pass by all layers."""
    block: float
    """The same of the largest layer, with what its backward pass needs beside."""
    inputs: float
    """Bytes per token of all layers' inputs: what checkpointing keeps."""
    vocabulary: int
    hidden: int

    @classmethod
    def of(cls, recipe: Recipe, length: int) -> Work:
        with torch.device("meta"):
            model = HeadmaxForCausalLM(recipe.model)
        products = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        blocks: list[Block] = list(model.model.layers)
        hidden = recipe.model.hidden_size
        kept = [_activations(block, hidden) for block in blocks]
        ops = sum(block.mixer.flops(length) for block in blocks)  # type: ignore[operator]
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            layers=len(blocks),
            flops=3 * (2 * products + ops),
            activations=sum(kept),
            block=max(2 * of + _state_bytes(block.mixer) for of, block in zip(kept, blocks, strict=True)),
            inputs=2.0 * hidden * len(blocks),
            vocabulary=recipe.model.vocab_size,
            hidden=hidden,
        )


def _read_out(mixer: nn.Module) -> int:
    return cast(nn.Linear, mixer.o_proj).in_features


def _activations(block: Block, hidden: int) -> float:
    """Bytes of one token in bfloat16: what enters the block and its two halves, every projection, the read-out.

    Compiled blocks compute cheap work again (norms, activations, products of gates), and recurrences keep no states.
    """
    outputs = {name: module.out_features for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    back = [name for name in outputs if name.endswith(("o_proj", "down_proj"))]
    widths = 4 * hidden + sum(width for name, width in outputs.items() if name not in back) + _read_out(block.mixer)
    if getattr(block.mixer, "convs", None) is not None:
        widths += sum(outputs[f"mixer.{name}"] for name in ("q_proj", "k_proj", "v_proj"))
    return 2.0 * widths


def _state_bytes(mixer: nn.Module) -> float:
    """Per token: the states at every chunk's beginning and their gradients, which live while one layer goes back."""
    if not isinstance(mixer, RecurrentMixer):
        return 0.0
    return 2 * 2 * mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim / CHUNK_FOR_FLOPS


@dataclass(frozen=True)
class TrainingJob:
    """What is asked for."""

    recipe: Recipe
    card: str
    tokens: int
    length: int
    batch_tokens: int

    def __post_init__(self) -> None:
        if self.card not in CARDS:
            raise ValueError(f"unknown GPU {self.card!r}{suggest(self.card, CARDS)}")
        if self.length < 1 or self.batch_tokens < self.length:
            raise ValueError(f"a batch of {self.batch_tokens:,} tokens holds no sequence of {self.length:,}")
        if self.tokens < self.batch_tokens:
            raise ValueError(f"{self.tokens:,} tokens are fewer than one batch of {self.batch_tokens:,}")

    @property
    def sequences(self) -> int:
        """Per batch, whole ones."""
        return self.batch_tokens // self.length

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.sequences * self.length))


@dataclass(frozen=True)
class Estimate:
    """One way to do it."""

    gpus: int
    parallel: Parallel
    micro_batch: int
    """Sequences a GPU takes at once."""
    accumulation: int
    checkpointing: bool
    memory: dict[str, float]
    """Bytes per GPU by what they are for."""
    step: float
    """Seconds."""
    communication: float
    """Seconds of the step that wait for other GPUs."""
    steps: int

    @property
    def seconds(self) -> float:
        return self.step * self.steps

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.gpus / 3600


def memory(work: Work, tokens: int, gpus: int = 1, parallel: Parallel = "ddp", checkpointing: bool = False) -> dict[str, float]:
    """Bytes on a GPU with a micro-batch of so many tokens, by what they are for."""
    shards = gpus if parallel == "fsdp" else 1
    made = {name: size * work.parameters / shards for name, size in STATE_BYTES.items()}
    # Sharded parameters are whole for the layer at work and the next, in bfloat16, and so is a layer's gradient before it is reduced.
    whole = 2 / (work.layers + 1) if parallel == "fsdp" else 1.0
    made["bfloat16 weights"] = COPY_BYTES * work.parameters * whole + (4 * work.parameters / (work.layers + 1) if shards > 1 else 0)
    made["activations"] = tokens * ((work.inputs if checkpointing else work.activations) + work.block)
    made["loss"] = 2.0 * min(LOGITS_AT_ONCE, tokens * work.vocabulary) + 4.0 * work.vocabulary * work.hidden + 4.0 * tokens * work.hidden
    return made


def ideal(work: Work, card: Card, tokens: int, shards: int = 1, checkpointing: bool = False) -> tuple[float, float]:
    """(seconds of a micro-batch, seconds of the optimizer) with products at the card's peak and traffic at its bandwidth, in turns."""
    again = 4 / 3 if checkpointing else 1.0
    flops = tokens * work.flops * again / (card.tflops * 1e12)
    traffic = tokens * work.activations * ACTIVATION_TOUCHES * again + WEIGHT_TRAFFIC * work.parameters
    return flops + traffic / (card.bandwidth * 1e9), OPTIMIZER_TRAFFIC * work.parameters / shards / (card.bandwidth * 1e9)


def collective(size: float, gpus: int, card: Card) -> float:
    """Seconds to gather, or to reduce and scatter, `size` bytes: within nodes, and between those of the same place in each."""
    inside = min(gpus, GPUS_PER_NODE)
    nodes = gpus / inside
    near = (inside - 1) / inside * size / card.link
    far = (nodes - 1) / nodes * size / inside / card.network
    return (near + far) / (LINK_EFFICIENCY * 1e9) + HOP * math.log2(gpus)


def step_time(
    work: Work, card: Card, efficiency: float, tokens: int, accumulation: int, gpus: int, parallel: Parallel, checkpointing: bool
) -> tuple[float, float]:
    """(seconds of a step, those of them spent waiting for other GPUs)."""
    micro, optimizer = (t / efficiency for t in ideal(work, card, tokens, gpus if parallel == "fsdp" else 1, checkpointing))
    waiting = 0.0
    if gpus > 1 and parallel == "ddp":  # gradients are summed once a step, while the last micro-batch goes back
        talk = 2 * collective(STATE_BYTES["gradients"] * work.parameters, gpus, card)
        waiting = max(talk - 2 / 3 * micro, NEVER_HIDDEN * talk)
    elif gpus > 1:  # every micro-batch gathers each layer twice and reduces its gradient
        layer = work.parameters / (work.layers + 1)
        once = 2 * collective(COPY_BYTES * layer, gpus, card) + collective(STATE_BYTES["gradients"] * layer, gpus, card)
        talk = (work.layers + 1) * once
        waiting = accumulation * max(talk - micro, NEVER_HIDDEN * talk)
    return accumulation * micro + optimizer + waiting, waiting


def estimate(run: TrainingJob, work: Work, efficiency: float, gpus: int, parallel: Parallel) -> Estimate:
    """The fastest way that fits: the largest micro-batch, with checkpointing only where there is no other."""
    if not 1 <= gpus <= MAX_GPUS:
        raise ValueError(f"gpus must be between 1 and {MAX_GPUS}, got {gpus}")
    if run.sequences % gpus:
        raise ValueError(
            f"{gpus} GPUs cannot share a batch of {run.sequences} sequences of {run.length:,} evenly; "
            f"the next batch that they can is {math.ceil(run.sequences / gpus) * gpus * run.length:,} tokens"
        )
    card, share = CARDS[run.card], run.sequences // gpus
    for checkpointing in (False, True):
        for micro in (n for n in range(share, 0, -1) if share % n == 0):
            tokens = micro * run.length
            needs = memory(work, tokens, gpus, parallel, checkpointing)
            if sum(needs.values()) <= USABLE * card.memory * 1e9:
                step, waiting = step_time(work, card, efficiency, tokens, share // micro, gpus, parallel, checkpointing)
                return Estimate(gpus, parallel, micro, share // micro, checkpointing, needs, step, waiting, run.steps)
    raise ValueError(
        f"one sequence of {run.length:,} does not fit on {run.card}: {sum(needs.values()) / 1e9:.0f} GB with checkpointing, "
        f"{USABLE * card.memory:.0f} of {card.memory:.0f} GB can be used"
    )


@dataclass(frozen=True)
class Measured:
    """A training step as it was timed on one GPU."""

    recipe: str
    card: str
    length: int
    batch: int
    seconds: float
    memory: float | None
    """Bytes at the peak."""
    source: str

    @property
    def efficiency(self) -> float:
        return sum(ideal(self.work, CARDS[self.card], self.length * self.batch)) / self.seconds

    @property
    def work(self) -> Work:
        return Work.of(recipes.get(self.recipe), self.length)


def card_of(device: str) -> str | None:
    """The card that torch calls so; an A100 of 40 GB says that it is one."""
    words = re.sub(r"\W", " ", device.lower().replace("rtx ", "rtx")).split()
    names = [name for name in CARDS if set(name.split("-")) <= set(words)]
    return max(names, key=len, default=None)


def measured_steps() -> list[Measured]:
    """All training steps of ours that were recorded; `python -m lab package` puts them into the package."""
    return [Measured(**step) for step in json.loads(MEASURED.read_text())]


def choose_efficiency(recipe: str, card: str, length: int, steps: Sequence[Measured]) -> tuple[float, str]:
    """From the nearest measurement, of this model on this card or of what is most like them; and in words."""
    plain = recipe.removeprefix("softmax-")
    twins = [s for s in steps if s.recipe.removeprefix("softmax-") == plain]
    family = [s for s in steps if s.recipe.removeprefix("softmax-").split("-")[0] == plain.split("-")[0]]
    for kind, same in (
        ("", [s for s in twins if s.recipe == recipe and s.card == card]),
        ("its twin, ", [s for s in twins if s.card == card]),
        ("another card, ", twins),
        ("another size, ", [s for s in family if s.card == card]),
        ("another model, ", [s for s in steps if s.card == card]),
        ("another model and card, ", list(steps)),
    ):
        if same:
            nearest = min(abs(math.log(s.length / length)) for s in same)
            close = [s for s in same if abs(math.log(s.length / length)) == nearest]
            return statistics.median(s.efficiency for s in close), f"measured ({kind}{', '.join(sorted({s.source for s in close})[:2])})"
    return ASSUMED_EFFICIENCY, "assumed, since no record of a training step is there"


def check(recipe: str, card: str, length: int, steps: Sequence[Measured]) -> str | None:
    """The nearest measured step of this model on this card, predicted from all other measurements; None if there is none."""
    same = [s for s in steps if s.recipe == recipe and s.card == card]
    if not same:
        return None
    one = min(same, key=lambda s: abs(math.log(s.length / length)))
    efficiency, source = choose_efficiency(recipe, card, one.length, [s for s in steps if s is not one])
    tokens = one.length * one.batch
    predicted = sum(ideal(one.work, CARDS[card], tokens)) / efficiency
    line = (
        f"{one.source}: step predicted {1e3 * predicted:.0f} ms, measured {1e3 * one.seconds:.0f} ms ({predicted / one.seconds - 1:+.0%})"
    )
    if one.memory is not None:
        held = sum(memory(one.work, tokens).values())
        line += f"; memory predicted {held / 2**30:.1f} GiB, measured {one.memory / 2**30:.1f} GiB ({held / one.memory - 1:+.0%})"
    return f"{line}; efficiency {source}"
