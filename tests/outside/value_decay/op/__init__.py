"""Linear attention whose state decays per value channel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headmax.ops.checks import check_recurrence, check_shape
from headmax.ops.gla.spec import SPEC as GLA
from headmax.ops.packing import Packing
from headmax.ops.registry import dispatch, register
from headmax.ops.sequential import gated, per_sequence


@per_sequence
def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, read_gate: Tensor | None, write_gate: Tensor | None, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, decay, o = gated(q, read_gate) * scale, gated(k, write_gate), log_decay.exp(), []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, :] + k[:, t, :, :, None] * v[:, t, :, None, :]
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(o, dim=1), state


register("value_decay", {"reference": reference})


def value_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    read_gate: Tensor | None = None,
    write_gate: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """S_t = S_{t-1} diag(exp(log_decay_t)) + (write_gate_t k_t)^T v_t ;  o_t = scale * (read_gate_t q_t) S_t"""
    packing = check_recurrence(
        "value_decay", q, k, v, read_gate=read_gate, write_gate=write_gate, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    check_shape("value_decay", "log_decay", log_decay, "batch, time, heads, value", v.shape, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = dispatch("value_decay", backend, q)(q, k, v, log_decay, read_gate, write_gate, scale, initial_state, packing, return_state)
    return o, state if return_state else None


SPEC = replace(GLA, name="value_decay", function=value_decay)
