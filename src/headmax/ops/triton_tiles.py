"""How the kernels are cut and compiled: a table per class of GPU and of heads (tiles.json), measured by `headmax bench tune`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from headmax.ops.packing import CHUNK, LONG_CHUNK

Tiles = list[int]
"""Key and value channels of a tile (at most; narrower heads take less), warps, stages of its pipeline, registers (0: no limit)."""

PATH = Path(__file__).with_name("tiles.json")
TABLE: dict[str, dict[str, Any]] = json.loads(PATH.read_text())
"""By shared memory per block in KiB: whether there are long chunks, and "kernels", by kernel, by class of heads; null: not for those."""


def width_class(key: int) -> str:
    return "narrow" if key <= 128 else "wide"


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors; few on a CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def shared_memory(device: torch.device) -> int:
    """KiB a block may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 1024  # type: ignore[attr-defined]


def entry_for(device: torch.device) -> str:
    """The entry for the largest shared memory that this GPU has too; the largest of all where kernels are interpreted."""
    return str(max(size for size in map(int, TABLE) if device.type != "cuda" or size <= shared_memory(device)))


def chunk_length(x: Tensor, key: int) -> int:
    """Tokens of a chunk for heads of this width: LONG_CHUNK where tiles of it fit and the state is large."""
    wide = x.element_size() < 4 and width_class(key) == "wide"
    return LONG_CHUNK if wide and TABLE[entry_for(x.device)]["long chunks"] else CHUNK


def reads_in_scan(x: Tensor, kernel: str = "read_scan") -> bool:
    """Whether a scan of heads as wide as x [..., K] reads out as it goes: it holds all of a state's key channels, if there is room."""
    tiles = TABLE[entry_for(x.device)]["kernels"][kernel][width_class(x.shape[-1])]
    return tiles is not None and x.element_size() < 4


def tile_width(width: int, most: int) -> int:
    """A power of two, at least 64 (narrower tiles have gone wrong on Hopper's matrix units) and at most `most`.

    Scans of the delta rule halve their value channels to 32 where blocks are few: their results are the same to the bit.
    """
    return min(most, max(64, triton.next_power_of_2(width)))


def tile_arguments(kernel: str, x: Tensor, key: int, value: int | None = None) -> dict[str, int]:
    """The compile-time arguments of `kernel` for heads of these widths; float32 tiles are twice as large, so those get one stage."""
    k, v, warps, stages, registers = TABLE[entry_for(x.device)]["kernels"][kernel][width_class(key)]
    widths = {"BK": tile_width(key, k)} | ({} if value is None else {"BV": tile_width(value, v)})
    limits = {"maxnreg": registers} if registers and x.device.type == "cuda" and x.element_size() < 4 else {}
    return widths | {"num_warps": warps, "num_stages": stages if x.element_size() < 4 else 1} | limits
