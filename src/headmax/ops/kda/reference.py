"""The recurrence token by token, as the paper writes it: the oracle of Kimi delta attention."""

from __future__ import annotations

import torch
from torch import Tensor

from headmax.ops.gated_delta_rule.reference import unit_length
from headmax.ops.sequential import gated, per_sequence, per_value_head


@per_sequence
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    normalize_qk: bool,
    read_gate: Tensor | None,
    write_gate: Tensor | None,
    scale: float,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    if normalize_qk:
        q, k = unit_length(q), unit_length(k)
    q, k = per_value_head(q, v), per_value_head(k, v)
    q, v, decay = gated(q, read_gate) * scale, gated(v, write_gate), log_decay.exp()
    o = []
    for t in range(q.shape[1]):
        kept = decay[:, t, :, :, None] * state  # S' = diag(a_t) S_{t-1}
        recalled = torch.einsum("bhk,bhkv->bhv", k[:, t], kept)
        u = beta[:, t, :, None] * (v[:, t] - recalled)  # u_t = b_t (v_t - k_t S')
        state = kept + k[:, t, :, :, None] * u[:, :, None, :]  # S_t = S' + k_t^T u_t
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(o, dim=1), state
