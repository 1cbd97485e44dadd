"""The delta rule on trial beside the one in use, at the heads of released models: `python -m lab.candidates`; `... tiles` times its kernels
one by one over their tiles."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from headmax.bench.timing import kernel_times, seconds
from headmax.ops import gated_delta_rule
from headmax.ops.packing import Packing
from lab.candidates import delta_head

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(8, 4096, 16, 32), (8, 4096, 16, 48), (8, 4096, 16, 64), (8, 4096, 8, 32), (8, 4096, 2, 8), (1, 32768, 16, 32), (1, 32768, 2, 8),
          (4, 8192, 16, 32), (4, 2048, 16, 32)]  # fmt: skip
"""Batch, length, key heads, value heads; all heads are 128 wide."""
CHOICES = {
    "prepare": [(128, 64, 4, 1), (128, 64, 8, 1), (128, 64, 4, 2)],
    "read": [(128, 64, 4, 1), (128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 1), (128, 128, 8, 2), (128, 128, 4, 2)],
    "store": [(128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2)],
    "back": [(128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 1), (128, 128, 8, 1)],
    "gradients": [(64, 64, 4, 1), (64, 64, 4, 2), (64, 128, 8, 1), (128, 64, 8, 1)],
}
"""Key and value channels, warps, stages."""
KERNELS = {"prepare": "delta_prepare_kernel", "read": "delta_scan_kernel", "store": "delta_scan_kernel", "back": "delta_scan_back_kernel",
           "gradients": "delta_gradients_kernel"}  # fmt: skip


def inputs(batch: int, time: int, key_heads: int, heads: int, width: int = 128) -> list[Tensor]:
    torch.manual_seed(0)
    rows: dict[str, Any] = {"device": DEVICE, "requires_grad": True}
    q, k = (torch.randn(batch, time, key_heads, width, dtype=torch.bfloat16, **rows) for _ in range(2))
    v = torch.randn(batch, time, heads, width, dtype=torch.bfloat16, **rows)
    log_decay = torch.empty(batch, time, heads, device=DEVICE).uniform_(-0.1, 0).requires_grad_()
    gates = [torch.rand(batch, time, heads, **rows) for _ in range(3)]
    return [q, k, v, log_decay, *gates]


def functions(given: list[Tensor], packing: Packing | None = None) -> dict[str, Callable[[], Tensor]]:
    q, k, v, log_decay, beta, read, write = given
    options: dict[str, Any] = {"read_gate": read, "write_gate": write, "normalize_qk": True, "backend": "triton", "cu_seqlens": packing}
    return {
        "in use": lambda: gated_delta_rule(q, k, v, log_decay, beta, **options)[0],
        "on trial": lambda: delta_head.gated_delta_rule(q, k, v, log_decay, beta, read, write, q.shape[-1] ** -0.5, None, packing)[0],
    }


def both(function: Callable[[], Tensor], given: list[Tensor], d_o: Tensor) -> Callable[[], Any]:
    """Forward and backward."""
    return lambda: torch.autograd.grad(function(), given, d_o)


def timed(function: Callable[[], Any]) -> float:
    function()
    return 1e3 * statistics.median(seconds(function, DEVICE) for _ in range(7))


def compare() -> Iterator[str]:
    """A line for each shape: ms forward, and with backward, and how far the results are apart."""
    for shape in SHAPES if DEVICE.type == "cuda" else [(1, 70, 1, 2, 32)]:
        given = inputs(*shape)
        d_o, found = torch.randn_like(given[2]), functions(given)
        one, two = ([f(), *both(f, given, d_o)()] for f in found.values())
        apart = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(one, two, strict=True))
        times = [f"{name} {timed(torch.no_grad()(f)):.3f} + {timed(both(f, given, d_o)):.3f} ms" for name, f in found.items()]
        yield f"{shape}: {'; '.join(times)}; apart {apart:.1e}"


def tiles() -> Iterator[str]:
    """A line for each choice: ms of its kernel."""
    given = inputs(*(SHAPES[0] if DEVICE.type == "cuda" else (1, 70, 1, 2, 32)))
    run = both(functions(given)["on trial"], given, torch.randn_like(given[2]))
    for kernel, choice in itertools.chain.from_iterable([(name, each) for each in choices] for name, choices in CHOICES.items()):
        usual, delta_head.TILES[kernel] = delta_head.TILES[kernel], choice
        try:
            run()
            taken = {name: 1e3 * time for name, (time, _) in kernel_times(run, 3).items()}[KERNELS[kernel]]
            yield f"{kernel} {choice}: {taken:.3f} ms" + (" (read and store)" if KERNELS[kernel] == "delta_scan_kernel" else "")
        except Exception as error:
            yield f"{kernel} {choice}: {type(error).__name__} {str(error)[:90]}"
        delta_head.TILES[kernel] = usual


if __name__ == "__main__":
    for line in tiles() if sys.argv[1:] == ["tiles"] else compare():
        print(line, flush=True)
