"""How time and memory are measured."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """One call, by device events on a GPU and by the wall clock elsewhere."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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
    """Times every function once a round, so that a slow spell of the machine meets them all."""
    for _ in range(warmup):
        for function in functions.values():
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(seconds(function, device))
    return times


def median(times: list[float]) -> float:
    return statistics.median(times)


def peak_memory(function: Callable[[], object], device: torch.device) -> int | None:
    """Bytes a call needs beyond what is held before it; None where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else the call would be served from memory that is free but still resident
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
        before = _resident("VmRSS")
        function()
        return _resident("VmHWM") - before
    except (OSError, AttributeError, StopIteration):
        return None


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))
