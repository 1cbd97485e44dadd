"""The recurrence token by token, as the paper writes it: the oracle of gated linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from headmax.ops.sequential import gated, per_sequence


@per_sequence
def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    read_gate: Tensor | None,
    write_gate: Tensor | None,
    scale: float,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    q, k, decay = gated(q, read_gate) * scale, gated(k, write_gate), log_decay.exp()
    o = []
    for t in range(q.shape[1]):  # S_t = diag(a_t) S_{t-1} + k_t^T v_t
        state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(o, dim=1), state
