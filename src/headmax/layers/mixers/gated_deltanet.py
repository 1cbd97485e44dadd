"""Gated DeltaNet: the delta rule with a data-dependent decay per head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmax.layers.head_gate import HeadGateConfig
from headmax.layers.mixers.base import Convolved, Projected, RecurrentMixer, RecurrentSlots, RecurrentState, Run, StepTerms, head_width
from headmax.layers.norm import OutputNormKind
from headmax.layers.short_conv import last_inputs, unit_convolution
from headmax.ops import gated_delta_rule
from headmax.ops.checks import compute_dtype
from headmax.ops.packing import Packing


class GatedDeltaNet(RecurrentMixer):
    """S' = α_t S_{t-1} ;  u_t = β_t (G^K_t v_t - k_t S') ;  S_t = S' + k_t^T u_t ;  o_t = (G^Q_t q_t) S_t

    with log α = -exp(A_log) softplus(W_a x + dt_bias), β = sigmoid(W_b x) and q, k of unit length. `num_v_heads` may be a
    multiple of `num_heads`; the gates are then over the value heads.
    """

    side = ("a_proj", "b_proj")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        num_v_heads: int | None = None,
        conv_size: int | None = 4,
        output_norm: OutputNormKind = "head",
        norm_eps: float = 1e-6,
        head_gate: HeadGateConfig | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            head_k_dim=head_width("head_k_dim", head_k_dim, hidden_size // 2, num_heads),
            head_v_dim=head_width("head_v_dim", head_v_dim, hidden_size, num_heads if num_v_heads is None else max(num_v_heads, 1)),
            num_v_heads=num_v_heads,
            conv_size=conv_size,
            output_norm=output_norm,
            norm_eps=norm_eps,
            head_gate=head_gate,
            backend=backend,
        )
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads))
        self.reset_parameters()

    def initial_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """A uniform in (0, 16); softplus(dt_bias) log-uniform in (0.001, 0.1), as Mamba-2 starts."""
        yield self.A_log, torch.empty_like(self.A_log).uniform_(1e-4, 16).log()
        step = torch.exp(torch.empty_like(self.dt_bias).uniform_(-6.9077553, -2.3025851))
        yield self.dt_bias, step + torch.log(-torch.expm1(-step))

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
        before, options = (None, None, None) if state is None else state.conv, {"packing": packing, "backend": self.backend}
        (q, read), (k, write) = (
            unit_convolution(y, conv.weight, scorer, self.num_heads, past, **options)  # type: ignore[arg-type]
            for y, conv, scorer, past in zip(qkv, self.convs, scorers, before, strict=False)
        )
        v, _ = self.convs[2](qkv[2], before[2], **options)
        scores = [score for score in (read, write) if score is not None]
        assert self.conv_size is not None
        conv = tuple(last_inputs(y, self.conv_size, past, packing) for y, past in zip(qkv, before, strict=True))
        return Convolved([q, k, v], conv if return_state else (), torch.cat(scores, dim=-1) if scores else None, unit_length=True)

    def recurrence(self, p: Projected, run: Run) -> tuple[Tensor, Tensor | None]:
        dtype = compute_dtype(p.q.dtype)
        a, b = (y.to(dtype) for y in p.side)
        log_decay, beta = -self.A_log.to(dtype).exp() * F.softplus(a + self.dt_bias.to(dtype)), b.sigmoid()
        return run(gated_delta_rule, p.q, p.k, p.v, log_decay, beta, normalize_qk=not p.unit_length)

    def step_terms(self) -> StepTerms:
        return StepTerms("delta", "unit_length", (self.a_proj, self.b_proj), self.A_log, self.dt_bias)
