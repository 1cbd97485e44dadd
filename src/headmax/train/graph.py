"""Forward and backward of a micro-batch as one CUDA graph, and the optimizer step as another: the time of small models is then that of
their kernels, not of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from headmax.models.decoding import side_stream

WARMUP_CALLS = 2
"""Calls before a capture, which compile kernels and initialise libraries."""


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor

    @classmethod
    def of(cls, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], pool: Any) -> Captured:
        stream, graph = side_stream(torch.cuda.current_device()), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        # Another thread reads batches into pinned memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = function(*inputs)
        return cls(graph, inputs, output)

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for static, x in zip(self.inputs, inputs, strict=True):
            static.copy_(x)
        self.graph.replay()
        return self.output


class Replayed:
    """A function of tensors whose only side effect is to accumulate gradients of parameters, as CUDA graphs.

    One graph per input shapes creates the gradients, another accumulates into them; each is captured at its first call. The next call
    overwrites the output.
    """

    def __init__(self, function: Callable[..., Tensor], parameters: Iterable[Parameter]) -> None:
        self.function, self.parameters = function, list(parameters)
        self.gradients: list[tuple[Parameter, Tensor]] = []
        """The tensors all graphs write to."""
        self.captured: dict[tuple[bool, tuple[torch.Size, ...]], Captured] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, *inputs: Tensor) -> Tensor:
        first = all(p.grad is None for p in self.parameters)
        kind = first, tuple(x.shape for x in inputs)
        if kind not in self.captured:
            self.captured[kind] = self.capture(inputs, first)
        output = self.captured[kind](inputs)
        self.attach()
        return output

    def capture(self, inputs: tuple[Tensor, ...], first: bool) -> Captured:
        """Leaves the values of the gradients unchanged."""
        static = tuple(x.clone() for x in inputs)
        stream = side_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_CALLS):
                self.detach()
                self.function(*static)
        torch.cuda.current_stream().wait_stream(stream)
        self.detach()
        if not first:
            self.attach()
        captured = Captured.of(self.create_gradients if first else self.function, static, self.pool)
        self.detach()
        return captured

    def create_gradients(self, *static: Tensor) -> Tensor:
        """The first graph's gradients become `gradients`; graphs of other input shapes copy theirs there."""
        output = self.function(*static)
        created = [(p, p.grad) for p in self.parameters if p.grad is not None]
        if not self.gradients:
            self.gradients = created
        else:
            assert [id(p) for p, _ in self.gradients] == [id(p) for p, _ in created]
            torch._foreach_copy_([gradient for _, gradient in self.gradients], [gradient for _, gradient in created])
        return output

    def attach(self) -> None:
        """Makes `gradients` the parameters' gradients."""
        self.detach()
        for p, gradient in self.gradients:
            p.grad = gradient

    def detach(self) -> None:
        for p in self.parameters:
            p.grad = None


class ReplayedUpdate:
    """A function of scalars on the device that ends with an optimizer step on the gradients of `replayed`, as a CUDA graph.

    The first calls run eagerly and initialise the optimizer's state. The next call overwrites the output.
    """

    def __init__(self, function: Callable[..., Tensor], optimizer: Optimizer, replayed: Replayed) -> None:
        self.function, self.optimizer, self.replayed = function, optimizer, replayed
        self.calls = 0
        self.captured: Captured | None = None

    def __call__(self, *scalars: Tensor) -> Tensor:
        self.calls += 1
        if self.calls <= WARMUP_CALLS:
            return self.function(*scalars)
        if self.captured is None:
            self.captured = self.capture(scalars)
        output = self.captured(scalars)
        self.replayed.detach()
        return output

    def capture(self, scalars: tuple[Tensor, ...]) -> Captured:
        """Leaves the optimizer's settings unchanged."""
        groups = self.optimizer.param_groups
        saved = [dict(group) for group in groups]
        for group in groups:
            group["capturable"] = True
        captured = Captured.of(self.function, tuple(x.clone() for x in scalars), self.replayed.pool)
        for group, old in zip(groups, saved, strict=True):
            group.update(old)
        return captured
