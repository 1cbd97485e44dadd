"""Kernels of the norms against their plain forms in float64."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from headmax.layers.norm import RMSNorm, norm_with_residual, read_out, residual_norm, rms_norm
from tests.layers.compare import DEVICES, compare

pytest.importorskip("triton")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize(("tokens", "width"), [((2, 17), 20), ((1, 65), 384), ((3, 1), 1024)], ids=str)
def test_the_kernel_of_the_residual_norm(
    tokens: tuple[int, int], width: int, summed: bool, dtype: torch.dtype, bound: float, device: str
) -> None:
    torch.manual_seed(0)
    x, delta, weight = torch.randn(*tokens, width), torch.randn(*tokens, width), 1 + torch.randn(width)
    compare(
        lambda x, delta, weight, backend: rms_norm(x, delta, weight, 1e-3, backend)[0 if summed else 1 :],
        [x, delta if summed else None, weight],
        *(device, dtype, bound),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize(("swish", "read"), [(True, False), (True, True), (False, True), (False, False)])
@pytest.mark.parametrize(("heads", "value"), [(3, 20), (4, 160), (2, 512)])
def test_the_kernel_of_the_read_out(heads: int, value: int, swish: bool, read: bool, dtype: torch.dtype, bound: float, device: str) -> None:
    """Read-out, swish gate (some columns of a wider matrix), read gate, norm and output projection, of 2 x 19 tokens."""
    torch.manual_seed(0)
    o, wide, gate = torch.randn(2, 19, heads, value), torch.randn(2, 19, heads * value + 8), torch.rand(2, 19, heads)
    weight, out = 1 + torch.randn(value), torch.randn(24, heads * value) / (heads * value) ** 0.5

    def function(o: Tensor, wide: Tensor | None, gate: Tensor | None, weight: Tensor, out: Tensor, backend: str) -> tuple[Tensor]:
        columns = None if wide is None else wide[..., : heads * value]
        return (read_out(o, columns, gate, weight, out.to(o.dtype), 1e-3, backend),)

    compare(function, [o, wide if swish else None, gate if read else None, weight, out], device, dtype, bound)


@pytest.mark.parametrize("device", DEVICES)
def test_the_norms_operators_are_registered_properly(device: str) -> None:
    from headmax.ops.kernels.norm import _read_out, _rms_norm

    x, weight = torch.randn(2, 5, 24, device=device), torch.ones(24, device=device)
    for delta in (None, torch.randn_like(x)):
        torch.library.opcheck(_rms_norm, (x, delta, weight, 1e-6))
    o, out = torch.randn(10, 2, 24, device=device), torch.randn(8, 48, device=device)
    gates = torch.randn(10, 48, device=device), torch.rand(10, 2, device=device)
    for swish, read in ((None, None), gates):
        torch.library.opcheck(_read_out, (o, swish, read, weight, out, 1e-6))


def test_a_norm_of_a_sum_is_the_sum_and_its_norm() -> None:
    norm, (x, delta) = RMSNorm(6).double(), torch.randn(2, 2, 3, 6, dtype=torch.float64)
    total, normed = residual_norm(norm, x, delta, fused=True)
    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(normed, total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    torch.testing.assert_close(normed, norm(total))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [True, False])
def test_the_kernel_adds_the_gradient_of_what_goes_on_beside_a_norm(compiled: bool, device: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def function(x: Tensor, weight: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        def both(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            x, y = norm_with_residual(x, weight, 1e-3, backend)
            return 2 * x, 2 * y

        torch._dynamo.reset()
        run = torch.compile(both, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)) if compiled else both
        return run(x, weight) if backend == "triton" else both(x, weight)

    torch.manual_seed(0)
    compare(function, [torch.randn(2, 5, 24), 1 + torch.randn(24)], device, torch.float32, 1e-6)
    if compiled:
        called = [str(node.target) for node in graphs[1].graph.nodes]
        assert "headmax.rms_norm_backward.default" in called
        assert not any("add" in target for target in called)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_weight_of_another_width_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match=r"rms_norm: weight must be \[width\] = \[8\], got \[4\]"):
        RMSNorm(4, backend=backend)(torch.randn(2, 8))
    with pytest.raises(ValueError, match=r"read_out: out must be \[hidden, heads \* value\] = \[5, 8\], got \[5, 7\]"):
        read_out(torch.randn(1, 2, 2, 4), None, None, torch.ones(4), torch.randn(5, 7), 1e-6, backend)


def test_kernels_refuse_float64() -> None:
    with pytest.raises(ValueError, match=r"rms_norm: backend 'triton' cannot run here: it computes in float32, got torch\.float64"):
        RMSNorm(8, backend="triton")(torch.randn(2, 8, dtype=torch.float64))


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with a gap behind every row, as a compiler may lay them for their alignment."""
    return torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]]


def test_kernels_take_tensors_however_they_lie() -> None:
    from headmax.ops.kernels import conv, norm, rotary, swiglu

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    o, swish, read, out = (torch.randn(shape, device=device) for shape in ((5, 2, 6), (5, 12), (5, 2), (4, 12)))
    x, taps, weight, angles = (
        torch.randn(2, 3, 12, device=device),
        torch.randn(12, 3, device=device),
        out[0, :6],
        torch.ones(5, 3, device=device),
    )
    for op, given, others in (
        (norm._read_out, (o, swish, read), (weight, out, 1e-6)),
        (norm._read_out_backward, (o, o, swish, read), (weight, 1e-6)),
        (norm._rms_norm, (o, o), (weight, 1e-6)),
        (norm._rms_norm_backward, (o, o, o), (weight, 1e-6)),
        (conv._forward, (x,), (taps, None, None, None, 2, 1e-6)),
        (conv._backward, (x, x[..., :0], x), (taps, None, None, None, 2, 1e-6)),
        (swiglu._swiglu, (swish,), (out[:, :6],)),
        (swiglu._swiglu_backward, (swish[:, :6], swish), ()),
        (rotary._split_rotary, (swish,), (angles, angles, 1, 6)),
        (rotary._split_rotary_backward, (o[:, :1], o[:, 1:], swish[:, :0]), (angles, angles)),
    ):
        expected, actual = (op(*(lay(y) for y in given), *others) for lay in (torch.Tensor.contiguous, apart))
        for a, e in zip(*((y,) if isinstance(y, Tensor) else y for y in (actual, expected)), strict=True):
            torch.testing.assert_close(a, e)
