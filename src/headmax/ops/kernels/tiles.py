"""How the kernels are cut and compiled: a table per class of GPU and of heads (tiles.json), measured by `headmax bench tune`."""

from __future__ import annotations

import functools
import json
from operator import index
from pathlib import Path
from typing import Any

import torch
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


@torch.compiler.assume_constant_result
def shared_memory(device: torch.device) -> int:
    """KiB a block may have."""
    return _shared_memory(device)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 1024  # type: ignore[attr-defined]


def entry_for(device: torch.device) -> str:
    """The entry for the largest shared memory that this GPU has too; the largest of all where kernels are interpreted."""
    return str(max(size for size in map(int, TABLE) if device.type != "cuda" or size <= shared_memory(device)))


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up. Triton's own is for kernels: on the host it takes microseconds."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The least power of two that is not less than x."""
    return 1 << (x - 1).bit_length()


# What follows is looked up once for each kind of call: `operator.index` makes a number of a width that a compiler traces as a symbol.


def chunk_length(x: Tensor, key: int) -> int:
    """Tokens of a chunk for heads of this width: LONG_CHUNK where tiles of it fit and the state is large."""
    if x.element_size() == 4 or width_class(key) == "narrow":
        return CHUNK
    return LONG_CHUNK if has_long_chunks(x.device) else CHUNK


@torch.compiler.assume_constant_result
def has_long_chunks(device: torch.device) -> bool:
    return _has_long_chunks(device)


@functools.cache
def _has_long_chunks(device: torch.device) -> bool:
    return TABLE[entry_for(device)]["long chunks"]


def reads_in_scan(x: Tensor, kernel: str = "read_scan") -> bool:
    """Whether a scan of heads as wide as x [..., K] reads out as it goes: it holds all of a state's key channels, if there is room."""
    return x.element_size() < 4 and _tiles_for(kernel, width_class(x.shape[-1]), x.device) is not None


def tile_width(width: int, most: int) -> int:
    """A power of two, at least 64 (narrower tiles have gone wrong on Hopper's matrix units) and at most `most`.

    Scans of the delta rule halve their value channels to 32 where blocks are few: their results are the same to the bit.
    """
    return min(most, max(64, power_of_2(width)))


@functools.cache
def _tiles_for(kernel: str, width: str, device: torch.device) -> Tiles | None:
    return TABLE[entry_for(device)]["kernels"][kernel][width]


@functools.cache
def _tile_arguments(kernel: str, key: int, value: int | None, short: bool, device: torch.device) -> dict[str, int]:
    tiles = _tiles_for(kernel, width_class(key), device)
    assert tiles is not None
    k, v, warps, stages, registers = tiles
    widths = {"BK": tile_width(key, k)} | ({} if value is None else {"BV": tile_width(value, v)})
    limits = {"maxnreg": registers} if registers and device.type == "cuda" and short else {}
    return widths | {"num_warps": warps, "num_stages": stages if short else 1} | limits


def tile_arguments(kernel: str, x: Tensor, key: int, value: int | None = None) -> dict[str, int]:
    """The compile-time arguments of `kernel` for heads of these widths; float32 tiles are twice as large, so those get one stage.

    The dictionary is shared: whoever changes it takes a copy.
    """
    return _tile_arguments(kernel, index(key), None if value is None else index(value), x.element_size() < 4, x.device)


def forget() -> None:
    """For who changes TABLE: what was looked up in it is looked up again."""
    for function in (_has_long_chunks, _tiles_for, _tile_arguments):
        function.cache_clear()
