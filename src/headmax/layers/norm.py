"""RMS normalisation: of the residual stream, and of the heads' outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from headmax.fields import suggest
from headmax.layers.initialized import Initialized
from headmax.layers.mlp import swish_gate
from headmax.ops.checks import check_shape, compute_dtype
from headmax.ops.registry import Lazy, dispatch, register
from headmax.ops.sequential import gated
from headmax.ops.tensor_parallel import copied, summed

OutputNormKind = Literal["head", "joint", "none"]

WIDEST = 2**14
"""Most channels of a row in a kernel."""


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), computed in float32."""
    wide = x.to(compute_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def apply_gates(o: Tensor, swish: Tensor | None, read: Tensor | None) -> Tensor:
    """The heads' outputs o [B,T,H,V] times read gates [B,T,H] and silu(swish [B,T,H V]), where given."""
    o = (o if read is None else gated(o, read)).flatten(2)
    return o if swish is None else swish_gate(o, swish)


def _rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if delta is None else x + delta
    return total, normalized(total, weight, eps)


def _norm_with_residual(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _rms_norm(x, None, weight, eps)


def _read_out(o: Tensor, swish: Tensor | None, read: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> Tensor:
    return F.linear(apply_gates(normalized(o, weight, eps), swish, read), out)


for _name, _plain in (("rms_norm", _rms_norm), ("norm_with_residual", _norm_with_residual), ("read_out", _read_out)):
    register(_name, {"reference": _plain, "triton": Lazy("headmax.layers.triton_norm", _name, needs="triton", interpreted=True)})


def _too_wide(x: Tensor) -> str | None:
    """Why a kernel cannot take rows of x, or None."""
    return f"more than {WIDEST} channels" if x.shape[-1] > WIDEST else None


def rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """x + delta (x without one), and that normalised; x [..., width], weight [width]."""
    check_shape("rms_norm", "weight", weight, "width", x.shape[-1:])
    return dispatch("rms_norm", backend, x, _too_wide(x))(x, delta, weight, eps)


def norm_with_residual(x: Tensor, weight: Tensor, eps: float, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """x [..., width] itself, and its norm: one backward kernel adds both gradients of x."""
    check_shape("norm_with_residual", "weight", weight, "width", x.shape[-1:])
    return dispatch("norm_with_residual", backend, x, _too_wide(x))(x, weight, eps)


def read_out(
    o: Tensor, swish: Tensor | None, read: Tensor | None, weight: Tensor, out: Tensor, eps: float, backend: str = "auto"
) -> Tensor:
    """(norm(o) * read * silu(swish)) out^T: each head of o [B,T,H,V] normalised, gates read [B,T,H], swish [B,T,H V], out [E,H V]."""
    check_shape("read_out", "weight", weight, "value", o.shape[-1:])
    check_shape("read_out", "out", out, "hidden, heads * value", (out.shape[0], o.shape[2] * o.shape[3]))
    return dispatch("read_out", backend, o, _too_wide(o))(o, swish, read, weight, out, eps)


class RMSNorm(Initialized):
    """y = weight * x / sqrt(mean(x^2) + eps), computed in float32."""

    def __init__(self, size: int, eps: float = 1e-6, backend: str = "auto") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.backend = eps, backend

    def initial_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        yield self.weight, torch.ones_like(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, None, self.weight, self.eps, self.backend)[1]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def residual_norm(norm: RMSNorm, residual: Tensor, delta: Tensor | None, fused: bool) -> tuple[Tensor, Tensor]:
    """residual + delta (or residual), and its norm. Fused, both are one kernel forward and one backward."""
    if not fused:
        residual = residual if delta is None else residual + delta
        return residual, norm(residual)
    if delta is None:
        return norm_with_residual(residual, norm.weight, norm.eps, norm.backend)
    return rms_norm(residual, delta.to(residual.dtype), norm.weight, norm.eps, norm.backend)


class OutputNorm(nn.Module):
    """Normalises the heads' outputs [batch, time, heads, value].

    "head": each head by itself, with one weight for all heads, as in the original backbones. It cancels a per-head factor
    (docs/derivation.md). "joint": all heads together, which keeps their proportions. "none": no norm.
    """

    tensor_group: ProcessGroup | None = None
    """Tensor parallelism: ranks with a share of the heads each."""

    def __init__(self, kind: OutputNormKind, num_heads: int, head_dim: int, eps: float, backend: str = "auto") -> None:
        super().__init__()
        if kind not in get_args(OutputNormKind):
            raise ValueError(f"output_norm: unknown {kind!r}{suggest(kind, get_args(OutputNormKind))}")
        self.kind = kind
        if kind != "none":
            self.norm = RMSNorm(head_dim if kind == "head" else num_heads * head_dim, eps, backend)

    def forward(self, o: Tensor) -> Tensor:
        if self.kind == "none":
            return o
        if self.kind == "joint" and self.tensor_group is not None:
            return self._over_ranks(o.flatten(2), self.tensor_group).view_as(o)
        return self.norm(o) if self.kind == "head" else self.norm(o.flatten(2)).view_as(o)

    def _over_ranks(self, o: Tensor, group: ProcessGroup) -> Tensor:
        """Joint norm over all ranks' channels of this rank's o [B,T,C]: one number per token is exchanged, and its gradient."""
        wide = o.to(compute_dtype(o.dtype))
        (squares,) = copied([summed(wide.square().sum(-1, keepdim=True), group)], group)
        mean = squares / (o.shape[-1] * group.size())
        return (wide * torch.rsqrt(mean + self.norm.eps) * self.norm.weight).to(o.dtype)
