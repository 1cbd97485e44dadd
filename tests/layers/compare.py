"""A layer's kernel beside its plain form."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headmax.ops.spec import distance

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def results(function: Any, leaves: list[Tensor | None], seed: int = 1) -> list[Tensor]:
    """Outputs and the gradients of all leaves, along random directions."""
    outputs = function(*leaves)
    torch.manual_seed(seed)
    loss = sum((y * torch.randn(y.shape, dtype=torch.float64).to(y)).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(loss, [x for x in leaves if x is not None])]


def compare(function: Any, leaves: list[Tensor | None], device: str, dtype: torch.dtype, bound: float) -> None:
    """Weights stay float32 beside narrow inputs."""
    exact = [None if x is None else x.detach().to(dtype if x.ndim > 2 else torch.float32).double().requires_grad_() for x in leaves]
    narrow = [None if x is None else x.detach().to(device, dtype if x.ndim > 2 else torch.float32).requires_grad_() for x in leaves]
    expected = results(lambda *x: function(*x, "reference"), exact)
    actual = results(lambda *x: function(*x, "triton"), narrow)
    given = [x for x in narrow if x is not None]
    assert [a.dtype for a in actual[-len(given) :]] == [x.dtype for x in given]
    for a, e in zip(actual, expected, strict=True):
        assert distance(a, e) <= bound
