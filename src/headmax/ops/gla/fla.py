"""flash-linear-attention's kernel behind our signature. It knows no gates, so they are multiplied on beforehand."""

from __future__ import annotations

from torch import Tensor

from headmax.ops.packing import Packing
from headmax.ops.sequential import gated


def gla(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial_state: Tensor | None, packing: Packing | None, return_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from fla.ops.gla import chunk_gla

    cu_seqlens = None if packing is None else packing.cu_seqlens
    q, k = gated(q, read_gate), gated(k, write_gate)
    return chunk_gla(q, k, v, log_decay, scale, initial_state, output_final_state=return_state, cu_seqlens=cu_seqlens)
