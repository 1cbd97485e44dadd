"""Which parts of a block run fused: decided once per forward pass of the model, by one rule, and handed down."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Fusion(NamedTuple):
    """The parts of a block whose weights go straight into fused ops; the others are called as modules."""

    norms: bool = False
    """The norms before mixer and MLP, each together with the residual stream."""
    mixer: bool = False
    """The mixer's projections, convolutions and output norm."""
    mlp: bool = False
    step: bool = False
    """All of it, as five kernels for one token of each sequence."""


def intact(*modules: nn.Module | None, kind: type[nn.Module] = nn.Linear, bias: bool = False) -> bool:
    """Whether modules are as they were built, so that their weights may be read without calling them.

    An adapter in a module's place (LoRA), a quantised weight, a hook, or a bias unless that is read too, must be called.
    """
    for module in modules:
        if type(module) is not kind:
            return False
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return False
        for name, parameter in module._parameters.items():
            if name == "bias" and parameter is not None and not bias:
                return False
            if name == "weight" and type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor):
                return False
    return True


def fusion_enabled(fused: bool | None, backend: str, x: Tensor) -> bool:
    """What `fused` says; None means where kernels run."""
    if fused is not None:
        return fused
    return backend == "triton" or (backend == "auto" and x.is_cuda)
