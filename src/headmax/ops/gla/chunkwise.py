"""Chunkwise-parallel gated linear attention in plain PyTorch: any device, any dtype, exact for any decay <= 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headmax.ops.checks import compute_dtype
from headmax.ops.chunks import Chunks, chunk_scan, in_segments
from headmax.ops.packing import Packing
from headmax.ops.sequential import gated


@in_segments
def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    read_gate: Tensor | None,
    write_gate: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    packing: Packing | None,
) -> tuple[Tensor, Tensor]:
    """Within a chunk O = A V with A_ij = Σ_c q_ic k_jc decay_c(j→i); between chunks the state is carried by a scan."""
    dtype = compute_dtype(q.dtype)
    chunks = Chunks(q.shape[1], packing)
    read = scale if read_gate is None else (scale * read_gate.to(dtype)).unsqueeze(-1)
    qc, kc, vc = chunks.split(q.to(dtype) * read), chunks.split(gated(k.to(dtype), write_gate)), chunks.split(v.to(dtype))
    scores, from_start, to_end = decayed_scores(qc, kc, chunks.split(log_decay.to(dtype)))
    decay = from_start[..., -1, :, None].exp()
    state = chunks.first_state(initial_state, qc, q.shape[3], v.shape[3])
    states, state = chunk_scan((kc * to_end.exp()).mT @ vc, decay, state, chunks.starts)
    o = torch.matmul(scores, vc) + torch.matmul(qc * from_start.exp(), states)
    return chunks.join(o).to(q.dtype), state


def decayed_scores(q: Tensor, k: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A_ij = Σ_c q_ic k_jc exp(Σ_{l=j+1..i} log_decay_lc) for i >= j, over [..., C, K] with C a power of two.

    exp cannot be split into a factor of i and a factor of j without one of them overflowing, unless a point between j and i
    is the origin. So the triangle is built by doubling: two finished blocks of s tokens are joined by the s x s square in
    which the second half reads the first, with the middle as origin. Both factors are then <= 1, no sum is a difference of
    larger ones, and all squares together are half of C x C. Also returns Σ_{l<=i} and Σ_{l>i} of log_decay over the chunk.
    """
    size = q.shape[-2]
    scores = (q * k).sum(-1)[..., None, None]
    from_start, to_end = log_decay.unsqueeze(-2), torch.zeros_like(log_decay).unsqueeze(-2)
    half = 1
    while half < size:
        q_second = q.unflatten(-2, (-1, 2, half))[..., 1, :, :]
        k_first = k.unflatten(-2, (-1, 2, half))[..., 0, :, :]
        start_first, start_second = from_start.unflatten(-3, (-1, 2)).unbind(-3)
        end_first, end_second = to_end.unflatten(-3, (-1, 2)).unbind(-3)
        square = (q_second * start_second.exp()) @ (k_first * end_first.exp()).mT
        top, bottom = scores.unflatten(-3, (-1, 2)).unbind(-3)
        scores = torch.cat([F.pad(top, (0, half)), torch.cat([square, bottom], -1)], -2)
        to_end = torch.cat([end_first + start_second[..., -1:, :], end_second], -2)
        from_start = torch.cat([start_first, start_second + start_first[..., -1:, :]], -2)
        half *= 2
    return scores.squeeze(-3), from_start.squeeze(-3), to_end.squeeze(-3)
