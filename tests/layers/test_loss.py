"""The loss without logits is the loss with them."""

import subprocess
import sys

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [37, 9000])
def test_the_kernel_of_the_rows(size: int, device: str) -> None:
    pytest.importorskip("triton")
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    from headmax.ops.kernels.loss import cross_entropy_rows

    logits = 3 * torch.randn(5, size, device=device)
    logits[3] = -1e4
    labels = torch.tensor([3, size - 1, -100, 0, 1], device=device)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none")
    wanted = torch.autograd.grad(expected.sum(), wide)[0]
    losses = cross_entropy_rows(logits, labels)
    assert distance(losses, expected) <= 1e-5
    assert distance(logits, wanted) <= 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_once", [30, 10**6])
def test_float64_is_exact(at_once: int, device: str, monkeypatch) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, dtype=torch.float64, generator=generator).to(device).requires_grad_() for n in (7, 11))
    labels = torch.tensor([0, 10, -100, 3, 3, 5, -100], device=device)
    total, expected = linear_cross_entropy(x, weight, labels), F.cross_entropy(x @ weight.T, labels, reduction="sum")
    assert total.dtype == torch.float64
    actual, wanted = (torch.autograd.grad(loss, (x, weight)) for loss in (total, expected))
    assert all(distance(a, e) <= 1e-14 for a, e in zip((total, *actual), (expected, *wanted), strict=True))


def test_autocast_does_not_narrow_it() -> None:
    x, weight, labels = torch.randn(6, 64), torch.randn(11, 64), torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = linear_cross_entropy(x, weight, labels)
    assert torch.equal(narrow, linear_cross_entropy(x, weight, labels))


@pytest.mark.parametrize("device", DEVICES)
def test_a_narrow_weight_gets_a_gradient_summed_wide(device: str, monkeypatch) -> None:
    """A sum of 300 pieces kept in bfloat16 stops growing at 256 times what is added."""
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 1)
    x = torch.ones(300, 2, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(2, 2, dtype=torch.bfloat16, device=device, requires_grad=True)
    linear_cross_entropy(x, weight, torch.zeros(300, dtype=torch.int64, device=device)).backward()
    assert torch.equal(weight.grad.cpu(), torch.tensor([[-150.0, -150.0], [150.0, 150.0]], dtype=torch.bfloat16))


def test_the_incoming_gradient_scales_before_the_weights_dtype_can_overflow() -> None:
    x, weight = torch.full((4000, 2), 100.0, dtype=torch.float16), torch.zeros(2, 2, dtype=torch.float16, requires_grad=True)
    (linear_cross_entropy(x, weight, torch.zeros(4000, dtype=torch.int64)) / 4000).backward()
    assert torch.equal(weight.grad, torch.tensor([[-50.0, -50.0], [50.0, 50.0]], dtype=torch.float16))


@pytest.mark.parametrize(("body", "head"), [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_wanted_are_computed(body: bool, head: bool, monkeypatch) -> None:
    forward, made = module._forward, []
    monkeypatch.setattr(module, "_forward", lambda *inputs: made.append(forward(*inputs)) or made[-1])
    x, weight = torch.randn(5, 8, requires_grad=body), torch.randn(11, 8, requires_grad=head)
    total = linear_cross_entropy(x, weight, torch.arange(5))
    assert [d.numel() > 0 for d in made[0][1:]] == [body, head]
    assert total.requires_grad == (body or head)
    for wanted in (y for y in (x, weight) if y.requires_grad):
        expected = F.cross_entropy(x @ weight.T, torch.arange(5), reduction="sum")
        assert distance(torch.autograd.grad(total, wanted)[0], torch.autograd.grad(expected, wanted)[0]) <= 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_to_predict_gives_zero(tokens: int, device: str) -> None:
    x, weight = (torch.randn(n, 8, device=device, requires_grad=True) for n in (tokens, 11))
    total = linear_cross_entropy(x, weight, torch.full((tokens,), -100, device=device))
    total.backward()
    assert total == 0
    assert all(y.grad is not None and y.grad.shape == y.shape and (y.grad == 0).all() for y in (x, weight))


@pytest.mark.parametrize("label", [5, -1, -101])
def test_a_label_outside_the_vocabulary_is_refused_on_the_cpu(label: int) -> None:
    with pytest.raises(ValueError, match=f"labels must be -100 or 0 to 4, the vocabulary, got {label}"):
        linear_cross_entropy(torch.randn(2, 4), torch.randn(5, 4), torch.tensor([1, label]))


@pytest.mark.gpu
@pytest.mark.parametrize("label", [5, -1])
def test_a_label_outside_the_vocabulary_stops_a_gpu(label: int) -> None:
    """In a process of its own: nothing runs on a GPU after an assert there."""
    code = f"""
import torch
from headmax.layers.loss import linear_cross_entropy
linear_cross_entropy(torch.randn(2, 4, device="cuda"), torch.randn(5, 4, device="cuda"), torch.tensor([1, {label}], device="cuda")).item()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "assert" in done.stderr


@pytest.mark.gpu
def test_labels_are_moved_to_the_tokens() -> None:
    x, weight, labels = torch.randn(4, 8), torch.randn(11, 8), torch.arange(4)
    assert distance(linear_cross_entropy(x.cuda(), weight.cuda(), labels), linear_cross_entropy(x, weight, labels)) <= 1e-5


def test_errors_name_the_argument() -> None:
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    with pytest.raises(ValueError, match=r"labels must be integers of shape \[2, 3\], as x has it, got torch.int64 of shape \[6\]"):
        linear_cross_entropy(x, weight, torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ValueError, match="labels must be integers"):
        linear_cross_entropy(x, weight, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"weight must be \[vocabulary, hidden\] = \[4, 4\], got \[4, 5\]"):
        linear_cross_entropy(x, weight.T, torch.zeros(2, 3, dtype=torch.int64))
