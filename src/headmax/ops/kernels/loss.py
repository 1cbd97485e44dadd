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
    """loss = log Σ exp(logits) - logits[label];  logits ← softmax(logits) - onehot(label).  Rows with a negative label give zeros."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    base = logits + row * stride
    columns = tl.arange(0, BLOCK)
    highest, total = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(base + start + columns, mask=start + columns < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, x)
        level = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp2((highest - level) * LOG2_E) + tl.exp2((x - level) * LOG2_E)
        highest = higher
    most = tl.max(highest, 0)
    sum_of_all = tl.sum(total * tl.exp2((highest - most) * LOG2_E), 0)  # relative to the highest: large logits lose no digits
    part, counted = 1.0 / sum_of_all, label >= 0
    at_label = tl.load(base + tl.where(counted, label, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counted, most - at_label + tl.log(sum_of_all), 0.0))
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        inside = start + columns < V
        x = tl.load(base + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = tl.exp2((x - most) * LOG2_E) * part - tl.where(start + columns == label, 1.0, 0.0)
        tl.store(base + start + columns, tl.where(counted, gradient, 0.0).to(logits.dtype.element_ty), mask=inside)


def cross_entropy_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row of logits [N,V], which become their own gradient."""
    tokens, width = logits.shape
    losses = logits.new_empty(tokens, dtype=torch.float32)
    if not labels.is_contiguous() or logits.stride(1) != 1:
        raise ValueError(f"cross_entropy_rows: labels must be contiguous and logits' rows too, got strides {logits.stride()}")
    sizes = {"V": width, "BLOCK": min(4096, power_of_2(width)), "num_warps": 8}
    launch(cross_entropy_kernel, (tokens,), (logits, labels, losses, logits.stride(0)), sizes)
    return losses
