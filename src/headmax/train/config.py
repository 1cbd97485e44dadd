"""Training settings."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Precision = Literal["bfloat16", "float32"]
Strategy = Literal["ddp", "fsdp"]
Optimizers = Literal["adamw", "muon"]
Shape = Literal["cosine", "wsd"]
Documents = Literal["concatenate", "separate"]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW or Muon, with gradient-norm clipping."""

    name: Optimizers = "adamw"
    """adamw; or muon for the projections of the blocks, with AdamW for embeddings, head gates, convolutions and vectors."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Weight decay of matrices: projections, embeddings, short convolutions, head gates; not of norms, A_log, dt_bias and biases."""
    momentum: float = 0.95
    """Momentum of Muon."""
    grad_clip: float = 1.0
    """Clip the gradient to this norm."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate by tokens: linear warm-up, then cosine decay, or a constant rate with linear decay at the end."""

    shape: Shape = "cosine"
    """cosine decays after warm-up; wsd (warm-up, stable, decay) stays at the peak until the last decay_fraction."""
    decay_fraction: float = 0.2
    """Fraction of the token budget over which wsd decays to final_lr."""
    warmup_tokens: int = 500_000_000
    """Tokens of warm-up."""
    start_lr: float = 3e-5
    """Learning rate at the first step."""
    final_lr: float = 3e-5
    """Learning rate at the end of the token budget."""


@dataclass(frozen=True)
class ComputeConfig:
    """How a step is computed; parameters and optimizer states are always float32."""

    precision: Precision = "bfloat16"
    """Precision of the matrix products."""
    micro_batch: int = 8
    """Maximum number of sequences that a device processes at a time; its share of the batch is split evenly into micro-batches."""
    compile: bool | None = None
    """Compile the blocks with torch.compile; unless given, on a GPU only."""
    activation_checkpointing: bool = False
    """Keep only the inputs of blocks and recompute the rest in the backward pass."""
    cuda_graph: bool | None = None
    """Run micro-steps as CUDA graphs; unless given, if a single process trains on a GPU and the other settings allow it."""


@dataclass(frozen=True)
class ParallelConfig:
    """How several processes share the work: data, context and tensor parallelism."""

    strategy: Strategy = "ddp"
    """ddp replicates the model; fsdp (FSDP2) shards parameters, gradients and optimizer states."""
    shard: int | None = None
    """Processes over which fsdp shards each copy of the model, such as those of a node; unless given, all share one copy."""
    context: int = 1
    """Processes that share each sequence, a segment each; must divide the number of processes and the sequence length."""
    tensor: int = 1
    """Processes that share heads, MLP columns and vocabulary; must divide each of these, and the number of processes."""

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"parallel.strategy must be {' or '.join(get_args(Strategy))}, got {self.strategy!r}")
        if self.shard is not None and self.strategy != "fsdp":
            raise ValueError(f"parallel.shard goes with parallel.strategy fsdp, got {self.strategy!r}")


@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints to keep."""

    keep_last: int = 3
    """Keep this many of the newest."""
    milestone_every: int = 0
    """Also keep those at multiples of this many steps; 0 for none."""
    final: bool = True
    """Write one at the end of the run."""


@dataclass(frozen=True)
class EvalConfig:
    """Validation perplexity and gate statistics."""

    every: int = 500
    """Steps between measurements, the last step included; 0 for none."""
    sequences: int = 128
    """Held-out sequences, the same for all seeds; rounded down to an equal share for each process."""
    accuracy: bool = False
    """Also measure the fraction of labels predicted exactly; for recall tasks, as it keeps all logits in memory."""


@dataclass(frozen=True)
class LogConfig:
    """Where metrics go, in addition to metrics.jsonl."""

    print_every: int = 10
    """Steps between printed lines when the output is not a terminal."""
    tensorboard: bool = False
    """Write TensorBoard files too."""
    wandb: str | None = None
    """Project of Weights & Biases to log to."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. Defaults are the paper's or, where it refers to them, those of GLA's recipe."""

    token_budget: int = 15_000_000_000
    """Tokens to train on."""
    sequence_length: int = 4096
    """Tokens per sequence."""
    batch_tokens: int = 524_288
    """Tokens per optimizer step, over all devices."""
    documents: Documents = "concatenate"
    """Whether the state continues across documents of a sequence, as in the paper, or is reset for each."""
    gate_balance: float = 0.0
    """Weight of the load-balancing loss H Σ_h p_h² - 1, where p_h is the mean gate of head h; it is 0 if all heads are used equally."""
    seed: int = 0
    """Random seed for initialisation and data order."""
    max_steps: int | None = None
    """Stop after this many steps, without changing the schedule; unless given, at the end of the token budget."""
    checkpoint_every: int = 500
    """Steps between checkpoints; 0 for one at the end only."""
    max_skipped_steps: int = 10
    """Skip at most this many steps with a NaN or Inf loss or gradient before stopping."""
    device: str = "auto"
    """Device to train on; auto is a GPU if available."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        given: Any = self.parallel
        if isinstance(given, str):  # as in 0.1
            object.__setattr__(self, "parallel", ParallelConfig(given))  # type: ignore[arg-type]  # which validates it
        check_numbers(flatten(asdict(self)))
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, one token to read and one to predict, got {self.sequence_length}")
        check_optim(self.optim)
        if self.batch_tokens % self.sequence_length:
            raise ValueError(f"batch_tokens {self.batch_tokens} must be a multiple of sequence_length {self.sequence_length}")
        if self.sequence_length % self.parallel.context:
            raise ValueError(f"sequence_length {self.sequence_length} must be a multiple of parallel.context {self.parallel.context}")
        if self.parallel.context > 1 and self.gate_balance > 0:
            raise ValueError("gate_balance does not go with parallel.context: no process sees the gates of a whole sequence")
        if self.compute.cuda_graph and self.against_graphs:
            raise ValueError(f"compute.cuda_graph does not go with {self.against_graphs}: leave one off")
        if not 0 <= self.schedule.warmup_tokens <= self.token_budget:
            raise ValueError(
                f"schedule.warmup_tokens must be between 0 and token_budget {self.token_budget}, got {self.schedule.warmup_tokens}"
            )
        if self.schedule.shape not in get_args(Shape):
            raise ValueError(f"schedule.shape must be {' or '.join(get_args(Shape))}, got {self.schedule.shape!r}")
        if not 0 <= self.schedule.decay_fraction <= 1:
            raise ValueError(f"schedule.decay_fraction must be between 0 and 1, got {self.schedule.decay_fraction}")

    @property
    def against_graphs(self) -> str | None:
        """The setting that rules out CUDA graphs, if any: it varies shapes, or reads values or random states on the host."""
        if self.documents == "separate":
            return "documents separate"
        if self.optim.name == "muon":
            return "optim.name muon"
        return "compute.activation_checkpointing" if self.compute.activation_checkpointing else None

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step, over all devices."""
        return self.batch_tokens // self.sequence_length

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        budget = -(-self.token_budget // self.batch_tokens)
        return budget if self.max_steps is None else min(budget, self.max_steps)


LARGEST = 10**18
"""Upper bound of integer settings: small sums of them still fit into a signed 64-bit integer."""
POSITIVE = (
    *("parallel.context", "parallel.tensor", "parallel.shard"),
    *("token_budget", "sequence_length", "batch_tokens", "max_steps", "max_skipped_steps", "optim.lr", "optim.eps", "optim.grad_clip"),
    *("compute.micro_batch", "checkpoint.keep_last", "eval.sequences", "log.print_every"),
)
NOT_NEGATIVE = (
    *("gate_balance", "seed", "checkpoint_every", "optim.weight_decay", "schedule.start_lr", "schedule.final_lr"),
    *("checkpoint.milestone_every", "eval.every"),
)
MAY_CHANGE = {
    *("max_steps", "checkpoint_every", "max_skipped_steps", "device", "parallel", "checkpoint", "eval", "log"),
    *("compute.micro_batch", "compute.compile", "compute.activation_checkpointing", "compute.cuda_graph"),
}
"""Settings that a resumed run may change: its length, hardware, execution and logging, but not the result."""


def check_optim(optim: OptimConfig) -> None:
    """ValueError names the first invalid setting."""
    if optim.name not in get_args(Optimizers):
        raise ValueError(f"optim.name must be {' or '.join(get_args(Optimizers))}, got {optim.name!r}")
    for name, rates in (("betas", optim.betas), ("momentum", (optim.momentum,))):
        if not all(0 <= rate < 1 for rate in rates):
            raise ValueError(f"optim.{name} must be in [0, 1), got {getattr(optim, name)}")


def check_numbers(fields: dict[str, Any]) -> None:
    """ValueError names the first field that is not finite, too large, or of the wrong sign."""
    for name, value in fields.items():
        numbers = value if isinstance(value, tuple | list) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ValueError(f"{name} must be finite, got {value}")
        if isinstance(value, int) and value > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST}, got {value}")
        if name in POSITIVE and value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
        if name in NOT_NEGATIVE and not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that determine the result, which a resumed run may not change; by their names on the command line."""
    flat = flatten(asdict(config))
    return {name: value for name, value in flat.items() if name not in MAY_CHANGE and name.split(".")[0] not in MAY_CHANGE}


def flatten(fields: dict[str, Any]) -> dict[str, Any]:
    """{"optim": {"lr": 1}} → {"optim.lr": 1}"""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= {f"{name}.{part}": x for part, x in flatten(value).items()} if isinstance(value, dict) else {name: value}
    return flat
