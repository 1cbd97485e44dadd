"""Forward and backward of a micro-batch as one CUDA graph, and the optimizer's step as another: a small model then takes as long as its
kernels, not as their launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

REHEARSALS = 2
"""Calls before a capture, in which kernels are compiled and libraries set up."""


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """One for all captures: matrix libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    places: tuple[Tensor, ...]
    output: Tensor

    @classmethod
    def of(cls, function: Callable[..., Tensor], places: tuple[Tensor, ...], pool: Any) -> Captured:
        beside, graph = side_stream(torch.cuda.current_device()), torch.cuda.CUDAGraph()
        beside.wait_stream(torch.cuda.current_stream())
        # Batches are read, and put into pinned memory, by another thread.
        with torch.cuda.graph(graph, pool=pool, stream=beside, capture_error_mode="thread_local"):
            output = function(*places)
        return cls(graph, places, output)

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for place, x in zip(self.places, inputs, strict=True):
            place.copy_(x)
        self.graph.replay()
        return self.output


class Replayed:
    """A function of tensors that adds to the gradients of parameters and does nothing else.

    It is captured at its first call with inputs of such shapes. Its output is overwritten by the next call.
    """

    def __init__(self, function: Callable[..., Tensor], parameters: Iterable[Parameter]) -> None:
        self.function, self.parameters = function, list(parameters)
        self.gradients: list[tuple[Parameter, Tensor]] = []
        self.captured: dict[tuple[torch.Size, ...], Captured] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, *inputs: Tensor) -> Tensor:
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self.captured:
            self.captured[shapes] = self.capture(inputs)
        if all(p.grad is None for p in self.parameters):
            torch._foreach_zero_([gradient for _, gradient in self.gradients])
            self.lend()
        return self.captured[shapes](inputs)

    def capture(self, inputs: tuple[Tensor, ...]) -> Captured:
        """Gradients that are there already stay as they are."""
        places, before = tuple(x.clone() for x in inputs), [p.grad for p in self.parameters]
        beside = side_stream(torch.cuda.current_device())
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self.drop()
            for _ in range(REHEARSALS):
                self.function(*places)
        torch.cuda.current_stream().wait_stream(beside)
        if not self.gradients:
            self.gradients = [(p, torch.zeros_like(p)) for p in self.parameters if p.grad is not None]
        assert [id(p) for p, _ in self.gradients] == [id(p) for p in self.parameters if p.grad is not None]
        self.lend()
        captured = Captured.of(self.function, places, self.pool)
        for p, gradient in zip(self.parameters, before, strict=True):
            p.grad = gradient
        return captured

    def lend(self) -> None:
        """The places that graphs add to become the parameters' gradients, until somebody drops them."""
        self.drop()
        for p, gradient in self.gradients:
            p.grad = gradient

    def drop(self) -> None:
        for p in self.parameters:
            p.grad = None


class ReplayedUpdate:
    """A function of numbers on the device that steps an optimizer by the gradients of `replayed`, and drops them, at the end.

    The first calls are made as they are, which sets up the optimizer's state. Its output is overwritten by the next call.
    """

    def __init__(self, function: Callable[..., Tensor], optimizer: Optimizer, replayed: Replayed) -> None:
        self.function, self.optimizer, self.replayed = function, optimizer, replayed
        self.calls = 0
        self.captured: Captured | None = None

    def __call__(self, *numbers: Tensor) -> Tensor:
        self.calls += 1
        if self.calls <= REHEARSALS:
            return self.function(*numbers)
        if self.captured is None:
            self.captured = self.capture(numbers)
        return self.captured(numbers)

    def capture(self, numbers: tuple[Tensor, ...]) -> Captured:
        """Gradients are zeroed where they are, for the next step to add to; the optimizer's settings stay as they are."""
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        for group in groups:
            group["capturable"] = True

        def whole(*numbers: Tensor) -> Tensor:
            output = self.function(*numbers)
            torch._foreach_zero_([gradient for _, gradient in self.replayed.gradients])
            return output

        captured = Captured.of(whole, tuple(x.clone() for x in numbers), self.replayed.pool)
        for group, old in zip(groups, before, strict=True):
            group.update(old)
        self.replayed.lend()
        return captured
