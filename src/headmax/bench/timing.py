"""Measures time and memory."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

QUEUE_CYCLES = 20_000_000
"""Clock cycles (about 10 ms) for which the GPU waits while launches queue up, so that Python's time is not measured."""


def seconds(function: Callable[[], object], device: torch.device, queue_cycles: int = QUEUE_CYCLES) -> float:
    """Time of one call: by events on a GPU, by the wall clock elsewhere."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(queue_cycles)
            start.record()
            function()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def interleaved(
    functions: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Times every function once per round, so that a slow phase of the machine affects all."""
    for _ in range(warmup):
        for function in functions.values():
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(seconds(function, device))
    return times


def kernel_times(function: Callable[[], object], calls: int = 20) -> dict[str, tuple[float, float]]:
    """(seconds on the GPU, launches) per call of each kernel."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:  # without, PyTorch 2.11 warns of further cycles
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    by_kernel: dict[str, list[float]] = {}
    for event in trace.events() or ():
        if event.device_type == DeviceType.CUDA:
            by_kernel.setdefault(event.name, []).append(event.device_time / 1e6)
    return {name: (sum(times) / calls, len(times) / calls) for name, times in by_kernel.items()}


def paired(times: Sequence[float], base: Sequence[float]) -> tuple[float, list[float] | None]:
    """Median of times / base over interleaved pairs, and its 95% confidence interval; None for too few pairs.

    The interval is between order statistics, from binomial tails. Unlike a mean, it is robust to pauses of the machine within a pair.
    """
    ratios = sorted(a / b for a, b in zip(times, base, strict=True))
    tails = itertools.accumulate(math.comb(len(ratios), k) / 2 ** len(ratios) for k in range(len(ratios)))
    rank = sum(tail <= 0.025 for tail in tails)
    return statistics.median(ratios), [ratios[rank - 1], ratios[-rank]] if rank else None


@dataclass(frozen=True)
class Ceilings:
    """Measured throughput of the GPU in a large product and a large copy, instead of its specification."""

    flops: float
    """bfloat16 FLOP/s."""
    bytes: float
    """Bytes read and written per second."""

    @classmethod
    def of(cls, device: torch.device) -> Ceilings | None:
        """Measures the device; None for a CPU."""
        if device.type != "cuda":
            return None
        a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
        product = statistics.median([seconds(lambda: a @ b, device) for _ in range(20)])
        large, copy = (torch.empty(2**30, device=device, dtype=torch.uint8) for _ in range(2))
        moved = statistics.median([seconds(lambda: copy.copy_(large), device) for _ in range(20)])
        return cls(2 * 8192**3 / product, 2 * large.numel() / moved)


def peak_memory(function: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that a call needs in addition to those allocated before; None if the system does not report them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # otherwise the call may reuse free memory that is still resident
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
        before = _resident("VmRSS")
        function()
        return _resident("VmHWM") - before
    except (OSError, AttributeError, StopIteration):
        return None


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))
