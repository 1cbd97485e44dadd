"""What is run, as data: every training of the reproduction, and which part of it asks for which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headmax.data.mqar import MQAR
from headmax.layers import HeadGateConfig
from headmax.models import HeadmaxConfig
from headmax.recipes.language import backbones
from headmax.recipes.recall import recall_training
from headmax.train import CheckpointConfig, ComputeConfig, EvalConfig, OptimConfig, ScheduleConfig, TrainConfig

LENGTH, BATCH = 2048, 16
"""Tokens of a sequence and sequences of a step, for language models."""
STEPS, SHORT, RATE_STEPS, NEEDLE_STEPS, RECALL_STEPS = 512, 384, 160, 100, 2000
"""Of most language models, of those of some parts (which have plain models of their own), and of other runs."""
RATES = {"text": (5e-4, 1e-3, 2e-3, 4e-3), "recall": (3e-4, 1e-3, 3e-3, 1e-2)}
"""Learning rates that each backbone tries."""
SEEDS = (0, 1, 2)
BACKBONES = ("transformer", "retnet", "gla", "gdn")
"""Those of the paper, by their names in recipes."""
LINEAR = ("gla", "retnet", "gdn")
GATES: tuple[Literal["softmax", "uniform", "sigmoid"], ...] = ("softmax", "uniform", "sigmoid")
VARIANTS: dict[str, HeadGateConfig | None] = {
    "plain": None,
    **{kind: HeadGateConfig(kind=kind, read_position="query") for kind in GATES},
    **{f"{kind}-after": HeadGateConfig(kind=kind, read_position="after_norm") for kind in GATES},
    "uniform-read-after": HeadGateConfig(kind="uniform", read_position="after_norm", write=False),
}
"""Gates by name, whatever the defaults are. All have the mean 1/H; -after: the read gate comes after the norm; -read: no write gate.
"softmax" is the paper's literal setting."""
KINDS = ("plain", *GATES)
"""What is compared at one place of the read gate."""
PLACES = (*KINDS, *(f"{kind}-after" for kind in GATES))
"""The same at both."""
EPS = (1e-6, 1e-5)
SIZES = ("4x256", "6x512", "10x768")
"""Layers x hidden size. The middle one, that of most runs, has 20M parameters beside 16M of embeddings."""
HEADS = (4, 8, 16)
RECALL_SETTINGS, RECALL_VOCAB = ((16, 4), (32, 2), (32, 4), (32, 8), (64, 4)), 256
"""Pairs and heads: more pairs at 4 heads, more heads at 32 pairs."""
NO_CHECKPOINT = CheckpointConfig(final=False)
"""Models are examined where they were trained, and their runs too short to be gone on with."""


@dataclass(frozen=True)
class Run:
    """One training. Runs of equal fields are the same run, whichever part asks for it."""

    backbone: str
    """Of `BACKBONES`."""
    variant: str = "plain"
    """Of `VARIANTS`."""
    size: str = "6x512"
    """Layers x hidden size."""
    heads: int = 4
    seed: int = 0
    """Of initialisation and data order."""
    steps: int = STEPS
    lr: float | None = None
    """Peak learning rate; None: the best of those that the plain model of the backbone tried."""
    norm_eps: float = 1e-6
    pairs: int | None = None
    """Recall (MQAR) of so many pairs; None: text."""

    @property
    def kind(self) -> str:
        return "text" if self.pairs is None else "recall"

    @property
    def name(self) -> str:
        """All but the seed, in one word; of the number of steps, whether it is SHORT."""
        words = [self.variant] * (self.variant != "plain") + [self.backbone, self.size]
        words += [f"h{self.heads}"] * (self.heads != 4) + [f"eps{self.norm_eps}"] * (self.norm_eps != EPS[0])
        words += [f"mqar{self.pairs}"] * (self.pairs is not None) + [f"lr{self.lr}"] * (self.lr is not None)
        words += ["short"] * (self.steps == SHORT)
        return "-".join(words)

    @property
    def examined(self) -> Literal["whole", "wikitext", "not"]:
        """By which tasks: all for the models of the paper's tables, which are trained on needles too; short runs by none."""
        if self.kind == "recall" or self.lr is not None or self.steps == SHORT:
            return "not"
        return "whole" if self in PARTS["language"](self.seed) else "wikitext"

    @property
    def learns_gates(self) -> bool:
        gate = VARIANTS[self.variant]
        return gate is not None and gate.kind != "uniform"

    @property
    def twin(self) -> Run:
        """The plain model of the same seed, whose initial parameters this one takes over."""
        return replace(self, variant="plain")

    def rates(self, variant: str = "plain") -> list[Run]:
        """The runs that choose the learning rate, which are those of the plain model; or what other variants make of the same rates."""
        if self.kind == "text":
            return [Run(self.backbone, variant, SIZES[1], steps=RATE_STEPS, lr=lr) for lr in RATES["text"]]
        return [Run(self.backbone, variant, self.size, lr=lr, steps=RECALL_STEPS, pairs=32) for lr in RATES["recall"]]

    def model(self, vocab_size: int) -> HeadmaxConfig:
        layers, hidden = map(int, self.size.split("x"))
        return HeadmaxConfig(
            mixer=backbones()[self.backbone].name,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_heads=self.heads,
            norm_eps=self.norm_eps,
            conv_size=None if self.kind == "text" else 4,
            vocab_size=vocab_size,
            head_gate=VARIANTS[self.variant],
        )

    def task(self) -> MQAR | None:
        return None if self.pairs is None else MQAR(self.pairs, RECALL_VOCAB)

    def train(self, lr: float) -> TrainConfig:
        task = self.task()
        if task is not None:
            config = recall_training(task, steps=self.steps, seed=self.seed, lr=lr, eval_every=100)
            compute = replace(config.compute, precision="bfloat16", compile=False)
            return replace(config, checkpoint_every=0, checkpoint=NO_CHECKPOINT, compute=compute)
        return text_training(self.steps, self.seed, lr)


def text_training(steps: int, seed: int, lr: float) -> TrainConfig:
    """As in the paper but for the sizes: up a line over a tenth of the tokens, down a cosine, from and to 3% of the peak."""
    tokens = LENGTH * BATCH
    return TrainConfig(
        token_budget=steps * tokens,
        sequence_length=LENGTH,
        batch_tokens=tokens,
        seed=seed,
        checkpoint_every=0,
        optim=OptimConfig(lr=lr),
        schedule=ScheduleConfig(warmup_tokens=steps // 10 * tokens, start_lr=0.03 * lr, final_lr=0.03 * lr),
        compute=ComputeConfig(micro_batch=BATCH),
        checkpoint=NO_CHECKPOINT,
        eval=EvalConfig(every=max(1, steps // 4), sequences=8 * BATCH),
    )


def language(seed: int) -> Iterator[Run]:
    for backbone in LINEAR:
        yield from (Run(backbone, variant, seed=seed) for variant in (*KINDS, "uniform-read-after"))
    if seed == 0:
        yield Run("transformer")


def placement(seed: int) -> Iterator[Run]:
    """Where GLA's read gate is and what its norm adds."""
    for eps in EPS:
        yield from (Run("gla", variant, seed=seed, norm_eps=eps) for variant in PLACES)


def after(seed: int) -> Iterator[Run]:
    """The read gates of the others after the norm."""
    for backbone in LINEAR[1:]:
        yield from (Run(backbone, variant, seed=seed, steps=SHORT) for variant in ("plain", "softmax", *PLACES[len(KINDS) :]))


def heads(seed: int) -> Iterator[Run]:
    yield from (Run("gla", variant, heads=n, seed=seed, steps=SHORT) for n in HEADS for variant in ("plain", "softmax", "uniform"))


def scaling(seed: int) -> Iterator[Run]:
    yield from (Run("gla", variant, size, seed=seed, steps=SHORT) for size in SIZES for variant in ("plain", "softmax"))


def recall(seed: int) -> Iterator[Run]:
    for pairs, n in RECALL_SETTINGS:
        for backbone in LINEAR:
            yield from (Run(backbone, kind, "2x128", n, seed, RECALL_STEPS, pairs=pairs) for kind in PLACES)


def rates(seed: int) -> Iterator[Run]:
    if seed == 0:
        yield from (rate for backbone in BACKBONES for rate in Run(backbone).rates())


def recall_rates(seed: int) -> Iterator[Run]:
    if seed == 0:
        yield from (rate for run in recall(seed) for rate in run.rates())


def gate_rates(seed: int) -> Iterator[Run]:
    """Would gates choose another rate than the plain model did?"""
    if seed == 0:
        yield from (rate for backbone in LINEAR for variant in KINDS[1:3] for rate in Run(backbone).rates(variant))


def recall_gate_rates(seed: int) -> Iterator[Run]:
    """All models at all rates, since in recall that is what decides."""
    models = (Run(backbone, size="2x128", pairs=32) for backbone in LINEAR)
    yield from (replace(rate, seed=seed) for run in models for variant in PLACES for rate in run.rates(variant))


PARTS = {
    "rates": rates,
    "language": language,
    "placement": placement,
    "after": after,
    "heads": heads,
    "scaling": scaling,
    "gate-rates": gate_rates,
    "recall-rates": recall_rates,
    "recall": recall,
    "recall-gate-rates": recall_gate_rates,
}
"""The runs of one seed, by part."""


def runs(parts: Sequence[str]) -> list[Run]:
    """What these parts ask for, each run once, in the order of their worth: all of one seed before the next."""
    return list(dict.fromkeys(run for seed in SEEDS for part in parts for run in PARTS[part](seed)))


def comparable(one: Run, other: Run) -> tuple[Run, Run]:
    """Both with as many steps as some part asks of both: nothing else was trained on the same tokens."""
    asked = {replace(run, seed=0) for part in PARTS for run in PARTS[part](0)}
    lengths = [(replace(one, steps=steps), replace(other, steps=steps)) for steps in (STEPS, SHORT)]
    return next((pair for pair in lengths if asked.issuperset(replace(run, seed=0) for run in pair)), (one, other))
