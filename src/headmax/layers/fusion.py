"""Which parts of a block run fused: one rule, applied once per forward pass of the model; the result is passed down."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Fusion(NamedTuple):
    """Parts of a block whose weights go directly into fused ops; the others are called as modules."""

    norms: bool = False
    """The norms before mixer and MLP, each with the residual addition."""
    mixer: bool = False
    """The mixer's projections, convolutions and output norm."""
    mlp: bool = False
    step: bool = False
    """The whole block as five kernels, for one token of each sequence."""


def intact(*modules: nn.Module | None, kind: type[nn.Module] = nn.Linear, bias: bool = False) -> bool:
    """Whether the modules are as they were built, so that fused ops may use their weights without calling them.

    Not if an adapter (LoRA) replaced one, a weight is quantised, a hook is set, or there is a bias that the fused op does not read.
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
    """`fused`, or if that is None whether kernels run on x."""
    if fused is not None:
        return fused
    return backend == "triton" or (backend == "auto" and x.is_cuda)
