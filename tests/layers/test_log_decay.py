"""Log-decays: the kernel, its gradient, and extreme values."""

import pytest
import torch
import torch.nn.functional as F

from headmax.layers.log_decay import log_sigmoid
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
