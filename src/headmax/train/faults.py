"""What stops a run: signals, NaN or Inf, and errors, each with a message that says what to do."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headmax.train.config import ComputeConfig
from headmax.train.optim import full_tensor
from headmax.train.parallel import World


class TrainingError(RuntimeError):
    """Why a run cannot continue, in one line for its user."""

    exit_status = 1


class NoMemory(RuntimeError):
    """A step did not fit into the GPU's memory; other compute settings may."""

    exit_status = 1

    def __init__(self, compute: ComputeConfig, error: torch.OutOfMemoryError) -> None:
        ways = f"a smaller --compute.micro-batch (now {compute.micro_batch})"
        if not compute.activation_checkpointing:
            ways += ", --compute.activation-checkpointing"
        ways += ", or on several GPUs --parallel.strategy fsdp"
        super().__init__(f"a step does not fit into memory: try {ways}. {str(error).splitlines()[0]}")


class DeviceLost(RuntimeError):
    """Every further call of this process to the GPU will fail; a new process can use it again."""

    exit_status = 1


def check_device(device: torch.device, during: str) -> None:
    """DeviceLost if every call to the GPU fails, as after an illegal address or a failed launch, but not after running out of memory."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLost(f"{during}: {str(error).splitlines()[0]}; completed work is saved, rerun to resume") from error


class PeerLost(RuntimeError):
    """Another process of the job has ended, so that this one cannot go on."""

    exit_status = 1


def check_peers(error: RuntimeError, world: World, during: str) -> None:
    """PeerLost if `error` is that of a message to another process, as when that one was killed or its machine is gone."""
    if world.size > 1 and (isinstance(error, dist.DistError) or "gloo/transport" in str(error)):
        cause = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0]  # without the place in gloo's source and its advice
        why = f"rank {world.rank} lost its connection to another process, which may have been killed ({cause})"
        raise PeerLost(f"{during}: {why}; completed work is saved, rerun to resume") from error


class Interrupted(Exception):
    """A signal stopped the run; its state is saved."""

    def __init__(self, received: signal.Signals, step: int) -> None:
        super().__init__(f"{received.name}: saved at step {step}; rerun the same command to resume")
        self.exit_status = 128 + received


class StopSignals:
    """Turns SIGTERM and SIGINT into a request to stop after the step.

    A second signal has its usual effect only after ten seconds: until then it may be a duplicate, as torchrun forwards signals that
    its processes have already received from the terminal or scheduler.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.since = 0.0
        self.previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self.previous = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self.since = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self.since > 10:
            self.__exit__()
            signal.raise_signal(number)


def diagnose(model: nn.Module, compute: Callable[[], object], world: World) -> str:
    """Calls `compute`, which repeats a step's gradients, and names the first activation and the gradient nearest to the loss not finite."""
    seen: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            bad = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point() and not x.isfinite().all()]
            if bad and not seen:
                seen.append(f"the first activation is the output of {name}, {int((~bad[0].isfinite()).sum())} of {bad[0].numel()} values")

        return hook

    parameters = [name for name, p in model.named_parameters() if not full_tensor(p).isfinite().all()]
    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    with torch.compiler.set_stance("force_eager"):  # compiled blocks do not call hooks
        compute()
    for handle in hooks:
        handle.remove()
    gradients = [name for name, p in model.named_parameters() if p.grad is not None and not full_tensor(p.grad).isfinite().all()]
    model.zero_grad()
    activations = [text for texts in world.gather(seen) for text in texts]
    findings = [f"{len(parameters)} parameters, first {parameters[0]}"] if parameters else []
    findings += activations[:1]
    findings += [f"the gradients of {len(gradients)} parameters, nearest to the loss {gradients[-1]}"] if gradients else []
    return "not finite: " + ("; ".join(findings) or "nothing, when the step was recomputed")
