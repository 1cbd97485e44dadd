"""What a launch tells apart, and what it runs: with kernels that are stood in for, since there is no GPU here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton

from headmax.ops.kernels import launch as module
from headmax.ops.kernels.launch import key_of, launch

KERNEL = object()
X = torch.zeros(64, dtype=torch.bfloat16)
CONSTANTS = {"K": 64, "READ": True, "num_warps": 4}


def key(*args: Any, device: int = 0, kernel: object = KERNEL, **changes: Any) -> tuple[Any, ...]:
    return key_of(kernel, device, args, CONSTANTS | changes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (key(X), key(X.float())),
        (key(X), key(X[1:])),
        (key(X, X[1:]), key(X[1:], X)),
        (key(X), key(None)),
        (key(None), key(1.0)),
        (key(1.0), key(2)),
        (key(1), key(2)),
        (key(16), key(2)),
        (key(2**31), key(16)),
        (key(2**63), key(2**31)),
        (key(True), key(1)),
        (key(X), key(X, device=1)),
        (key(X), key(X, kernel=object())),
        (key(X), key(X, K=128)),
        (key(X), key(X, num_warps=8)),
        (key(X), key(X, num_stages=2)),
        (key_of(KERNEL, 0, (X,), {"READ": True, "WRITE": False}), key_of(KERNEL, 0, (X,), {"WRITE": True, "READ": False})),
    ],
)
def test_what_triton_compiles_apart_has_keys_apart(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one != other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (key(X), key(X.clone())),
        (key(X), key(X[8:])),
        (key(X), key(torch.nn.Parameter(X))),
        (key(2), key(3)),
        (key(16), key(48)),
        (key(0.5), key(0.25)),
    ],
)
def test_what_triton_compiles_once_has_one_key(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one == other


class Kernel:
    """Notes which way it was launched."""

    arg_names = ("x", "n", "B", "A")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*args: Any, **constants: Any) -> Any:
            self.calls.append(("compiled", grid, args[1:], constants))
            return SimpleNamespace(run=lambda *given: self.calls.append(given), function="function", packed_metadata="metadata")

        return first


class Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> str:
        return f"stream {device}"


class OnGPU(torch.Tensor):
    """Says that it is on the first GPU."""

    def get_device(self) -> int:
        return 0


def test_a_kernel_is_compiled_once_and_then_run_with_all_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=Driver()))
    monkeypatch.setattr(module, "_compiled", {})
    kernel, x = Kernel(), torch.zeros(4).as_subclass(OnGPU)
    for n, grid in ((2, (5,)), (3, (6, 7)), (16, (8,))):
        launch(kernel, grid, (x, n), {"A": 1, "B": 2, "num_warps": 4})
    constants = {"A": 1, "B": 2, "num_warps": 4}
    first, second, third = kernel.calls
    assert first == ("compiled", (5,), (2,), constants)
    assert second[:9] == (6, 7, 1, "stream 0", "function", "metadata", None, None, None)
    assert second[9] is x
    assert second[10:] == (3, 2, 1), "constants follow in the kernel's own order"
    assert third == ("compiled", (8,), (16,), constants)


def test_on_a_cpu_kernels_are_interpreted() -> None:
    kernel = Kernel()
    for _ in range(2):
        launch(kernel, (1,), (X, 2), {"A": 1, "B": 2})
    assert [call[0] for call in kernel.calls] == ["compiled"] * 2
