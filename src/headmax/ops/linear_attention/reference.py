"""The recurrence token by token, as the paper writes it: the oracle of linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from headmax.ops.sequential import gated, per_sequence, per_value_head


@per_sequence
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    read_gate: Tensor | None,
    write_gate: Tensor | None,
    scale: float,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    q, k = gated(per_value_head(q, v), read_gate) * scale, gated(per_value_head(k, v), write_gate)
    decay = None if log_decay is None else log_decay.exp().expand(v.shape[:3])
    o = []
    for t in range(q.shape[1]):  # S_t = a_t S_{t-1} + k_t^T v_t
        kept = state if decay is None else decay[:, t, :, None, None] * state
        state = kept + k[:, t, :, :, None] * v[:, t, :, None, :]
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(o, dim=1), state
