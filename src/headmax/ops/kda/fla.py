"""flash-linear-attention's kernel behind our signature. It knows no gates, so they are multiplied on, to v beforehand and to o after."""

from __future__ import annotations

from torch import Tensor

from headmax.ops.packing import Packing
from headmax.ops.sequential import gated


def kda(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, normalize_qk: bool, read_gate: Tensor | None,
    write_gate: Tensor | None, scale: float, initial_state: Tensor | None, packing: Packing | None, return_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from fla.ops.kda import chunk_kda

    o, state = chunk_kda(
        q,
        k,
        gated(v, write_gate),
        log_decay,
        beta,
        scale,
        initial_state,
        output_final_state=return_state,
        use_qk_l2norm_in_kernel=normalize_qk,
        cu_seqlens=None if packing is None else packing.cu_seqlens,
    )
    return gated(o, read_gate), state
