"""The plan's runs as data: what is trained, in the plan's order, and what is decided on the way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headmax.data.mqar import MQAR
from headmax.layers import HeadGateConfig
from headmax.models import HeadmaxConfig
from headmax.recipes.language import backbones
from headmax.recipes.recall import recall_training
from headmax.train import CheckpointConfig, ComputeConfig, EvalConfig, OptimConfig, ScheduleConfig, TrainConfig

LENGTH, BATCH = 2048, 64
"""Tokens of a sequence and sequences of a step."""
MICRO_BATCH = 32
"""Sequences that are processed at once: what fits most cards."""
SHORT_STEPS = 191
"""Steps of a short run: 25M tokens."""
WARMUP_TOKENS = 5_000_000
NEEDLE_STEPS, NEEDLE_RATE = 77, 1e-3
"""Of the continuation on needle texts: 10M tokens."""
POINTS = 16
"""At which gates and norms are looked at during training."""
SIZE, RECALL_SIZE = "16x640", "2x128"
"""Layers x hidden size: that of the 80m recipes, and that of MQAR."""
RATES, EDGES = (1e-3, 2e-3, 4e-3), {1e-3: 5e-4, 4e-3: 8e-3}
"""Learning rates of language models, and the further one that is tried where an end wins."""
FIRST_RATE = 2e-3
"""Before rates are chosen: of the noise check and of the search for a start."""
TUNING_SEED = 100
"""On which rates and the start are chosen; used for nothing else."""
STARTS: dict[str, tuple[float | str, float | str]] = {
    "own": (1.0, 1.0),
    "depth-depth": ("depth", "depth"),
    "1/16-1": (1 / 16, 1.0),
    "1/4-1": (1 / 4, 1.0),
    "1/4-depth": (1 / 4, "depth"),
    "1/16-depth": (1 / 16, "depth"),
}
"""`output_init` and `down_init` by name."""
SCALED = "scaled"
"""Stands for the start that the search chose."""
CONTROLS: tuple[Literal["uniform", "softmax", "sigmoid"], ...] = ("uniform", "softmax", "sigmoid")
GATES: dict[str, HeadGateConfig | None] = {
    "plain": None,
    **{kind: HeadGateConfig(kind=kind, read_position="query") for kind in CONTROLS},
    **{f"{kind}-after": HeadGateConfig(kind=kind, read_position="after_norm") for kind in CONTROLS},
    "softmax-heads": HeadGateConfig(kind="softmax", read_position="query", scale="heads"),
}
"""Gates by name, whatever the defaults are. -after: the read gate comes after the norm; -heads: gates of mean 1, whose uniform control is
the plain model."""
EPS = (1e-10, 1e-6, 1e-4)
RECALL_RATES = (1e-3, 3e-3, 1e-2)
RECALL_STEPS, RECALL_VOCAB, RECALL_SEEDS = 2000, 256, 8
RECALL_GRID = tuple((pairs, heads) for pairs in (16, 32, 64) for heads in (4, 8, 16))
"""Pairs and heads."""
RECALL_GATES = ("plain", "uniform", "softmax", "sigmoid", "uniform-after", "softmax-after", "softmax-heads")
MEASURABLE = (0.1, 0.9)
"""Accuracies of the plain model between which a setting is compared."""
Done = Mapping["Trial", float]
"""Validation loss of every recorded language model, accuracy of every recorded recall model; NaN where training failed."""


@dataclass(frozen=True)
class Trial:
    """One training. Trials of equal fields are the same one, whichever stage asks for it."""

    backbone: str
    """Of recipes: "gla" or "gdn"."""
    heads: int
    gates: str
    """Of `GATES`."""
    seed: int
    """Of initialisation and data order."""
    rate: float
    """Peak learning rate."""
    start: str = "own"
    """Of `STARTS`."""
    steps: int | None = None
    """None: one pass over the training text."""
    eps: float = 1e-6
    """Of the norms."""
    pairs: int | None = None
    """Recall (MQAR) of so many pairs; None: text."""

    @property
    def arm(self) -> Trial:
        """The same of any seed and rate."""
        return replace(self, seed=0, rate=0.0)

    @property
    def size(self) -> str:
        """Layers x hidden size."""
        return SIZE if self.pairs is None else RECALL_SIZE

    @property
    def name(self) -> str:
        words = [self.backbone, f"h{self.heads}", self.gates, self.start.replace("/", "over"), f"lr{self.rate:g}", f"seed{self.seed}"]
        words += [f"steps{self.steps}"] * (self.steps is not None) + [f"eps{self.eps:g}"] * (self.eps != 1e-6)
        return "-".join([*words, *([f"mqar{self.pairs}"] if self.pairs else [])])

    @property
    def examined(self) -> bool:
        """Whether it goes on to needles and is scored: the language models of one pass."""
        return self.pairs is None and self.steps is None and self.seed != TUNING_SEED

    @property
    def task(self) -> MQAR | None:
        return None if self.pairs is None else MQAR(self.pairs, RECALL_VOCAB)

    def model(self, vocab_size: int) -> HeadmaxConfig:
        layers, hidden = map(int, self.size.split("x"))
        output_init, down_init = STARTS[self.start]
        return HeadmaxConfig(
            mixer=backbones()[self.backbone].name,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_heads=self.heads,
            norm_eps=self.eps,
            conv_size=None if self.pairs is None else 4,
            vocab_size=vocab_size,
            head_gate=GATES[self.gates],
            output_init=output_init,
            down_init=down_init,
        )

    def train(self, pass_steps: int) -> TrainConfig:
        """`pass_steps` are those of one pass over the training text."""
        if self.task is not None:
            config = recall_training(self.task, steps=RECALL_STEPS, seed=self.seed, lr=self.rate, eval_every=RECALL_STEPS // 4)
            compute = replace(config.compute, precision="bfloat16", compile=False)
            return replace(config, checkpoint_every=0, checkpoint=CheckpointConfig(final=False), compute=compute)
        return text_training(self.steps or pass_steps, self.seed, self.rate, WARMUP_TOKENS)


def text_training(steps: int, seed: int, rate: float, warmup: int) -> TrainConfig:
    """Up a line from 0 over the warm-up, down a cosine to a tenth of the rate."""
    tokens = LENGTH * BATCH
    return TrainConfig(
        token_budget=steps * tokens,
        sequence_length=LENGTH,
        batch_tokens=tokens,
        seed=seed,
        checkpoint_every=0,
        optim=OptimConfig(lr=rate),
        schedule=ScheduleConfig(warmup_tokens=min(warmup, steps * tokens // 4), start_lr=0.0, final_lr=rate / 10),
        compute=ComputeConfig(micro_batch=min(MICRO_BATCH, BATCH)),
        checkpoint=CheckpointConfig(keep_last=1, final=False),
        eval=EvalConfig(every=max(1, steps // POINTS), sequences=BATCH),
    )


@dataclass(frozen=True)
class Row:
    """A row of the plan's table of arms: seeds by gates."""

    backbone: str
    heads: int
    start: str
    seeds: Mapping[str, int]

    def trial(self, gates: str, seed: int, rate: float, start: str) -> Trial:
        return Trial(self.backbone, self.heads, gates, seed, rate, start)

    @property
    def title(self) -> str:
        names = {"gla": "GLA", "gdn": "Gated DeltaNet"}
        return f"{names[self.backbone]}, {self.heads} heads, {self.start} start"


THREE = {"plain": 3, "uniform": 3, "softmax": 3}
ROWS = (
    Row("gla", 16, SCALED, {"plain": 3, "uniform": 8, "softmax": 8}),
    Row("gla", 16, "own", THREE),
    Row("gla", 4, SCALED, THREE),
    Row("gla", 4, "own", {"plain": 3}),
    Row("gdn", 4, SCALED, THREE),
    Row("gdn", 4, "own", {"plain": 3}),
)
PRIMARY = ROWS[0]


def best(tried: Sequence[Trial], done: Done) -> Trial | None:
    """That of the lowest loss, once all are recorded; a failed one never wins."""
    if not all(trial in done for trial in tried):
        return None
    return min(tried, key=lambda trial: math.inf if math.isnan(done[trial]) else done[trial])


def rate_trials(arm: Trial, done: Done) -> list[Trial]:
    """Those that choose an arm's rate: three, and a further one where an end of them wins."""
    tried = [replace(arm, seed=TUNING_SEED, rate=rate, steps=SHORT_STEPS) for rate in RATES]
    winner = best(tried, done)
    if winner is not None and winner.rate in EDGES:
        tried.append(replace(winner, rate=EDGES[winner.rate]))
    return tried


def chosen_rate(arm: Trial, done: Done) -> float | None:
    winner = best(rate_trials(arm, done), done)
    return None if winner is None else winner.rate


def start_trials() -> list[Trial]:
    """The search for the scaled start, on the plain model."""
    return [Trial("gla", 16, "plain", TUNING_SEED, FIRST_RATE, start, SHORT_STEPS) for start in STARTS if start != "own"]


def chosen_start(done: Done) -> str | None:
    winner = best(start_trials(), done)
    return None if winner is None else winner.start


def noise_trials() -> list[Trial]:
    return [Trial("gla", 16, "plain", seed, FIRST_RATE) for seed in (0, 1)]


def start_of(row: Row, done: Done) -> str | None:
    """The row's start by its name in `STARTS`, once it is decided."""
    return chosen_start(done) if row.start == SCALED else row.start


def row_trials(row: Row, gates: Sequence[str], done: Done) -> Iterator[Trial]:
    """A row's rates, then its trials by seed, as far as what is recorded decides them."""
    start = start_of(row, done)
    if start is None:
        return
    arms = {name: row.trial(name, 0, 0.0, start) for name in gates}
    for arm in arms.values():
        yield from rate_trials(arm, done)
    rates = {name: chosen_rate(arm, done) for name, arm in arms.items()}
    for seed in range(max(row.seeds[name] for name in gates)):
        for name, arm in arms.items():
            rate = rates[name]
            if seed < row.seeds[name] and rate is not None:
                yield replace(arm, seed=seed, rate=rate)


def eps_trials(done: Done) -> Iterator[Trial]:
    """Short runs at three eps of the norms, at the rates of the primary arms."""
    start = chosen_start(done)
    if start is None:
        return
    for seed in range(3):
        for gates in ("uniform", "softmax"):
            arm = PRIMARY.trial(gates, seed, 0.0, start)
            rate = chosen_rate(arm, done)
            if rate is not None:
                yield from (replace(arm, rate=rate, steps=SHORT_STEPS, eps=eps) for eps in EPS)


def language(done: Done) -> Iterator[Trial]:
    """All language models in the plan's order."""
    yield from noise_trials()
    yield from start_trials()
    yield from row_trials(PRIMARY, ("uniform", "softmax"), done)
    for row in ROWS:
        yield from row_trials(row, list(row.seeds), done)
    yield from eps_trials(done)


def recall_arm(backbone: str, pairs: int, heads: int, gates: str) -> Trial:
    return Trial(backbone, heads, gates, 0, 0.0, pairs=pairs)


def recall_rate_trials(arm: Trial) -> list[Trial]:
    return [replace(arm, seed=TUNING_SEED, rate=rate) for rate in RECALL_RATES]


def most_accurate(tried: Sequence[Trial], done: Done) -> Trial | None:
    if not all(trial in done for trial in tried):
        return None
    return max(tried, key=lambda trial: -math.inf if math.isnan(done[trial]) else done[trial])


def measurable(backbone: str, done: Done) -> list[tuple[int, int]]:
    """Pairs and heads at which the plain model, at its best rate on the tuning seed, is neither near 0 nor near 1."""
    found = []
    for pairs, heads in RECALL_GRID:
        winner = most_accurate(recall_rate_trials(recall_arm(backbone, pairs, heads, "plain")), done)
        if winner is not None and MEASURABLE[0] <= done[winner] <= MEASURABLE[1]:
            found.append((pairs, heads))
    return found


def recall(done: Done) -> Iterator[Trial]:
    """MQAR: the plain model over the grid, then every arm's rates and seeds where the plain model can be told from 0 and 1."""
    for backbone in ("gla", "gdn"):
        for pairs, heads in RECALL_GRID:
            yield from recall_rate_trials(recall_arm(backbone, pairs, heads, "plain"))
    for backbone in ("gla", "gdn"):
        for pairs, heads in measurable(backbone, done):
            arms = [recall_arm(backbone, pairs, heads, gates) for gates in RECALL_GATES]
            yield from (trial for arm in arms for trial in recall_rate_trials(arm))
            rates = {arm: most_accurate(recall_rate_trials(arm), done) for arm in arms}
            for seed in range(RECALL_SEEDS):
                yield from (replace(arm, seed=seed, rate=won.rate) for arm, won in rates.items() if won is not None)


PARTS: dict[str, Callable[[Done], Iterator[Trial]]] = {"language": language, "recall": recall}


def noise(done: Done) -> float | None:
    """The relative difference in loss of the noise check, once both are recorded; it must be below 2%."""
    losses = [done[trial] for trial in noise_trials() if trial in done]
    return abs(losses[0] - losses[1]) / statistics.mean(losses) if len(losses) == 2 else None
