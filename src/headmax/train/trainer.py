"""The training loop: gradients of a global batch, an optimizer step, metrics, checkpoints. A rerun resumes from the newest checkpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from headmax import durable
from headmax.data.source import Batch, Source
from headmax.models import HeadmaxConfig, HeadmaxForCausalLM
from headmax.ops import Packing
from headmax.train import checkpoint
from headmax.train.checkpoint import Checkpoints, ignore_single_process_warning
from headmax.train.config import TrainConfig, fixed_settings, flatten
from headmax.train.evaluate import balance, evaluate
from headmax.train.faults import Interrupted, NoMemory, StopSignals, TrainingError, check_device, check_peers, diagnose
from headmax.train.feed import Feed, count_targets, to
from headmax.train.graph import Replayed, ReplayedUpdate
from headmax.train.loading import CHAT_TEMPLATE, CHECKPOINTS, CONFIG, is_run
from headmax.train.metrics import Line, Log, matmul_rate, memory, summarize
from headmax.train.optim import build_optimizer, clip, learning_rate, step_unless
from headmax.train.parallel import World, graphed, join
from headmax.train.parallelize import Replica

logger = logging.getLogger("headmax")


class FitOptions(TypedDict, total=False):
    """Optional arguments of `fit`."""

    validation: Source | None
    tokenizer: Path | None
    start: Mapping[str, Tensor] | None
    show: Callable[[Line], None] | None


@contextlib.contextmanager
def training(
    model: HeadmaxConfig,
    config: TrainConfig,
    source: Source,
    out: Path,
    *,
    validation: Source | None = None,
    tokenizer: Path | None = None,
    start: Mapping[str, Tensor] | None = None,
    show: Callable[[Line], None] | None = None,
) -> Iterator[Trainer]:
    """A trainer for a new run, or resumed from the newest checkpoint in `out`; on every process of torchrun. See `fit`."""
    if source.vocab_size > model.vocab_size:
        raise ValueError(f"model.vocab_size is {model.vocab_size}, but the data has {source.vocab_size} tokens: give at least that many")
    if config.gate_balance > 0 and model.head_gate is None:
        raise ValueError(f"gate_balance is {config.gate_balance}, but the model has no head gates to balance: set it to 0")
    tokenizer_files = {} if tokenizer is None else read_tokenizer_files(tokenizer)
    with (
        join(config.device, config.parallel.context, config.parallel.tensor) as world,
        world.sole_user(out, RUN),
        preserve_rng(world.device),
        ignore_single_process_warning(),
    ):
        try:
            trainer = Trainer(model, config, source, validation, out, world, start or {}, show or (lambda line: None))
            if world.main:
                for name, text in tokenizer_files.items():
                    durable.write(out / name, text)
            try:
                yield trainer
            finally:
                trainer.close()
        except OSError as error:
            raise TrainingError(f"{out}: cannot continue training: {error}") from error
        except torch.OutOfMemoryError as error:
            raise NoMemory(config.compute, error) from error
        except RuntimeError as error:
            check_device(world.device, str(out))
            check_peers(error, world, str(out))
            raise


def fit(model: HeadmaxConfig, config: TrainConfig, source: Source, out: Path, **options: Unpack[FitOptions]) -> HeadmaxForCausalLM:
    """Trains a model, or resumes from the newest checkpoint in `out`. Under torchrun, call it on every process.

    Args:
        model: the model's configuration.
        config: the training settings.
        source: training samples, such as `TokenShards`.
        out: folder of the run.
        options: `validation`, held-out samples; `tokenizer`, a folder whose tokenizer.json is copied to the run; `start`, initial
            parameters by name; `show`, called with the metrics of every step, on the first rank.

    Returns:
        The trained model.

    Raises:
        Interrupted: after a signal, with everything saved.
        NoMemory: if a step does not fit into memory.
        DeviceLost: if the GPU fails.
        PeerLost: if another process has ended.
        TrainingError: if the run cannot continue.
    """
    with training(model, config, source, out, **options) as trainer:
        return trainer.run()


def read_tokenizer_files(folder: Path) -> dict[str, str]:
    """The texts of tokenizer.json and, if there is one, of the chat template, by file name."""
    names = ["tokenizer.json", *([CHAT_TEMPLATE] if (folder / CHAT_TEMPLATE).is_file() else [])]
    return {name: durable.read_text(folder / name) for name in names}


RUN = durable.Owner("a run of headmax train", is_run)


def preserve_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restores the caller's random state on exit."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


Timestamp = torch.cuda.Event | float
"""Of a device's clock."""


def timestamp(device: torch.device) -> Timestamp:
    """When the device has finished all work launched so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Timestamp, second: Timestamp) -> float:
    if isinstance(first, float) and isinstance(second, float):
        return second - first
    return first.elapsed_time(second) / 1e3  # type: ignore[union-attr, arg-type]


@dataclass
class PendingMetrics:
    """Metrics of a step, copied asynchronously and read one step later, so that nothing waits."""

    step: int
    lr: float
    values: Tensor
    """Loss, gradient norm, 1 if the step was skipped, and the number of ranks that received a signal."""
    copied: Timestamp

    @classmethod
    def start_copy(cls, step: int, lr: float, values: Tensor) -> PendingMetrics:
        device = values.device
        if values.is_cuda:
            values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        return cls(step, lr, values, timestamp(device))

    def read(self) -> list[float]:
        if isinstance(self.copied, torch.cuda.Event):
            self.copied.synchronize()
        return self.values.tolist()


class Trainer:
    def __init__(
        self,
        model: HeadmaxConfig,
        config: TrainConfig,
        source: Source,
        validation: Source | None,
        out: Path,
        world: World,
        start: Mapping[str, Tensor],
        show: Callable[[Line], None],
    ) -> None:
        self.config, self.source, self.validation, self.out, self.world, self.show = config, source, validation, out, world, show
        self.settings = json.loads(json.dumps({"model": model_settings(model), "train": fixed_settings(config), "data": source.identity}))
        self.feed = Feed(source, config, world)
        torch.manual_seed(config.seed)
        initial = HeadmaxForCausalLM(model)
        if unknown := initial.load_state_dict(start, strict=False).unexpected_keys:
            raise ValueError(f"start: {len(unknown)} names are not parameters of the model, such as {unknown[0]!r}")
        self.replica = Replica(initial, config, world)
        self.model = self.replica.model
        self.replayed = Replayed(self.add_gradients, self.model.parameters()) if graphed(config, world) else None
        self.optimizer = build_optimizer(self.model, config.optim)
        self.replayed_update = None if self.replayed is None else ReplayedUpdate(self.advance, self.optimizer, self.replayed)
        self.flops_per_token = 6 * sum(p.numel() for p in self.model.parameters())
        self.rate = matmul_rate(world.device) if world.main else None
        self.step, self.skipped, self.stop = 0, 0, False
        self.checkpoints = Checkpoints(out / CHECKPOINTS, config.checkpoint, world)
        self.resume()
        self.log = Log(out, config.log, self.step) if world.main else None
        if world.main:
            config_json = {"model": model.to_dict(), "train": asdict(config), "data": source.identity}
            durable.write(out / CONFIG, json.dumps(config_json, indent=2) + "\n")

    def run(self) -> HeadmaxForCausalLM:
        pending: PendingMetrics | None = None
        first, end = self.step, self.config.steps
        with StopSignals() as self.signals:
            self.clock = timestamp(self.world.device)
            for batches in self.feed.steps(first, end):
                loss = torch.zeros((), device=self.world.device)
                for micro_batch in self.micro_batches(batches):
                    loss += self.add_gradients(*micro_batch) if self.replayed is None else self.replayed(*micro_batch)
                if pending is not None:
                    self.log_step(pending)
                pending = self.update(loss / self.world.size)
                checkpoint_now = self.at_interval(self.config.checkpoint_every)
                if self.stop or self.step == end or checkpoint_now or self.at_interval(self.config.eval.every):
                    self.log_step(pending)  # may set self.stop
                    pending = None
                    if self.stop or checkpoint_now or (self.step == end and self.config.checkpoint.final):
                        self.save()
                if self.stop and self.step < end:
                    self.checkpoints.close()
                    raise Interrupted(self.signals.received or signal.SIGTERM, self.step)
        self.checkpoints.close()
        if self.world.main:
            summarize(self.out, self.world.device)
            logger.info("%s: finished %d steps; results in summary.json", self.out, self.step)
        return self.model

    def at_interval(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def micro_batches(self, batches: list[Batch]) -> Iterator[tuple[Any, ...]]:
        """The arguments of `add_gradients` for each micro-batch of this step. Gradients are averaged over ranks after the last one."""
        if any(batch.packing is not None for batch in batches):  # shapes differ from batch to batch
            self.replayed = self.replayed_update = None
        device = self.world.device
        items = self.world.sum(torch.full((), sum(map(count_targets, batches)), device=device, dtype=torch.float32)).clamp(min=1)
        for n, batch in enumerate(batches):
            ids, labels, *optional = to(batch, device)
            with self.replica.micro_step(last=n == len(batches) - 1):
                yield (ids, labels, items / self.world.size, *(optional if any(x is not None for x in optional) else ()))

    def add_gradients(
        self,
        input_ids: Tensor,
        labels: Tensor,
        items: Tensor,
        packing: Packing | None = None,
        position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Forward and backward of a micro-batch. Returns its share of the mean loss over `items` tokens."""
        context = {} if shift_labels is None else {"position_ids": position_ids, "shift_labels": shift_labels}
        balanced = self.config.gate_balance > 0
        with self.replica.autocast:
            output = self.replica.module(
                input_ids=input_ids, labels=labels, cu_seqlens=packing, num_items_in_batch=items, return_gates=balanced, **context
            )
        objective = output.loss
        if balanced:
            share = input_ids.numel() * self.world.data_size / self.config.batch_tokens
            objective = objective + self.config.gate_balance * share * balance(output.gates)
        objective.backward()
        return output.loss.detach()

    def update(self, loss: Tensor) -> PendingMetrics:
        lr = learning_rate(self.config, self.step * self.config.batch_tokens)
        stops, self.step = torch.full((), float(self.signals.received is not None), device=loss.device), self.step + 1
        if self.replayed_update is None:
            return PendingMetrics.start_copy(self.step, lr, self.advance(loss, stops, lr))
        return PendingMetrics.start_copy(self.step, lr, self.replayed_update(loss, stops, torch.full_like(loss, lr)))

    def advance(self, loss: Tensor, stops: Tensor, lr: float | Tensor) -> Tensor:
        """One optimizer step, skipped if the loss or gradient is not finite on any rank. Returns the values of `PendingMetrics`."""
        norm = clip(self.model, self.config.optim.grad_clip)
        loss, stops = self.world.sum(torch.stack([loss, stops])).unbind()
        skip = 1.0 - (loss.isfinite() & norm.isfinite()).float()
        step_unless(self.optimizer, skip, lr)
        return torch.stack([loss, norm, skip, stops])

    def log_step(self, pending: PendingMetrics) -> None:
        """Writes a step's metrics, with validation where it is time. Sets `stop` after a signal; raises after too many skipped steps."""
        loss, norm, skipped, stops = pending.read()
        seconds, tokens = seconds_between(self.clock, pending.copied), self.config.batch_tokens
        self.clock = pending.copied
        self.stop = self.stop or stops > 0
        line: Line = {"step": pending.step, "loss": loss, "grad_norm": norm, "lr": pending.lr, "tokens": pending.step * tokens}
        line |= {"skipped": skipped > 0, "time": time.time(), "seconds": seconds, "tokens_per_s": tokens / seconds}
        line |= {"memory": memory(self.world.device)}
        if self.rate is not None:
            line["mfu"] = self.flops_per_token * tokens / seconds / self.rate / self.world.size
        every = self.config.eval.every
        if every and (pending.step % every == 0 or pending.step == self.config.steps):
            line |= self.evaluate()
            self.clock = timestamp(self.world.device)
        if self.log is not None:
            self.log.write(line)
            self.show(line)
        self.skipped += int(skipped)
        if skipped and self.skipped >= self.config.max_skipped_steps:
            cause = self.diagnose(pending.step)
            raise TrainingError(f"stopped at step {pending.step}: {self.skipped} steps were skipped (max_skipped_steps); {cause}")

    def diagnose(self, step: int) -> str:
        """Recomputes a step's gradients, without CUDA graphs, to find out where they stop being finite."""
        batches = self.feed.read(step - 1)
        self.optimizer.zero_grad()
        self.replayed = self.replayed_update = None
        return diagnose(self.model, lambda: [self.add_gradients(*arguments) for arguments in self.micro_batches(batches)], self.world)

    def evaluate(self) -> Line:
        """Validation and gate health. Without validation data, gate health is measured on the first training sequences."""
        scores, gates = evaluate(self.replica, self.validation or self.source, self.config, self.world)
        return ({"validation": scores} if self.validation else {}) | ({"gates": gates} if gates else {})

    def state(self) -> dict[str, Any]:
        """Checkpoint contents: identical on any number of ranks, except for the random states."""
        model, optimizer = get_state_dict(self.replica.module, self.optimizer)
        return {"model": model, "optimizer": optimizer, f"rng_{self.world.rank}": rng_state(self.world.device)}

    def save(self) -> None:
        if self.log is not None:
            self.log.sync()
        tokens, samples = self.step * self.config.batch_tokens, self.step * self.config.batch_size
        position = {"step": self.step, "tokens": tokens, "samples": samples, "skipped": self.skipped, "ranks": self.world.size}
        self.checkpoints.save(self.step, self.state(), position | {"settings": self.settings})
        self.clock = timestamp(self.world.device)

    def resume(self) -> None:
        """Resumes from the newest complete checkpoint, if there is one; its settings must match."""
        folder = self.checkpoints.newest()
        if folder is None:
            return
        progress = checkpoint.read_progress(folder)
        refuse_changes(progress["settings"], self.settings, self.out)
        state, saved, rng = self.state(), checkpoint.state_keys(folder), f"rng_{self.world.rank}"
        # The checkpoint may come from fewer ranks, or from a CPU.
        state[rng] = {name: x for name, x in state[rng].items() if f"{rng}.{name}" in saved}
        checkpoint.load(folder, state, single_process=self.world.size == 1, group=self.checkpoints.group)
        set_state_dict(self.replica.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        restore_rng(state[rng], self.world.device)
        self.step, self.skipped = progress["step"], progress["skipped"]
        if self.world.main:
            logger.info("%s: resumed from step %d", self.out, self.step)

    def close(self) -> None:
        self.replayed = self.replayed_update = None  # bound methods keep the trainer, and with it the optimizer, alive
        self.model.model.set_context_group(None)
        if self.log is not None:
            self.log.close()
        self.checkpoints.background.shutdown()


def model_settings(model: HeadmaxConfig) -> dict[str, Any]:
    """The fields of a model that a resumed run may not change."""
    inert = {"backend", "use_cache"}
    return flatten({name: value for name, value in model.to_dict().items() if name in HeadmaxConfig.__annotations__ and name not in inert})


def refuse_changes(saved: dict[str, dict[str, Any]], current: dict[str, dict[str, Any]], out: Path) -> None:
    """ValueError lists the settings that differ from those of the checkpoint."""
    prefixes = {"model": "model.", "train": "", "data": "the data's "}
    model, defaults = saved["model"], fixed_settings(TrainConfig())  # older checkpoints lack newer fields: these had their defaults
    saved = saved | {"model": {name: model.get(name, getattr(HeadmaxConfig, name, None)) for name in {*model, *current["model"]}}}
    saved["train"] = json.loads(json.dumps(defaults)) | saved["train"]
    changed = [
        f"{prefix}{name} was {saved[part].get(name)!r}, is {current[part].get(name)!r}"
        for part, prefix in prefixes.items()
        for name in sorted({*saved[part], *current[part]})
        if saved[part].get(name) != current[part].get(name)
    ]
    if changed:
        raise ValueError(f"{out} holds a run with other settings: {'; '.join(changed)}. Restore them, or choose another --out")


def rng_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_rng(states: dict[str, Tensor], device: torch.device) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
