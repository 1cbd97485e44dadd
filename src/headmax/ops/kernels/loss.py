"""Cross-entropy of rows of logits, and its gradient in their place: one kernel, one row a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.common import LOG2_E
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import power_of_2


@triton.jit
def cross_entropy_kernel(logits, labels, losses, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """loss = log Σ exp(logits) - logits[label];  logits ← softmax(logits) - onehot(label).  Rows with a negative label give zeros.

    In: logits [rows, V], rows `stride` apart, labels [rows]. Out: losses [rows].
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    p_row = logits + row * stride
    o_b = tl.arange(0, BLOCK)
    b_max, b_sum = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        b_x = tl.load(p_row + start + o_b, mask=start + o_b < V, other=-float("inf")).to(tl.float32)  # [BLOCK]
        b_new_max = tl.maximum(b_max, b_x)
        b_level = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)
        b_sum = b_sum * tl.exp2((b_max - b_level) * LOG2_E) + tl.exp2((b_x - b_level) * LOG2_E)
        b_max = b_new_max
    row_max = tl.max(b_max, 0)
    row_sum = tl.sum(b_sum * tl.exp2((b_max - row_max) * LOG2_E), 0)  # relative to the highest: large logits lose no digits
    factor, m_counted = 1.0 / row_sum, label >= 0
    at_label = tl.load(p_row + tl.where(m_counted, label, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(m_counted, row_max - at_label + tl.log(row_sum), 0.0))
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        m_x = start + o_b < V
        b_x = tl.load(p_row + start + o_b, mask=m_x, other=-float("inf")).to(tl.float32)  # [BLOCK]
        b_dx = tl.exp2((b_x - row_max) * LOG2_E) * factor - tl.where(start + o_b == label, 1.0, 0.0)
        tl.store(p_row + start + o_b, tl.where(m_counted, b_dx, 0.0).to(logits.dtype.element_ty), mask=m_x)


def cross_entropy_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row of logits [N,V], which become their own gradient."""
    tokens, width = logits.shape
    losses = logits.new_empty(tokens, dtype=torch.float32)
    if not labels.is_contiguous() or logits.stride(1) != 1:
        raise ValueError(f"cross_entropy_rows: labels must be contiguous and logits' rows too, got strides {logits.stride()}")
    sizes = {"V": width, "BLOCK": min(4096, power_of_2(width)), "num_warps": 8}
    launch(cross_entropy_kernel, (tokens,), (logits, labels, losses, logits.stride(0)), sizes)
    return losses
