"""Queries and keys that are rotated on their way out of a product."""

import pytest
import torch
from torch import Tensor

from headmax.layers.rotary import RotarySettings, rotate, split_rotary
from tests.layers.compare import DEVICES, compare


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize(("heads", "width", "further", "rows"), [(2, 20, 8, 1), (3, 64, 0, 1), (1, 96, 3, 2)])
def test_the_kernel_that_turns(heads: int, width: int, further: int, rows: int, dtype: torch.dtype, bound: float, device: str) -> None:
    """`rows` of positions, one for all of the batch or each its own."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    positions = torch.randint(0, 1000, (rows, 19))

    def function(product: Tensor, backend: str) -> tuple[Tensor, ...]:
        rotary = RotarySettings(width, 1e4).at(positions.to(product.device), torch.float64)
        if product.dtype != torch.float64:
            rotary = type(rotary)(*(x.float() for x in rotary))
        return split_rotary(product, rotary, heads, width, backend)

    compare(function, [torch.randn(2, 19, 2 * heads * width + further)], device, dtype, bound)


def test_angles_far_into_a_text_are_those_of_float64() -> None:
    """A float32 product of position and frequency is off by a sixteenth of a radian there."""
    positions = torch.tensor([[0, 1, 4096, 2**20 - 1, 2**20, 10**7]])
    exact, found = (RotarySettings(64, 1e4).at(positions, dtype) for dtype in (torch.float64, torch.float32))
    assert found.cos.dtype == torch.float32
    for x, y in zip(found, exact, strict=True):
        assert (x - y).abs().max() <= 1e-7


def test_turned_parts_are_those_of_the_product() -> None:
    torch.manual_seed(0)
    product, rotary = torch.randn(2, 5, 2 * 3 * 8 + 4, dtype=torch.float64), RotarySettings(8, 1e4).at(torch.arange(5)[None], torch.float64)
    q, k, rest = split_rotary(product, rotary, 3, 8)
    torch.testing.assert_close(q, rotate(product[..., :24].unflatten(-1, (3, 8)), rotary))
    torch.testing.assert_close(k, rotate(product[..., 24:48].unflatten(-1, (3, 8)), rotary))
    torch.testing.assert_close(rest, product[..., 48:])


def test_the_operator_that_turns_is_registered_properly() -> None:
    pytest.importorskip("triton")
    from headmax.ops.kernels.rotary import _split_rotary

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cos, sin = torch.randn(2, 5, 4, device=device)
    torch.library.opcheck(_split_rotary, (torch.randn(10, 19, device=device), cos, sin, 1, 8))
