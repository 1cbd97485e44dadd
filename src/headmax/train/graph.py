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
        stream, graph = side_stream(torch.cuda.current_device()), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        # Batches are read, and put into pinned memory, by another thread.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = function(*places)
        return cls(graph, places, output)

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for place, x in zip(self.places, inputs, strict=True):
            place.copy_(x)
        self.graph.replay()
        return self.output


class Replayed:
    """A function of tensors that adds to the gradients of parameters and does nothing else.

    It is captured at its first call with inputs of such shapes: once to make gradients where there are none yet, and once to add to them.
    Its output is overwritten by the next call.
    """

    def __init__(self, function: Callable[..., Tensor], parameters: Iterable[Parameter]) -> None:
        self.function, self.parameters = function, list(parameters)
        self.gradients: list[tuple[Parameter, Tensor]] = []
        """Where all graphs have them."""
        self.captured: dict[tuple[bool, tuple[torch.Size, ...]], Captured] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, *inputs: Tensor) -> Tensor:
        first = all(p.grad is None for p in self.parameters)
        kind = first, tuple(x.shape for x in inputs)
        if kind not in self.captured:
            self.captured[kind] = self.capture(inputs, first)
        output = self.captured[kind](inputs)
        self.lend()
        return output

    def capture(self, inputs: tuple[Tensor, ...], first: bool) -> Captured:
        """The gradients' numbers stay as they are."""
        places = tuple(x.clone() for x in inputs)
        stream = side_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(REHEARSALS):
                self.drop()
                self.function(*places)
        torch.cuda.current_stream().wait_stream(stream)
        self.drop()
        if not first:
            self.lend()
        captured = Captured.of(self.whole if first else self.function, places, self.pool)
        self.drop()
        return captured

    def whole(self, *places: Tensor) -> Tensor:
        """Gradients that the first graph has made are where they are; those of other shapes are copied there."""
        output = self.function(*places)
        made = [(p, p.grad) for p in self.parameters if p.grad is not None]
        if not self.gradients:
            self.gradients = made
        else:
            assert [id(p) for p, _ in self.gradients] == [id(p) for p, _ in made]
            torch._foreach_copy_([gradient for _, gradient in self.gradients], [gradient for _, gradient in made])
        return output

    def lend(self) -> None:
        """The places that graphs have gradients at become the parameters', until somebody drops them."""
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
        output = self.captured(numbers)
        self.replayed.drop()
        return output

    def capture(self, numbers: tuple[Tensor, ...]) -> Captured:
        """The optimizer's settings stay as they are."""
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        for group in groups:
            group["capturable"] = True
        captured = Captured.of(self.function, tuple(x.clone() for x in numbers), self.replayed.pool)
        for group, old in zip(groups, before, strict=True):
            group.update(old)
        return captured
