"""Launches of Triton kernels that cost the host little.

`kernel[grid](...)` looks at every argument in Python, builds a string for a key and asks for the device and hooks: 34 microseconds for
30 arguments on an H200's host, which is more than most kernels run for short inputs. Here the key is a tuple, and what it finds is
launched directly.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


class Compiled(NamedTuple):
    """A compiled kernel, as `launch` runs it."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    """Values of the compile-time parameters, in their order: Triton takes them with the others and passes over them."""
    kernel: Any
    """Kept so that its id stays its own."""


_compiled: dict[tuple[Any, ...], Compiled] = {}


def key_of(kernel: Any, device: int, args: tuple[Any, ...], constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """All that Triton specialises a kernel on: the device, compile-time values and options; of tensors the dtype and whether they are
    aligned to 16 bytes; of integers whether they are 1, a multiple of 16, and how wide; of others the type.
    """
    key: list[Any] = [id(kernel), device, *constants, *constants.values()]
    addresses = 0
    for x in args:
        kind = x.__class__
        if kind is Tensor or isinstance(x, Tensor):
            key.append(x.dtype)
            addresses |= x.data_ptr()
        elif kind is int:
            key.append(1 if x == 1 else (x & 15 == 0, -(2**31) <= x < 2**31, x < 2**63))
        else:
            key.append(kind)
    if addresses & 15:  # rare, as views from the middle of a row are: then it matters which
        key += [x.data_ptr() & 15 == 0 for x in args if isinstance(x, Tensor)]
    return tuple(key)


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: Mapping[str, Any]) -> None:
    """kernel[grid](*args, **constants) on the device of args[0], a tensor.

    `args` are all parameters that are no constants, in order: tensors, None, numbers. `constants` are the compile-time parameters, which
    come after them, and options such as num_warps; they are compared by value. Triton's launch hooks, which profilers may set, are not
    called. A tensor that is not on the current device is launched on its own.
    """
    device = args[0].get_device()
    if device < 0:  # the interpreter
        kernel[grid](*args, **constants)
        return
    driver = triton.runtime.driver.active
    if device != driver.get_current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, args, constants)
        return
    key = key_of(kernel, device, args, constants)
    if (known := _compiled.get(key)) is None:
        compiled = kernel[grid](*args, **constants)
        values = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _compiled[key] = Compiled(compiled.run, compiled.function, compiled.packed_metadata, values, kernel)
        return
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    known.run(
        x, y, z, driver.get_current_stream(device), known.function, known.metadata, None, None, None, *args, *known.constants
    )  # fmt: skip


# Kernels that start before the one ahead of them has ended (Hopper's "programmatic dependent launch"): while it finishes, they load what it
# does not write. The kernels that decode are so short that their start and their first loads would be a good part of them.


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """From here on all that earlier kernels wrote is there, and the next kernel may start. What a kernel loads before this must be
    older than the step; what it stores must come after."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@functools.cache
def early(device: torch.device) -> dict[str, bool]:
    """A launch's arguments for a kernel that calls `wait_for_previous`."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": able} | ({"launch_pdl": True} if able else {})
