"""Gated linear attention: a decay per key channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headmax.ops.checks import check_number, check_recurrence, check_shape, too_wide
from headmax.ops.context import decaying, over_pieces
from headmax.ops.gla import chunkwise, reference
from headmax.ops.packing import Packing
from headmax.ops.registry import dispatch, no_autocast, register_recurrence

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch.distributed import ProcessGroup

register_recurrence("gla", reference.gla, chunkwise.gla, triton="kernels.decayed_attention:decayed_attention", fla="gla.fla:gla")


def gla(
    q: Float[Tensor, "batch time heads key"],
    k: Float[Tensor, "batch time heads key"],
    v: Float[Tensor, "batch time heads value"],
    log_decay: Float[Tensor, "batch time heads key"],
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
    """S_t = diag(exp(log_decay_t)) S_{t-1} + (write_gate_t k_t)^T v_t ;  o_t = scale * (read_gate_t q_t) S_t

    Args:
        log_decay: logarithm of the decay of each key channel, usually at most 0.
        read_gate: multiplies the queries, per token and head; none unless given.
        write_gate: multiplies the keys, per token and head; none unless given.
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
        "gla",
        q,
        k,
        v,
        read_gate=read_gate,
        write_gate=write_gate,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        context_group=context_group,
    )
    check_shape("gla", "log_decay", log_decay, "batch, time, heads, key", q.shape, q.device)
    run = over_pieces(dispatch("gla", backend, q, too_wide(q, v)), context_group, decaying)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("gla", "scale", scale)
    with no_autocast(q.device):
        o, state = run(q, k, v, log_decay, read_gate, write_gate, scale, initial_state, packing, return_state)
    return o, state if return_state else None
