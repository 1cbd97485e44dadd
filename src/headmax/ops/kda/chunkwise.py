"""Chunkwise-parallel Kimi delta attention in plain PyTorch: any device, any dtype, exact for any decay <= 0."""

from __future__ import annotations

import torch
from torch import Tensor

from headmax.ops.checks import compute_dtype
from headmax.ops.chunks import Chunks, in_segments
from headmax.ops.gated_delta_rule.chunkwise import delta_scan
from headmax.ops.gated_delta_rule.reference import unit_length
from headmax.ops.gla.chunkwise import decayed_scores
from headmax.ops.packing import Packing
from headmax.ops.sequential import gated, per_value_head


@in_segments
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
    initial_state: Tensor | None,
    packing: Packing | None,
) -> tuple[Tensor, Tensor]:
    """The delta rule's chunk with gated linear attention's scores: with D_ijc the decay of channel c from j to i,

        (I + L) U = diag(β) (V - (K ⊙ D_start) S),   L_ij = β_i Σ_c k_ic k_jc D_ijc for i > j,
        O = A U + (Q ⊙ D_start) S,                   A_ij = Σ_c q_ic k_jc D_ijc for i >= j.

    What a token erases is what it would read with its key times β: L is A of those, made in the same pass.
    """
    dtype = compute_dtype(q.dtype)
    chunks = Chunks(q.shape[1], packing)
    q, k, v, in_dtype = q.to(dtype), k.to(dtype), v.to(dtype), q.dtype
    if normalize_qk:
        q, k = unit_length(q), unit_length(k)
    q, k = per_value_head(q, v), per_value_head(k, v)
    read = scale if read_gate is None else (scale * read_gate.to(dtype)).unsqueeze(-1)
    qc, kc, vc = chunks.split(q * read), chunks.split(k), chunks.split(gated(v, write_gate))
    steps, bc = chunks.split(log_decay.to(dtype)), chunks.split(beta.to(dtype))

    readers = torch.stack([qc, gated(kc, bc)])
    (scores, system), log_from_start, log_to_end = decayed_scores(readers, kc, steps)
    from_start = log_from_start.exp()
    reading, erasing = readers * from_start
    wanted = torch.cat([gated(vc, bc), erasing], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)  # takes what is below system's diagonal
    fresh, erase = solved.split([v.shape[3], q.shape[3]], -1)

    state = chunks.first_state(initial_state, qc, q.shape[3], v.shape[3])
    states, u, state = delta_scan(fresh, erase, kc * log_to_end.exp(), from_start[..., -1, :, None], state, chunks.starts)
    o = torch.matmul(scores, u) + torch.matmul(reading, states)
    return chunks.join(o).to(in_dtype), state
