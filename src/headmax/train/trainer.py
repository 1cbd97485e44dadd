"""The loop: gradients of a global batch, one step, numbers, checkpoints; and on from the last checkpoint when started again."""

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
from headmax.train.checkpoint import Checkpoints, one_process_is_meant
from headmax.train.config import TrainConfig, decisive, flatten
from headmax.train.evaluate import balance, evaluate
from headmax.train.faults import Interrupted, NoMemory, StopSignals, TrainingError, check_device, diagnose
from headmax.train.feed import Feed, predicted, to
from headmax.train.graph import Replayed, ReplayedUpdate
from headmax.train.loading import CHAT_TEMPLATE, CHECKPOINTS, CONFIG, is_run
from headmax.train.metrics import Line, Log, matmul_rate, memory, summarize
from headmax.train.optim import build_optimizer, clip, learning_rate, step_unless
from headmax.train.parallel import World, graphed, join
from headmax.train.parallelize import Replica

logger = logging.getLogger("headmax")


class FitOptions(TypedDict, total=False):
    """What `fit` may be given beside what it needs."""

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
    """A trainer at the start of a run, or at the newest checkpoint in `out`; under torchrun, on all its processes. See `fit`."""
    if source.vocab_size > model.vocab_size:
        raise ValueError(f"model.vocab_size is {model.vocab_size}, but the data has {source.vocab_size} tokens: give at least as many")
    if config.gate_balance > 0 and model.head_gate is None:
        raise ValueError(f"gate_balance is {config.gate_balance}, but the model has no head gates")
    words = {} if tokenizer is None else {"tokenizer.json": durable.read_text(tokenizer / "tokenizer.json")}
    if tokenizer is not None and (tokenizer / CHAT_TEMPLATE).is_file():
        words[CHAT_TEMPLATE] = durable.read_text(tokenizer / CHAT_TEMPLATE)
    with (
        join(config.device, config.parallel.context, config.parallel.tensor) as world,
        world.sole_user(out, RUN),
        own_randomness(world.device),
        one_process_is_meant(),
    ):
        try:
            trainer = Trainer(model, config, source, validation, out, world, start or {}, show or (lambda line: None))
            for name, text in words.items() if world.main else ():
                durable.write(out / name, text)
            try:
                yield trainer
            finally:
                trainer.close()
        except OSError as error:
            raise TrainingError(f"cannot go on with {out}: {error}") from error
        except torch.OutOfMemoryError as error:
            raise NoMemory(config.compute, error) from error
        except RuntimeError:
            check_device(world.device, str(out))
            raise


def fit(model: HeadmaxConfig, config: TrainConfig, source: Source, out: Path, **options: Unpack[FitOptions]) -> HeadmaxForCausalLM:
    """Trains a model of this configuration from its start, or from the newest checkpoint in `out`; under torchrun, on all its processes.

    `tokenizer` is a folder whose tokenizer.json goes with the run; `start` are parameters by name that take the place of random ones;
    `show` gets every step's line of metrics, on the first rank.
    Raises `Interrupted` after a signal, with all saved, `NoMemory` where a step does not fit, `DeviceLost` where the GPU fails, and
    `TrainingError` where the run cannot go on.
    """
    with training(model, config, source, out, **options) as trainer:
        return trainer.run()


RUN = durable.Owner("a run of headmax train", is_run)


def own_randomness(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The caller's random numbers go on afterwards as if nothing had been drawn."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


Moment = torch.cuda.Event | float
"""On the clock of a device."""


def now(device: torch.device) -> Moment:
    """When the device has done all that was launched."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Moment, second: Moment) -> float:
    if isinstance(first, float) and isinstance(second, float):
        return second - first
    return first.elapsed_time(second) / 1e3  # type: ignore[union-attr, arg-type]


@dataclass
class Pending:
    """Numbers of a step on their way from the device: read a step later, they keep nothing waiting."""

    step: int
    lr: float
    numbers: Tensor
    """Loss, norm of the gradient, whether the step was skipped, and how many ranks a signal stopped."""
    done: Moment
    """When they are there."""

    @classmethod
    def send(cls, step: int, lr: float, numbers: Tensor) -> Pending:
        device = numbers.device
        if numbers.is_cuda:
            numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
        return cls(step, lr, numbers, now(device))

    def read(self) -> list[float]:
        if isinstance(self.done, torch.cuda.Event):
            self.done.synchronize()
        return self.numbers.tolist()


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
        self.settings = json.loads(json.dumps({"model": describe(model), "train": decisive(config), "data": source.identity}))
        self.feed = Feed(source, config, world)
        torch.manual_seed(config.seed)
        built = HeadmaxForCausalLM(model)
        if unknown := built.load_state_dict(start, strict=False).unexpected_keys:
            raise ValueError(f"start: the model has no parameter {unknown[0]!r}, one of {len(unknown)}")
        self.replica = Replica(built, config, world)
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
        pending: Pending | None = None
        first, end = self.step, self.config.steps
        with StopSignals() as self.signals:
            self.clock = now(self.world.device)
            for batches in self.feed.steps(first, end):
                loss = torch.zeros((), device=self.world.device)
                for micro_batch in self.micro_batches(batches):
                    loss += self.add_gradients(*micro_batch) if self.replayed is None else self.replayed(*micro_batch)
                if pending is not None:
                    self.finish(pending)
                pending = self.update(loss / self.world.size)
                if self.stop or self.step == end or self.due(self.config.checkpoint_every) or self.due(self.config.eval.every):
                    self.finish(pending)
                    pending = None
                    done = self.step == end and self.config.checkpoint.final
                    if self.stop or done or self.due(self.config.checkpoint_every):
                        self.save()
                if self.stop and self.step < end:
                    self.checkpoints.close()
                    raise Interrupted(self.signals.received or signal.SIGTERM, self.step)
        self.checkpoints.close()
        if self.world.main:
            summarize(self.out, self.world.device)
            logger.info("%s: %d steps, summary.json has the numbers", self.out, self.step)
        return self.model

    def due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def micro_batches(self, batches: list[Batch]) -> Iterator[tuple[Any, ...]]:
        """The arguments of `add_gradients` for each part of this step's global batch. Gradients are averaged over ranks after the last."""
        if any(batch.packing is not None for batch in batches):  # no two have the same shapes
            self.replayed = self.replayed_update = None
        device = self.world.device
        items = self.world.sum(torch.full((), sum(map(predicted, batches)), device=device, dtype=torch.float32)).clamp(min=1)
        for n, batch in enumerate(batches):
            ids, labels, *others = to(batch, device)
            with self.replica.micro_step(last=n == len(batches) - 1):
                yield (ids, labels, items / self.world.size, *(others if any(x is not None for x in others) else ()))

    def add_gradients(
        self,
        input_ids: Tensor,
        labels: Tensor,
        items: Tensor,
        packing: Packing | None = None,
        position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Forward and backward of a micro-batch; its loss, a part of the mean over `items`."""
        piece = {} if shift_labels is None else {"position_ids": position_ids, "shift_labels": shift_labels}
        balanced = self.config.gate_balance > 0
        with self.replica.autocast:
            output = self.replica.module(
                input_ids=input_ids, labels=labels, cu_seqlens=packing, num_items_in_batch=items, return_gates=balanced, **piece
            )
        objective = output.loss
        if balanced:
            share = input_ids.numel() * self.world.data_size / self.config.batch_tokens
            objective = objective + self.config.gate_balance * share * balance(output.gates)
        objective.backward()
        return output.loss.detach()

    def update(self, loss: Tensor) -> Pending:
        lr = learning_rate(self.config, self.step * self.config.batch_tokens)
        stops, self.step = torch.full((), float(self.signals.received is not None), device=loss.device), self.step + 1
        if self.replayed_update is None:
            return Pending.send(self.step, lr, self.advance(loss, stops, lr))
        return Pending.send(self.step, lr, self.replayed_update(loss, stops, torch.full_like(loss, lr)))

    def advance(self, loss: Tensor, stops: Tensor, lr: float | Tensor) -> Tensor:
        """One optimizer step, unless loss or gradient is not finite on some rank; the numbers of `Pending`."""
        norm = clip(self.model, self.config.optim.grad_clip)
        loss, stops = self.world.sum(torch.stack([loss, stops])).unbind()
        skip = 1.0 - (loss.isfinite() & norm.isfinite()).float()
        step_unless(self.optimizer, skip, lr)
        return torch.stack([loss, norm, skip, stops])

    def finish(self, pending: Pending) -> None:
        """Reads a step's numbers, writes its line, and judges: stop on a signal, or after too many skipped steps."""
        loss, norm, skipped, stops = pending.read()
        seconds, tokens = seconds_between(self.clock, pending.done), self.config.batch_tokens
        self.clock = pending.done
        self.stop = self.stop or stops > 0
        line: Line = {"step": pending.step, "loss": loss, "grad_norm": norm, "lr": pending.lr, "tokens": pending.step * tokens}
        line |= {"skipped": skipped > 0, "time": time.time(), "seconds": seconds, "tokens_per_s": tokens / seconds}
        line |= {"memory": memory(self.world.device)}
        if self.rate is not None:
            line["mfu"] = self.flops_per_token * tokens / seconds / self.rate / self.world.size
        every = self.config.eval.every
        if every and (pending.step % every == 0 or pending.step == self.config.steps):
            line |= self.measure()
            self.clock = now(self.world.device)
        if self.log is not None:
            self.log.write(line)
            self.show(line)
        self.skipped += int(skipped)
        if skipped and self.skipped >= self.config.max_skipped_steps:
            again = self.feed.read(pending.step - 1)
            self.optimizer.zero_grad()
            self.replayed = self.replayed_update = None
            found = diagnose(
                self.model, lambda: sum(self.add_gradients(*x) for x in self.micro_batches(again)) / self.world.size, self.world
            )
            raise TrainingError(f"stopped at step {pending.step}: {self.skipped} steps were skipped (max_skipped_steps); {found}")

    def measure(self) -> Line:
        """Validation and gate health; without held-out data the gates are looked at on the first training sequences."""
        found, gates = evaluate(self.replica, self.validation or self.source, self.config, self.world)
        return ({"validation": found} if self.validation else {}) | ({"gates": gates} if gates else {})

    def state(self) -> dict[str, Any]:
        """All that a checkpoint holds beside the run's position: the same on any number of ranks, but for their random numbers."""
        model, optimizer = get_state_dict(self.replica.module, self.optimizer)
        return {"model": model, "optimizer": optimizer, f"rng_{self.world.rank}": rng_state(self.world.device)}

    def save(self) -> None:
        if self.log is not None:
            self.log.sync()
        tokens, samples = self.step * self.config.batch_tokens, self.step * self.config.batch_size
        position = {"step": self.step, "tokens": tokens, "samples": samples, "skipped": self.skipped, "ranks": self.world.size}
        self.checkpoints.save(self.step, self.state(), position | {"settings": self.settings})
        self.clock = now(self.world.device)

    def resume(self) -> None:
        """On from the newest whole checkpoint, if there is one that this run's settings continue."""
        folder = self.checkpoints.newest()
        if folder is None:
            return
        progress = checkpoint.progress_of(folder)
        refuse_changes(progress["settings"], self.settings, self.out)
        state, there, random = self.state(), checkpoint.keys(folder), f"rng_{self.world.rank}"
        # There may have been fewer ranks, or no GPU.
        state[random] = {name: x for name, x in state[random].items() if f"{random}.{name}" in there}
        checkpoint.load(folder, state, alone=self.world.size == 1, group=self.checkpoints.group)
        set_state_dict(self.replica.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        restore_rng(state[random], self.world.device)
        self.step, self.skipped = progress["step"], progress["skipped"]
        if self.world.main:
            logger.info("%s: on from step %d", self.out, self.step)

    def close(self) -> None:
        self.replayed = self.replayed_update = None  # they hold the trainer, and with it the optimizer
        self.model.model.set_context_group(None)
        if self.log is not None:
            self.log.close()
        self.checkpoints.sealer.shutdown()


def describe(model: HeadmaxConfig) -> dict[str, Any]:
    """The fields that make a model what it is."""
    inert = {"backend", "use_cache"}
    return flatten({name: value for name, value in model.to_dict().items() if name in HeadmaxConfig.__annotations__ and name not in inert})


def refuse_changes(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]], out: Path) -> None:
    """Raises where a run would go on as another one."""
    names = {"model": "model.", "train": "", "data": "the data's "}
    model, defaults = before["model"], decisive(TrainConfig())  # a field that a later version added has had its default
    before = before | {"model": {name: model.get(name, getattr(HeadmaxConfig, name, None)) for name in {*model, *now["model"]}}}
    before["train"] = json.loads(json.dumps(defaults)) | before["train"]
    changed = [
        f"{prefix}{name} was {before[part].get(name)!r}, is {now[part].get(name)!r}"
        for part, prefix in names.items()
        for name in sorted({*before[part], *now[part]})
        if before[part].get(name) != now[part].get(name)
    ]
    if changed:
        raise ValueError(f"{out} holds a run with other settings: {'; '.join(changed)}. Give them as they were, or another --out")


def rng_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_rng(states: dict[str, Tensor], device: torch.device) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
