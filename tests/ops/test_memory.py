"""The checks that all interpreted kernels run under find what they are there to find."""

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from headmax.ops.kernels.launch import launch
from tests.memory import MemoryFault, dry

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")


@triton.jit
def rotate_kernel(x, cos, out, angle_stride, K: tl.constexpr):
    """A row times its angles, which lie `angle_stride` apart: 0 where all rows share their position."""
    row, channel = tl.program_id(0), tl.arange(0, K)
    angle = tl.load(cos + row * angle_stride + channel)
    tl.store(out + row * K + channel, angle * tl.load(x + row * K + channel))


def rotate(rows: int, positions: int, angle_stride: int, *, cos: torch.Tensor | None = None) -> torch.Tensor:
    x, out = torch.ones(rows, 8), torch.empty(rows, 8)
    cos = torch.ones(positions, 8) if cos is None else cos
    launch(rotate_kernel, (rows,), (x, cos, out, angle_stride), {"K": 8})
    return out


def test_rows_that_share_a_position_must_not_step_through_angles() -> None:
    assert torch.equal(rotate(3, 1, 0), torch.ones(3, 8))
    with pytest.raises(
        MemoryFault, match=r"rotate_kernel \(test_memory.py:\d+\): loads element 8 of cos \[1, 8\] \(program 1 of grid \(3,\)"
    ):
        rotate(3, 1, 8)


def test_a_view_ends_where_it_ends() -> None:
    """The rest of the tensor that it is of is as wrong as any other memory."""
    angles = torch.ones(4, 16)
    assert torch.equal(rotate(2, 2, 8, cos=angles.view(8, 8)[:2]), torch.ones(2, 8))
    with pytest.raises(MemoryFault, match=r"loads element 16 of cos \[2, 8\]"):
        rotate(3, 2, 8, cos=angles.view(8, 8)[:2])
    assert torch.equal(rotate(4, 4, 16, cos=angles[:, :8]), torch.ones(4, 8))
    with pytest.raises(MemoryFault, match=r"loads element 8 of cos \[4, 8\], which is between those of this view"):
        rotate(4, 4, 8, cos=angles[:, :8])


@triton.jit
def store_kernel(out, step, N: tl.constexpr):
    """Numbers of its own to N elements, which begin `step` after those of the program before."""
    at = tl.program_id(0) * step + tl.arange(0, N)
    tl.store(out + at, at * 0 + tl.program_id(0))


@triton.jit
def shift_kernel(x, N: tl.constexpr):
    """Every element becomes its right neighbour, in place: it depends on who comes first."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    t_x = tl.load(x + at + 1)
    tl.store(x + at, t_x)


@triton.jit
def one_value_kernel(out, LANES: tl.constexpr):
    tl.store(out + tl.arange(0, LANES) // 2, tl.arange(0, LANES) // LANES)


def test_two_programs_store_different_values() -> None:
    launch(store_kernel, (3,), (torch.empty(12, dtype=torch.int32), 4), {"N": 4})
    with pytest.raises(MemoryFault, match=r"a race: stores element 3 of out \[12\], which program 0 stores"):
        launch(store_kernel, (3,), (torch.empty(12, dtype=torch.int32), 3), {"N": 4})
    launch(one_value_kernel, (3,), (torch.empty(4, dtype=torch.int32),), {"LANES": 8})  # all the same value


def test_one_store_of_different_values() -> None:
    @triton.jit
    def two_values_kernel(out, LANES: tl.constexpr):
        tl.store(out + tl.arange(0, LANES) // 2, tl.arange(0, LANES))

    with pytest.raises(MemoryFault, match="one store has several values for one element"):
        launch(two_values_kernel, (1,), (torch.empty(4, dtype=torch.int32),), {"LANES": 8})


def test_one_program_loads_what_another_stores() -> None:
    with pytest.raises(MemoryFault, match=r"a race: stores element 4 of x \[13\], which program 0 loads"):
        launch(shift_kernel, (3,), (torch.zeros(13),), {"N": 4})
    launch(shift_kernel, (1,), (torch.zeros(5),), {"N": 4})


@triton.jit
def first_kernel(x, out, count, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at, mask=at < count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_masked_out_without_a_value_is_no_number(dtype: torch.dtype) -> None:
    out = torch.zeros(8, dtype=dtype)
    launch(first_kernel, (1,), (torch.ones(5, dtype=dtype), out, 5), {"N": 8})
    assert torch.equal(out.isnan(), torch.arange(8) >= 5)


@triton.jit
def copy_kernel(x, out, N: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    at = row * N + tl.arange(0, N)
    tl.store(out + at, tl.load(x + at))


def test_offsets_that_leave_their_range() -> None:
    x = torch.empty(2**27 + 1, 16, dtype=torch.bfloat16, device="meta")
    with dry():
        launch(copy_kernel, (len(x),), (x, torch.empty_like(x)), {"N": 16, "WIDE": True})
        with pytest.raises(MemoryFault, match=r"loads element -2147483648 of x"):
            launch(copy_kernel, (len(x),), (x, torch.empty_like(x)), {"N": 16, "WIDE": False})


def test_a_grid_that_no_gpu_takes() -> None:
    with pytest.raises(MemoryFault, match="a grid has at most"):
        launch(copy_kernel, (1, 65_536), (torch.empty(1, 4), torch.empty(1, 4)), {"N": 4, "WIDE": True})


def test_memory_that_is_not_filled_in_is_no_number() -> None:
    x = torch.zeros(2, 3)
    for made in (torch.empty(3), torch.empty_like(x), x.new_empty(4), torch.empty(2, dtype=torch.bfloat16)):
        assert made.isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
