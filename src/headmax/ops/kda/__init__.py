"""Kimi delta attention: the delta rule with a decay per key channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headmax.ops.checks import check_number, check_recurrence, check_shape, too_wide
from headmax.ops.context import erasing, over_pieces
from headmax.ops.gated_delta_rule import too_wide_for_the_gpu
from headmax.ops.kda import chunkwise, reference
from headmax.ops.packing import Packing
from headmax.ops.registry import dispatch, no_autocast, register_recurrence

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch.distributed import ProcessGroup

register_recurrence("kda", reference.kda, chunkwise.kda, triton="kernels.delta_rule:gated_delta_rule", fla="gated_delta_rule.fla:kda")


def kda(
    q: Float[Tensor, "batch time key_heads key"],
    k: Float[Tensor, "batch time key_heads key"],
    v: Float[Tensor, "batch time heads value"],
    log_decay: Float[Tensor, "batch time heads key"],
    beta: Float[Tensor, "batch time heads"],
    *,
    normalize_qk: bool = False,
    read_gate: Float[Tensor, "batch time heads"] | None = None,
    write_gate: Float[Tensor, "batch time heads"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "sequences heads key value"] | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    context_group: ProcessGroup | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch time heads value"], Float[Tensor, "sequences heads key value"] | None]:
    """S' = diag(exp(log_decay_t)) S_{t-1} ;  u_t = beta_t (write_gate_t v_t - k_t S') ;  S_t = S' + k_t^T u_t

    o_t = scale * (read_gate_t q_t) S_t

    v may have n times the heads of q and k: key head h then serves the value heads n*h to n*h + n - 1.

    Args:
        log_decay: logarithm of the decay of each key channel, per value head, usually at most 0.
        beta: strength of the update, usually between 0 and 1.
        normalize_qk: first scale q and k to unit length, x / sqrt(|x|^2 + 1e-6).
        read_gate: multiplies the queries, per token and value head; none unless given.
        write_gate: multiplies the values, per token and value head; none unless given.
        scale: of the queries; key width ** -0.5 unless given.
        initial_state: state before the first token, one per sequence; zeros unless given.
        return_state: also return the state after the last token.
        cu_seqlens: boundaries of packed sequences, with batch 1: [sequences + 1] integers, or a `Packing`.
        context_group: process group whose ranks hold consecutive segments of every sequence.
        backend: "auto", "reference", "chunkwise", "triton" or "fla"; one that is named never falls back to another.

    Returns:
        o: outputs, in the dtype of q.
        state: in float32 (float64 for float64 inputs), or None without `return_state`.
    """
    packing = check_recurrence(
        "kda",
        q,
        k,
        v,
        read_gate=read_gate,
        write_gate=write_gate,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        context_group=context_group,
        value_heads=True,
    )
    check_shape("kda", "log_decay", log_decay, "batch, time, heads, key", (*v.shape[:3], q.shape[3]), q.device)
    check_shape("kda", "beta", beta, "batch, time, heads", v.shape[:3], q.device)
    computed_in = torch.float32 if q.dtype == torch.float16 else q.dtype  # by the kernels
    columns = 0 if context_group is None else q.shape[3]
    run = dispatch("kda", backend, q, too_wide(q, v, columns) or too_wide_for_the_gpu(q, computed_in))
    run = over_pieces(run, context_group, erasing)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("kda", "scale", scale)
    with no_autocast(q.device):
        o, state = run(q, k, v, log_decay, beta, normalize_qk, read_gate, write_gate, scale, initial_state, packing, return_state)
    return o, state if return_state else None
