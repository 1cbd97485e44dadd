"""The gated delta rule: each write first erases what the key already recalls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headmax.ops.checks import check_number, check_recurrence, check_shape, too_wide
from headmax.ops.context import erasing, over_pieces
from headmax.ops.gated_delta_rule import chunkwise, reference
from headmax.ops.kernels.tiles import shared_memory
from headmax.ops.packing import Packing
from headmax.ops.registry import dispatch, no_autocast, register_recurrence

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch.distributed import ProcessGroup

register_recurrence(
    "gated_delta_rule",
    reference.gated_delta_rule,
    chunkwise.gated_delta_rule,
    triton="kernels.delta_rule:gated_delta_rule",
    fla="gated_delta_rule.fla:gated_delta_rule",
)


WIDE_DELTA = 150
"""KiB of shared memory that the kernels need for float32 keys wider than 128: both what is erased and what is written stay on chip."""


def too_wide_for_the_gpu(q: Tensor, computed_in: torch.dtype) -> str | None:
    """Why the kernels cannot take these keys on this GPU, or None."""
    if computed_in != torch.float32 or q.shape[3] <= 128 or q.device.type != "cuda":
        return None
    shared = shared_memory(q.device)
    return f"float32 keys wider than 128 need {WIDE_DELTA} KiB of shared memory, this GPU has {shared}" if shared < WIDE_DELTA else None


def gated_delta_rule(
    q: Float[Tensor, "batch time key_heads key"],
    k: Float[Tensor, "batch time key_heads key"],
    v: Float[Tensor, "batch time heads value"],
    log_decay: Float[Tensor, "batch time heads"],
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
    """S' = exp(log_decay_t) S_{t-1};  u_t = beta_t (write_gate_t v_t - k_t S');  S_t = S' + k_t^T u_t;  o_t = scale * (read_gate_t q_t) S_t

    v may have n times the heads of q and k: key head h then serves the value heads n*h to n*h + n - 1.

    Args:
        log_decay: logarithm of the decay, usually at most 0.
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
        "gated_delta_rule",
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
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        check_shape("gated_delta_rule", name, x, "batch, time, heads", v.shape[:3], q.device)
    columns = 0 if context_group is None else q.shape[3]
    run = dispatch("gated_delta_rule", backend, q, too_wide(q, v, columns) or too_wide_for_the_gpu(q, q.dtype))
    run = over_pieces(run, context_group, erasing)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("gated_delta_rule", "scale", scale)
    with no_autocast(q.device):
        o, state = run(q, k, v, log_decay, beta, normalize_qk, read_gate, write_gate, scale, initial_state, packing, return_state)
    return o, state if return_state else None
