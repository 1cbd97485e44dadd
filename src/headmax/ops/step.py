"""A recurrence on a few tokens, with the state updated in place: all decoding runs this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headmax.ops.checks import check_dense, check_floating, check_number, check_rank, too_wide
from headmax.ops.registry import Lazy, dispatch, no_autocast, register

MOST_TOKENS = 16
"""Most tokens of a step, which are processed one after the other; more go through the chunked form."""
MOST_SEQUENCES = 65_535
"""Of the kernel's grid, along an axis that has no more programs."""

Op = Callable[..., tuple[Tensor, Tensor | None]]


def _step(op: Op, inputs: tuple[Tensor, ...], state: Tensor, scale: float, **options: Any) -> Tensor:
    o, new = op(*inputs, initial_state=state, return_state=True, scale=scale, backend="reference", **options)
    state.copy_(new)  # type: ignore[arg-type]
    return o


register("step", {"reference": _step, "triton": Lazy("headmax.ops.kernels.step", "step", needs="triton", interpreted=True)})


def _obstacle(op: Op, q: Tensor, v: Tensor) -> str | None:
    """Why the kernel cannot take a step of this op, or None."""
    if op.__name__ not in ("linear_attention", "gla", "gated_delta_rule", "kda"):
        return f"it does not support {op.__name__}"
    if len(q) > MOST_SEQUENCES:
        return f"it takes at most {MOST_SEQUENCES:,} sequences, got {len(q):,}"
    return too_wide(q, v)


@torch.no_grad()
def step(op: Op, *inputs: Tensor, state: Tensor, scale: float | None = None, backend: str = "auto", **options: Any) -> Tensor:
    """`op` on at most 16 tokens after `state`: o [B,T,HV,V]. The state is updated in place; there are no gradients.

    Args:
        op: a recurrence, such as `headmax.ops.gla`.
        inputs: its positional arguments: q [B,T,H,K], k, v [B,T,HV,V], then decays and beta.
        state: [B,HV,K,V], of any floating dtype; sums are float32 (float64 for float64 inputs).
        options: the op's keyword arguments, such as `read_gate` and `write_gate`, except `cu_seqlens`.
    """
    if not callable(op) or len(inputs) < 3:
        raise ValueError(f"step: give a recurrence such as headmax.ops.gla, then q, k, v and more, got {op!r:.80} and {len(inputs)} inputs")
    q, v = inputs[0], inputs[2]
    check_rank("step", "q", q, "batch, time, heads, key")
    check_rank("step", "v", v, "batch, time, heads, value")
    if not 1 <= q.shape[1] <= MOST_TOKENS:
        raise ValueError(f"step: q has {q.shape[1]} tokens, a step takes 1 to {MOST_TOKENS}: call {op.__name__} with an initial_state")
    check_dense("step", "state", state)
    check_floating("step", "state", state.dtype)
    expected = (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    if state.shape != expected or state.device != q.device:
        raise ValueError(
            f"step: state must be [batch, heads, key, value] = {list(expected)} on {q.device}, got {list(state.shape)} on {state.device}"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(state.stride(), state.shape, strict=True)):
        raise ValueError(f"step: state is written to, its elements must not share memory, got strides {state.stride()}: clone it")
    if "cu_seqlens" in options:
        raise ValueError("step: it takes no cu_seqlens: give each sequence a row of the batch")
    run = dispatch("step", backend, q, _obstacle(op, q, v))
    with no_autocast(q.device):
        return run(op, inputs, state, q.shape[3] ** -0.5 if scale is None else check_number("step", "scale", scale), **options)
