"""The gate: a softmax over heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from headmax.fields import suggest
from headmax.ops.checks import check_dense, check_floating, check_number, check_shape
from headmax.ops.head_gate import across_ranks, reference
from headmax.ops.registry import Lazy, dispatch, no_autocast, register

if TYPE_CHECKING:
    from jaxtyping import Float

for _name, _plain in (("head_gate", reference.head_gate), ("split_gates", reference.split_gates)):
    register(_name, {"reference": _plain, "triton": Lazy("headmax.ops.kernels.gate", _name, needs="triton", interpreted=True)})


def _check_settings(op: str, kind: str, temperature: float, scale: float) -> None:
    check_number(op, "temperature", temperature)
    check_number(op, "scale", scale)
    if kind not in ("softmax", "sigmoid"):
        raise ValueError(f"{op}: unknown kind {kind!r}{suggest(kind, ('softmax', 'sigmoid'))}")


def head_gate(
    x: Float[Tensor, "batch time heads dim"] | Float[Tensor, "batch time dim"],
    weight: Float[Tensor, "heads dim"],
    temperature: float = 1.0,
    scale: float = 1.0,
    *,
    kind: Literal["softmax", "sigmoid"] = "softmax",
    backend: str = "auto",
    tensor_group: ProcessGroup | None = None,
) -> Float[Tensor, "batch time heads"]:
    """gate = scale * softmax(temperature * score, over heads)

    x [B,T,H,D] with weight [H,D]: score_h = <x_h, weight_h>. With weight [n*H,D], head h of x scores the gates n*h to n*h + n - 1.
    x [B,T,E] with weight [H,E]: score = x @ weight.T.

    Args:
        x: queries or keys per head, or hidden states.
        weight: a score vector per gate.
        temperature: factor on the scores; larger values give sharper gates.
        scale: sum of the gates over heads.
        kind: "softmax", or the control without competition, "sigmoid": (2 scale / H) * sigmoid(temperature * score), the same at score 0.
        backend: "auto", "reference" or "triton".
        tensor_group: process group whose ranks each have an equal share of the heads; the softmax is over all of them.

    Returns:
        The gates, in float32 (float64 for float64 inputs).
    """
    check_dense("head_gate", "x", x)
    if x.ndim not in (3, 4):
        raise ValueError(f"head_gate: x must be [batch, time, heads, dim] or [batch, time, dim], got {list(x.shape)}")
    check_floating("head_gate", "x", x.dtype)
    check_dense("head_gate", "weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"head_gate: weight must be [heads, dim], got {list(weight.shape)}")
    gates = weight.shape[0]
    check_shape("head_gate", "weight", weight, "heads, dim", (gates, x.shape[-1]), x.device)
    if gates == 0 or x.numel() == 0:
        raise ValueError(f"head_gate: x {list(x.shape)} and weight {list(weight.shape)} must have no empty axis")
    if x.ndim == 4 and gates % x.shape[2]:
        raise ValueError(f"head_gate: weight must have a multiple of x's {x.shape[2]} heads, got {gates}")
    _check_settings("head_gate", kind, temperature, scale)
    with no_autocast(x.device):
        if tensor_group is not None:
            return across_ranks.head_gate(x, weight, temperature, scale, kind, tensor_group)
        return dispatch("head_gate", backend, x)(x, weight, temperature, scale, kind)


def split_gates(
    scores: Tensor,
    number: int,
    temperature: float = 1.0,
    scale: float = 1.0,
    *,
    kind: str = "softmax",
    backend: str = "auto",
    tensor_group: ProcessGroup | None = None,
) -> list[Tensor]:
    """`number` gates [B,T,H] as `head_gate` has them, from scores [B,T,number*H] that a product gave together; one message for all."""
    _check_settings("split_gates", kind, temperature, scale)
    check_dense("split_gates", "scores", scores)
    check_floating("split_gates", "scores", scores.dtype)
    if number < 1 or scores.shape[-1] % number:
        raise ValueError(f"split_gates: scores of {scores.shape[-1]} channels do not split into {number} gates")
    if tensor_group is not None:
        return across_ranks.split_gates(scores, number, temperature, scale, kind, tensor_group)
    return dispatch("split_gates", backend, scores)(scores, number, temperature, scale, kind)
