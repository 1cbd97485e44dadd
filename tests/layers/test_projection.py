"""Weights of fused products."""

import pytest
import torch
from torch import Tensor

from headmax.layers.projection import ALIGNMENT, product_matrices


def plain(groups: list[list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    joint = []
    for group in groups:
        matrix = torch.cat([matrix.to(dtype) for matrix in group])
        zeros = matrix.new_zeros(-len(matrix) % ALIGNMENT if len(group) > 1 else 0, matrix.shape[1])
        joint.append(torch.cat([matrix, zeros]))
    return joint


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_cast_together_are_those_cast_alone(compiled: bool) -> None:
    """Bit for bit, and their gradients; a frozen one gets none."""
    torch.manual_seed(0)
    matrices = [torch.randn(rows, 6, requires_grad=rows != 5) for rows in (16, 5, 3, 7, 8, 1)]
    groups = [matrices[:3], [matrices[3]], matrices[4:]]
    x, leaves = torch.randn(4, 6, dtype=torch.bfloat16), [matrix for matrix in matrices if matrix.requires_grad]
    function = torch.compile(product_matrices, backend="aot_eager", fullgraph=True) if compiled else product_matrices
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = function(x, groups), plain(groups, torch.bfloat16)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    weights = [torch.randn(len(y), 6, dtype=torch.bfloat16) for y in expected]
    (d_actual, d_expected) = (
        torch.autograd.grad(sum(((y * w).sum() for y, w in zip(ys, weights, strict=True)), start=torch.tensor(0.0)), leaves)
        for ys in (actual, expected)
    )
    assert all(torch.equal(a, e) and a.dtype == torch.float32 for a, e in zip(d_actual, d_expected, strict=True))


def test_weights_in_the_dtype_of_their_product_are_taken_as_they_are() -> None:
    matrix = torch.randn(4, 6)
    alone, joint = product_matrices(torch.randn(2, 6), [[matrix], [matrix, matrix[:1]]])
    assert alone is matrix
    assert joint.shape == (8, 6)
    assert torch.equal(joint[:4], matrix)
    assert not joint[5:].any()


def test_weights_of_two_dtypes_are_cast_each() -> None:
    (joint,) = product_matrices(torch.randn(2, 6, dtype=torch.bfloat16), [[torch.ones(4, 6, dtype=torch.bfloat16), torch.ones(4, 6)]])
    assert joint.dtype == torch.bfloat16
    assert joint.shape == (8, 6)
