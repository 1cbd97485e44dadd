"""Kernels compiled for cards that are not here, and a hazard of their pipelines that is found in the compiler's output."""

import os
import subprocess
import sys

import pytest

from lab import ROOT

pytest.importorskip("triton")

SLOW = [pytest.param(pair, marks=pytest.mark.slow) for pair in (("89", "float32"), ("80", "bfloat16"), ("90", "float32"))]


@pytest.mark.parametrize("arguments", [("89", "bfloat16"), ("90", "bfloat16"), *SLOW])
def test_kernels_fit_other_cards(arguments: tuple[str, str]) -> None:
    """Compiled for cards that are not here: 99 KiB of shared memory on a consumer card, 163 on an A100; and on Hopper without haste."""
    capability, dtype = arguments
    command = [sys.executable, "-m", "lab", "bench", "fit", capability, "--dtypes", dtype]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("KiB") >= 30


RING = """
  %ring = ttg.local_alloc : () -> !ttg.memdesc<PLACESx64x64xbf16, #shared, #smem, mutable>
  %view = ttg.memdesc_index %ring[%c0] : !ttg.memdesc<PLACESx64x64xbf16>
  %first = ttg.async_copy_global_to_local %pointers, %view mask %inside : tensor<64x64x!tt.ptr<bf16>>
  %sum = scf.for %n = %c0 to %c4 step %c1 iter_args(%acc = %zero) -> (tensor<64x64xf32>) {
    %now = ttg.memdesc_index %ring[%n] : !ttg.memdesc<PLACESx64x64xbf16>
    %flipped = ttg.memdesc_trans %now {order = array<i32: 1, 0>} : !ttg.memdesc<64x64xbf16>
    %dot = ttng.warp_group_dot %other, %flipped, %acc {inputPrecision = 0 : i32, isAsync = true} : tensor<64x64xf32>
    %done:2 = ttng.warp_group_dot_wait %dot, %flipped {pendings = PENDING : i32} : tensor<64x64xf32>
    %place = ttg.memdesc_index %ring[%m] : !ttg.memdesc<PLACESx64x64xbf16>
    %next = ttg.async_copy_global_to_local %later, %place mask %inside : tensor<64x64x!tt.ptr<bf16>>
    scf.yield %done#0 : tensor<64x64xf32>
  }
"""


@pytest.mark.parametrize(("places", "pending", "expected"), [(1, 1, 1), (2, 1, 0), (1, 0, 0)])
def test_a_tile_that_is_filled_anew_under_a_product_is_found(places: int, pending: int, expected: int) -> None:
    from lab.bench.fit import overtaken

    assert overtaken(RING.replace("PLACES", str(places)).replace("PENDING", str(pending))) == expected
