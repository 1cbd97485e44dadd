"""The loss without logits is the loss with them."""

import pytest
import torch
import torch.nn.functional as F

from headmax.layers import loss as module
from headmax.layers.loss import linear_cross_entropy
from tests.ops.oracle import distance

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("at_once", [1, 200, 10**6], ids=lambda n: f"{n}-logits-at-once")
def test_loss_and_gradients_against_the_full_logits(at_once: int, dtype: torch.dtype, device: str, monkeypatch) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 16, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(37, 16, generator=generator).to(device).requires_grad_()
    labels = torch.randint(0, 37, (3, 7), generator=generator).to(device)
    labels[0, :3] = -100
    total = linear_cross_entropy(x, weight, labels)
    actual = torch.autograd.grad(0.3 * total, (x, weight))
    wide, wide_weight = x.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    expected = F.cross_entropy((wide @ wide_weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    wanted = torch.autograd.grad(0.3 * expected, (wide, wide_weight))
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert distance(total, expected) <= bound
    assert all(distance(g, w) <= bound for g, w in zip(actual, wanted, strict=True))
    assert actual[1].dtype == torch.float32


def test_without_gradients_none_are_computed() -> None:
    x, weight, labels = torch.randn(5, 8), torch.randn(11, 8), torch.randint(0, 11, (5,))
    with torch.no_grad():
        assert torch.allclose(linear_cross_entropy(x, weight, labels), F.cross_entropy(x @ weight.T, labels, reduction="sum"))


def test_nothing_to_predict_gives_zero() -> None:
    x = torch.randn(5, 8, requires_grad=True)
    total = linear_cross_entropy(x, torch.randn(11, 8), torch.full((5,), -100))
    assert total == 0
    assert (torch.autograd.grad(total, x)[0] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [37, 9000])
def test_the_kernel_of_the_rows(size: int, device: str) -> None:
    pytest.importorskip("triton")
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    from headmax.layers.triton_loss import cross_entropy_rows

    logits = 3 * torch.randn(5, size, device=device)
    logits[3] = -1e4
    labels = torch.tensor([3, size - 1, -100, 0, 1], device=device)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none")
    wanted = torch.autograd.grad(expected.sum(), wide)[0]
    losses = cross_entropy_rows(logits, labels)
    assert distance(losses, expected) <= 1e-5
    assert distance(logits, wanted) <= 1e-5


def test_a_label_outside_the_vocabulary_is_refused_on_the_cpu() -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(torch.randn(2, 4), torch.randn(5, 4), torch.tensor([1, 5]))
