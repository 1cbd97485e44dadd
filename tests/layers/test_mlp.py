"""SwiGLU: its kernel, and the model's own way of calling it."""

import pytest
import torch
from torch import Tensor

from headmax.layers.mlp import SwiGLU
from headmax.ops.registry import dispatch
from headmax.ops.spec import distance
from tests.layers.compare import DEVICES, compare


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("width", [40, 300])
def test_the_kernel_of_swiglu(width: int, dtype: torch.dtype, bound: float, device: str) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)

    def function(joint: Tensor, down: Tensor, backend: str) -> tuple[Tensor]:
        return (dispatch("swiglu", backend, joint)(joint, down.to(joint.dtype)),)

    compare(function, [torch.randn(2, 17, 2 * width), torch.randn(24, width) / width**0.5], device, dtype, bound)


def test_the_operator_of_swiglu_is_registered_properly() -> None:
    pytest.importorskip("triton")
    from headmax.ops.kernels.swiglu import _swiglu

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.library.opcheck(_swiglu, (torch.randn(5, 24, device=device), torch.randn(8, 12, device=device)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks, at a block's input
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("width", "shape"), [(24, (2, 5, 16)), (25, (2, 5, 16)), (26, (5, 16))], ids=str)
def test_a_training_graph_computes_what_three_projections_do(width: int, shape: tuple[int, ...], backend: str) -> None:
    """Of any width, though matrices side by side are filled up to a multiple of 8."""
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter runs where there is no GPU")
    torch.manual_seed(0)
    mlp, x = SwiGLU(16, width, backend), torch.randn(shape, requires_grad=True)
    leaves = [x, *mlp.parameters()]
    expected = torch.autograd.grad(mlp(x).square().sum(), leaves)
    torch._dynamo.reset()
    actual = torch.autograd.grad(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x).square().sum(), leaves)
    for a, e in zip(actual, expected, strict=True):
        assert distance(a, e) <= 1e-5
