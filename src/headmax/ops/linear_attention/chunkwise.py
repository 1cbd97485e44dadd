"""Chunkwise-parallel linear attention in plain PyTorch: any device, any dtype, exact for any decay <= 0."""

from __future__ import annotations

import torch
from torch import Tensor

from headmax.ops.checks import compute_dtype
from headmax.ops.chunks import Chunks, chunk_scan, decay_from_start, decay_to_end, in_segments, pairwise_decay
from headmax.ops.packing import Packing
from headmax.ops.sequential import gated, per_value_head


@in_segments
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    read_gate: Tensor | None,
    write_gate: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    packing: Packing | None,
) -> tuple[Tensor, Tensor]:
    """Within a chunk O = (Q K^T ⊙ D) V, with D_ij the decay from j to i; between chunks the state is carried by a scan."""
    dtype = compute_dtype(q.dtype)
    chunks = Chunks(q.shape[1], packing)
    read = scale if read_gate is None else (scale * read_gate.to(dtype)).unsqueeze(-1)
    q, k, v, in_dtype = per_value_head(q.to(dtype), v), per_value_head(k.to(dtype), v), v.to(dtype), q.dtype
    qc, kc, vc = chunks.split(q * read), chunks.split(gated(k, write_gate)), chunks.split(v)
    state = chunks.first_state(initial_state, qc, q.shape[3], v.shape[3])
    scores = qc @ kc.mT
    if log_decay is None:
        scores = scores.tril()
        decay = qc.new_ones(1, 1, 1, 1, 1).expand(*qc.shape[:3], 1, 1)
    else:
        steps = chunks.split(log_decay.to(dtype).expand(q.shape[:3]))
        scores = scores * pairwise_decay(steps)
        qc, kc = gated(qc, decay_from_start(steps)), gated(kc, decay_to_end(steps))
        decay = steps.sum(-1).exp()[..., None, None]
    states, state = chunk_scan(kc.mT @ vc, decay, state, chunks.starts)
    o = torch.matmul(scores, vc) + torch.matmul(qc, states)
    return chunks.join(o).to(in_dtype), state
