"""Log-decays: the kernel, its gradient, and extreme values."""

import pytest
import torch
import torch.nn.functional as F

from headmax.layers.log_decay import log_sigmoid, softplus_decay
from headmax.ops.spec import distance
from tests.layers.compare import DEVICES, compare


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_the_kernel_of_the_log_sigmoid(dtype: torch.dtype, bound: float, device: str) -> None:
    torch.manual_seed(0)
    compare(lambda x, backend: log_sigmoid(x, 16.0, backend), [4 * torch.randn(2, 33, 3, 7)], device, dtype, bound)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_extreme_values_keep_their_digits(backend: str) -> None:
    x = torch.tensor([-1e4, -90.0, -1.0, 0.0, 1.0, 4.0, 10.0, 20.0, 80.0], requires_grad=True)
    exact = x.detach().double().requires_grad_()
    actual, expected = log_sigmoid(x, 16.0, backend), F.logsigmoid(exact) / 16
    assert distance(actual, expected) <= 1e-6
    (gradient,), (wanted,) = torch.autograd.grad(actual.sum(), x), torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(3, 3), (2, 140)])
def test_the_kernel_of_the_softplus(heads: int, width: int, dtype: torch.dtype, bound: float, device: str) -> None:
    """With gradients of rates and biases, over more rows than a program has."""
    torch.manual_seed(0)
    inputs = [4 * torch.randn(2, 33, width), torch.randn(heads), torch.randn(width)]
    compare(lambda x, rate, bias, backend: softplus_decay(x, rate, bias, backend), inputs, device, dtype, bound)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_small_steps_keep_their_digits(backend: str) -> None:
    x = torch.tensor([[-80.0, -20.0, -10.0, -4.0, 0.0, 10.0, 80.0, 1e4]], requires_grad=True)
    exact = x.detach().double()
    actual = softplus_decay(x, torch.zeros(1), torch.zeros(8), backend)
    expected = -(exact.clamp_min(0) + torch.log1p((-exact.abs()).exp()))
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(actual.sum(), x)
    torch.testing.assert_close(gradient.double(), -exact.sigmoid(), rtol=1e-5, atol=0)
