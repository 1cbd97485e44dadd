"""Linear attention with scalar decay: none (plain), per head (RetNet), per token and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headmax.ops.checks import check_number, check_recurrence, check_shape, too_wide
from headmax.ops.context import decaying, over_pieces
from headmax.ops.linear_attention import chunkwise, reference
from headmax.ops.packing import Packing
from headmax.ops.registry import dispatch, no_autocast, register_recurrence

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch.distributed import ProcessGroup

register_recurrence(
    "linear_attention",
    reference.linear_attention,
    chunkwise.linear_attention,
    triton="kernels.decayed_attention:decayed_attention",
    fla="linear_attention.fla:linear_attention",
)


def linear_attention(
    q: Float[Tensor, "batch time key_heads key"],
    k: Float[Tensor, "batch time key_heads key"],
    v: Float[Tensor, "batch time heads value"],
    log_decay: Float[Tensor, " heads"] | Float[Tensor, "batch time heads"] | None = None,
    *,
    read_gate: Float[Tensor, "batch time heads"] | None = None,
    write_gate: Float[Tensor, "batch time heads"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "sequences heads key value"] | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    context_group: ProcessGroup | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch time heads value"], Float[Tensor, "sequences heads key value"] | None]:
    """S_t = exp(log_decay_t) S_{t-1} + (write_gate_t k_t)^T v_t ;  o_t = scale * (read_gate_t q_t) S_t

    v may have n times the heads of q and k: key head h then serves the value heads n*h to n*h + n - 1.
    Gates, decays and states are per value head.

    Args:
        log_decay: logarithm of the decay, usually at most 0: [heads], [batch, time, heads], or None for no decay.
        read_gate: multiplies the queries, per token and value head; none unless given.
        write_gate: multiplies the keys, per token and value head; none unless given.
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
        "linear_attention",
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
    if log_decay is not None:
        if isinstance(log_decay, Tensor) and log_decay.ndim == 1:
            check_shape("linear_attention", "log_decay", log_decay, "heads", v.shape[2:3], q.device)
        else:
            check_shape("linear_attention", "log_decay", log_decay, "batch, time, heads", v.shape[:3], q.device)
    run = over_pieces(dispatch("linear_attention", backend, q, too_wide(q, v)), context_group, decaying)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("linear_attention", "scale", scale)
    with no_autocast(q.device):
        o, state = run(q, k, v, log_decay, read_gate, write_gate, scale, initial_state, packing, return_state)
    return o, state if return_state else None
