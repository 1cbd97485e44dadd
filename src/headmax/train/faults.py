"""What can go wrong, said clearly: signals, numbers that are not finite, and everything else that stops a run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headmax.train.config import ComputeConfig
from headmax.train.optim import whole
from headmax.train.parallel import World


class TrainingError(RuntimeError):
    """Why a run could not go on, in one line for whoever started it."""

    exit_status = 1


class NoMemory(RuntimeError):
    """A step did not fit: not the model's doing, but that of how it is computed."""

    exit_status = 1

    def __init__(self, compute: ComputeConfig, error: torch.OutOfMemoryError) -> None:
        ways = f"a smaller --compute.micro-batch ({compute.micro_batch} sequences at once)"
        ways += "" if compute.activation_checkpointing else ", --compute.activation-checkpointing"
        super().__init__(f"a step does not fit: give {ways}, or on several GPUs --parallel.strategy fsdp. {str(error).splitlines()[0]}")


class DeviceLost(RuntimeError):
    """The GPU answers this process with errors alone from now on; another process may use it."""

    exit_status = 1


def check_device(device: torch.device, during: str) -> None:
    """DeviceLost where every call to a GPU fails, as after an illegal address or a failed launch, but not after a lack of memory."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLost(f"{during}: {str(error).splitlines()[0]}; what was done is kept, rerun to resume") from error


class Interrupted(Exception):
    """A signal stopped the run; its state is saved."""

    def __init__(self, received: signal.Signals, step: int) -> None:
        super().__init__(f"{received.name}: saved at step {step}; the same command goes on from there")
        self.exit_status = 128 + received


class StopSignals:
    """SIGTERM and SIGINT ask for a stop after the step. Ten seconds later they have their usual effect again; until then they
    may be echoes, as torchrun passes on what its processes have already heard from a terminal or a scheduler."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.since = 0.0
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self.since = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self.since > 10:
            self.__exit__()
            signal.raise_signal(number)


def diagnose(model: nn.Module, compute: Callable[[], object], world: World) -> str:
    """Computes a step's gradients again, watching: the first activation and the gradient nearest to the loss that are not finite."""
    seen: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            bad = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point() and not x.isfinite().all()]
            if bad and not seen:
                seen.append(f"the first activation is the output of {name}, {int((~bad[0].isfinite()).sum())} of {bad[0].numel()} values")

        return hook

    parameters = [name for name, p in model.named_parameters() if not whole(p).isfinite().all()]
    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    with torch.compiler.set_stance("force_eager"):  # inside compiled blocks no hook is called
        compute()
    for handle in hooks:
        handle.remove()
    gradients = [name for name, p in model.named_parameters() if p.grad is not None and not whole(p.grad).isfinite().all()]
    model.zero_grad()
    activations = [text for texts in world.gather(seen) for text in texts]
    findings = [f"{len(parameters)} parameters, first {parameters[0]}"] if parameters else []
    findings += activations[:1]
    findings += [f"the gradients of {len(gradients)} parameters, nearest to the loss {gradients[-1]}"] if gradients else []
    return "not finite: " + ("; ".join(findings) or "nothing when computed again")
