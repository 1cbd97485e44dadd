"""flash-linear-attention's kernels behind our signature. It knows neither gates nor grouped keys: both are applied beforehand."""

from __future__ import annotations

from torch import Tensor

from headmax.ops.packing import Packing
from headmax.ops.sequential import gated, per_value_head


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, read_gate: Tensor | None, write_gate: Tensor | None,
    scale: float, initial_state: Tensor | None, packing: Packing | None, return_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.simple_gla import chunk_simple_gla

    options = {"scale": scale, "initial_state": initial_state, "output_final_state": return_state}
    options["cu_seqlens"] = None if packing is None else packing.cu_seqlens
    q, k = gated(per_value_head(q, v), read_gate), gated(per_value_head(k, v), write_gate)
    if log_decay is None:
        return chunk_linear_attn(q, k, v, normalize=False, **options)
    if log_decay.ndim == 1 and not log_decay.requires_grad:
        return chunk_simple_gla(q, k, v, g_gamma=log_decay, **options)
    return chunk_simple_gla(q, k, v, g=log_decay.expand(q.shape[:3]), **options)  # a fixed decay has no gradient there
