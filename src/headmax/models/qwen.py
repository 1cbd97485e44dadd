"""The linear-attention layer of transformers' Qwen3-Next on our ops: its weights, its cache, and gates if wanted."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headmax.layers import HeadGate, HeadGateConfig
from headmax.layers.short_conv import short_convolution
from headmax.ops import gated_delta_rule
from headmax.ops.packing import Packing
from headmax.ops.sequential import gated


def is_qwen(module: nn.Module) -> bool:
    """By name, so that transformers' model file is not imported for it."""
    return type(module).__name__ == "Qwen3NextGatedDeltaNet"


class QwenGatedDeltaNet(nn.Module):
    """Takes the place of a `Qwen3NextGatedDeltaNet`, whose submodules it keeps under their names, so that checkpoints stay what they are.

    The gates are over the value heads, of which key head h serves those from n*h on.
    """

    head_gate: HeadGate | None

    def __init__(self, theirs: Any, head_gate: HeadGateConfig | None = None) -> None:
        super().__init__()
        if theirs.activation not in ("silu", "swish") or theirs.conv1d.bias is not None:
            raise ValueError("softmaxify: Qwen3-Next layers have a silu convolution without bias, this one has not")
        self.num_k_heads, self.num_v_heads = theirs.num_k_heads, theirs.num_v_heads
        self.head_k_dim, self.head_v_dim, self.layer_idx = theirs.head_k_dim, theirs.head_v_dim, theirs.layer_idx
        self.in_proj_qkvz, self.in_proj_ba, self.out_proj = theirs.in_proj_qkvz, theirs.in_proj_ba, theirs.out_proj
        self.conv1d, self.norm, self.A_log, self.dt_bias = theirs.conv1d, theirs.norm, theirs.A_log, theirs.dt_bias
        self.head_gate, self.read_after_norm = None, False
        if head_gate is not None:
            self.head_gate = head_gate.build(
                hidden_size=theirs.hidden_size, num_heads=self.num_v_heads, head_dim=self.head_k_dim, like=self.out_proj.weight
            )
            self.read_after_norm = head_gate.read_position == "after_norm"

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v side by side [B,T,D] as the convolution takes them, and z [B,T,HV,V], b and a [B,T,HV]."""
        each = self.num_v_heads // self.num_k_heads
        widths = [self.head_k_dim, self.head_k_dim, each * self.head_v_dim, each * self.head_v_dim]
        q, k, v, z = self.in_proj_qkvz(x).unflatten(-1, (self.num_k_heads, -1)).split(widths, dim=-1)
        b, a = self.in_proj_ba(x).unflatten(-1, (self.num_k_heads, -1)).split([each, each], dim=-1)
        joined = torch.cat([y.flatten(2) for y in (q, k, v)], dim=-1)
        return joined, z.flatten(2).unflatten(-1, (-1, self.head_v_dim)), b.flatten(2), a.flatten(2)

    def forward(self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        x = hidden_states if attention_mask is None else hidden_states.masked_fill(~attention_mask.bool().unsqueeze(-1), 0.0)
        time, bounds = x.shape[1], kwargs.get("cu_seq_lens_q")
        packing = None if bounds is None else Packing.of(bounds, x.device)
        joined, z, b, a = self.split(x)
        state = None
        if cache_params is not None:
            layer = cache_params.layers[self.layer_idx]
            state = layer.recurrent_states[0] if layer.has_previous_state[0] else None
            if packing is not None and state is not None:
                raise ValueError(
                    "cu_seq_lens_q packs whole sequences, but past_key_values holds the start of one: pass an empty cache or none"
                )
            width = self.conv1d.weight.shape[-1]
            seen = cache_params.update_conv_state(joined.transpose(1, 2), self.layer_idx, conv_kernel_size=width).transpose(1, 2)
            joined = joined if state is None else seen
        mixed = short_convolution(joined, self.conv1d.weight.squeeze(1), None, packing)[:, -time:]
        keys = self.num_k_heads * self.head_k_dim
        q, k, v = mixed.split([keys, keys, self.num_v_heads * self.head_v_dim], dim=-1)
        q, k = (y.unflatten(-1, (-1, self.head_k_dim)) for y in (q, k))
        read, write = (None, None) if self.head_gate is None else self.head_gate(q, k, x)
        o, new_state = gated_delta_rule(
            q,
            k,
            v.unflatten(-1, (-1, self.head_v_dim)),
            -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias),
            b.sigmoid().float(),
            normalize_qk=True,
            read_gate=None if self.read_after_norm else read,
            write_gate=write,
            initial_state=state,
            return_state=cache_params is not None,
            cu_seqlens=packing,
        )
        if cache_params is not None:
            cache_params.update_recurrent_state(new_state, self.layer_idx)
        o = self.norm(o.flatten(0, 2), z.flatten(0, 2)).view_as(z)
        return self.out_proj((gated(o, read) if self.read_after_norm else o).flatten(2))
