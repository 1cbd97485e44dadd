"""Gated DeltaNet: the delta rule with a data-dependent decay per head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from headmax.layers.log_decay import softplus_decay
from headmax.layers.mixers.base import RecurrentMixer
from headmax.layers.mixers.config import ConvSize, RecurrentConfig, Shared, Width
from headmax.layers.mixers.state import RecurrentSlots, RecurrentState
from headmax.layers.mixers.terms import Convolved, Projected, Recurrence, StepTerms
from headmax.layers.short_conv import last_inputs, unit_convolution
from headmax.ops import gated_delta_rule
from headmax.ops.checks import compute_dtype
from headmax.ops.gated_delta_rule.spec import SPEC
from headmax.ops.packing import Packing


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(RecurrentConfig):
    """Settings of Gated DeltaNet."""

    name, title, recipe = "gated_deltanet", "Gated DeltaNet", "gdn"
    spec = SPEC
    fla = ("gated_deltanet", "GatedDeltaNet", "GatedDeltaNet")
    lora_targets = (*RecurrentConfig.lora_targets, "a_proj", "b_proj")
    expand_k = 0.5

    num_v_heads: Width | None = None
    """Value heads, a multiple of the key heads; as many unless given."""
    conv_size: ConvSize = 4
    """Width of the short convolution on q, k and v; 0 for none."""

    def value_heads(self, num_heads: int) -> int:
        heads = num_heads if self.num_v_heads is None else self.num_v_heads
        if heads % max(num_heads, 1):
            raise ValueError(f"num_v_heads must be a multiple of num_heads {num_heads}, got {heads}")
        return heads

    def build(self, hidden_size: int, num_heads: int, **options: Unpack[Shared]) -> GatedDeltaNet:
        return GatedDeltaNet(hidden_size, num_heads, self, **options)


def initial_step(like: Tensor) -> Tensor:
    """Values whose softplus is log-uniform in (0.001, 0.1)."""
    step = torch.exp(torch.empty_like(like).uniform_(math.log(1e-3), math.log(1e-1)))
    return step + torch.log(-torch.expm1(-step))


class GatedDeltaNet(RecurrentMixer):
    """S' = α_t S_{t-1} ;  u_t = β_t (G^K_t v_t - k_t S') ;  S_t = S' + k_t^T u_t ;  o_t = (G^Q_t q_t) S_t

    with log α = -exp(A_log) softplus(W_a x + dt_bias), β = sigmoid(W_b x) and q, k of unit length. `num_v_heads` may be a
    multiple of `num_heads`; the gates are then over the value heads.
    """

    side = ("a_proj", "b_proj")
    config: GatedDeltaNetConfig

    def __init__(
        self, hidden_size: int, num_heads: int, config: GatedDeltaNetConfig = GatedDeltaNetConfig(), **options: Unpack[Shared]
    ) -> None:
        super().__init__(hidden_size, num_heads, config, **options)
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads))
        self.reset_parameters()

    def initial_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """A uniform in (0, 16); softplus(dt_bias) log-uniform in (0.001, 0.1), as Mamba-2 starts."""
        yield self.A_log, torch.empty_like(self.A_log).uniform_(1e-4, 16).log()
        yield self.dt_bias, initial_step(self.dt_bias)

    def convolve(
        self,
        qkv: Sequence[Tensor],
        state: RecurrentState | RecurrentSlots | None,
        packing: Packing | None,
        return_state: bool,
        fused: bool,
    ) -> Convolved:
        """Fused, q and k leave their convolutions scaled to unit length, and scored for the gates before that."""
        if not fused or self.convs is None:
            return super().convolve(qkv, state, packing, return_state, fused)
        gate = self.head_gate
        scorers = (None, None) if gate is None or gate.source != "head" else (gate.read_weight, gate.write_weight)
        before, options = self.inputs_before(qkv, state, packing), {"packing": packing, "backend": self.backend}
        (q, read), (k, write) = (
            unit_convolution(y, conv.weight, scorer, self.num_heads, past, **options)  # type: ignore[arg-type]
            for y, conv, scorer, past in zip(qkv, self.convs, scorers, before, strict=False)
        )
        v, _ = self.convs[2](qkv[2], before[2], **options)
        scores = [score for score in (read, write) if score is not None]
        conv = tuple(last_inputs(y, self.conv_size, past, packing) for y, past in zip(qkv, before, strict=True)) if return_state else ()
        return Convolved([q, k, v], conv, torch.cat(scores, dim=-1) if scores else None, unit_length=True)

    def recurrence(self, p: Projected) -> Recurrence:
        a, b = p.side
        log_decay, beta = softplus_decay(a, self.A_log, self.dt_bias, self.backend), b.to(compute_dtype(b.dtype)).sigmoid()
        return Recurrence(gated_delta_rule, (p.q, p.k, p.v, log_decay, beta), {"normalize_qk": not p.unit_length})

    def step_terms(self) -> StepTerms:
        return StepTerms("delta", "unit_length", (self.a_proj, self.b_proj), self.A_log, self.dt_bias)
