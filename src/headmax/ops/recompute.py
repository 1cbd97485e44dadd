"""Cheap work that a compiled backward pass does over again, so that its result need not be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


@torch.compiler.assume_constant_result
def _exporting() -> bool:
    """Asked outside the trace: inside it, torch 2.11 always says yes."""
    return torch.compiler.is_exporting()


def in_training_graph() -> bool:
    """Whether a compiler traces what will be differentiated."""
    return torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled() and not _exporting()


def recomputed(function: Callable[..., T], *tensors: Tensor | None) -> T:
    """function(*tensors), elementwise or nearly so. Only a compiled graph computes it again; eagerly its consumer keeps it anyway."""
    if in_training_graph():
        return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    return function(*tensors)
