"""Kernels that start before the one ahead of them has ended: while it finishes, they load what it does not write.

The kernels that decode are so short that their start and their first loads would be a good part of them. Hopper and later have
"programmatic dependent launch" for this.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


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
