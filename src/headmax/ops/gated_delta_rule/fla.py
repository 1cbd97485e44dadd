"""flash-linear-attention's kernels of the delta rules behind our signature. They know no gates: v is gated before, o after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headmax.ops.packing import Packing
from headmax.ops.sequential import gated

Result = tuple[Tensor, Tensor | None]


def gated_delta_rule(*arguments: Any) -> Result:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return run(chunk_gated_delta_rule, *arguments)


def kda(*arguments: Any) -> Result:
    from fla.ops.kda import chunk_kda

    return run(chunk_kda, *arguments)


def run(
    kernel: Callable[..., Result], q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, normalize_qk: bool,
    read_gate: Tensor | None, write_gate: Tensor | None, scale: float, initial_state: Tensor | None, packing: Packing | None,
    return_state: bool,
) -> Result:  # fmt: skip
    o, state = kernel(
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
