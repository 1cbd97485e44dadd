"""Forwards of transformers' linear-attention layers on our ops, one class per recurrence: their weights, their cache, gates if wanted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.accelerate import force_accelerate_hooks

from headmax.layers import HeadGate, HeadGateConfig
from headmax.layers.short_conv import short_convolution
from headmax.ops import gated_delta_rule, kda, linear_attention, step
from headmax.ops.checks import check_packing, compute_dtype
from headmax.ops.packing import Packing
from headmax.ops.sequential import gated
from headmax.ops.step import MOST_TOKENS, Op


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """x [B,T,D] with zeros where the mask [B,T] has them."""
    return x if mask is None else (x * mask[:, :, None]).to(x.dtype)


def packing_of(x: Tensor, cu_seq_lens_q: Tensor | None = None, seq_idx: Tensor | None = None, **others: Any) -> Packing | None:
    """The sequences in the row x [1,T,D], by either of the names that transformers has for them."""
    bounds = boundaries(seq_idx) if cu_seq_lens_q is None and seq_idx is not None else cu_seq_lens_q
    return check_packing("accelerate", bounds, x.shape[0], x.shape[1], x.device)


def boundaries(seq_idx: Tensor) -> Tensor:
    """Where the number of the sequence changes, in seq_idx [1,T]."""
    starts = (seq_idx.flatten().diff() != 0).nonzero().flatten() + 1
    return torch.cat([starts.new_zeros(1), starts, starts.new_tensor([seq_idx.numel()])])


def causal_convolution(x: Tensor, conv: nn.Conv1d, activation: str, packing: Packing | None) -> Tensor:
    """The activation of the depthwise convolution of x [B,T,D], in which no token sees a later one or one of another sequence."""
    weight = conv.weight.squeeze(1)
    if activation in ("silu", "swish"):
        return short_convolution(x, weight, None, packing, bias=conv.bias)
    before, bias = weight.shape[1] - 1, None if conv.bias is None else conv.bias.to(x.dtype)

    def convolve(row: Tensor) -> Tensor:
        return F.conv1d(row.transpose(1, 2), conv.weight.to(x.dtype), bias, groups=x.shape[2]).transpose(1, 2)

    if packing is None:
        y = convolve(F.pad(x, (0, 0, before, 0)))
    else:  # zeros before each sequence
        tokens = torch.arange(x.shape[1], device=x.device) + before * packing.sequence_ids
        row = x.new_zeros(1, x.shape[1] + before * packing.num_sequences, x.shape[2])
        y = convolve(row.index_copy(1, tokens + before, x))[:, tokens]
    return ACT2FN[activation](y)


class Memory:
    """A layer's part of transformers' cache. `transposed`: the cache has states [B,H,V,K], ours are [B,H,K,V]."""

    def __init__(self, cache: Any, layer_idx: int, packing: Packing | None, transposed: bool) -> None:
        self.cache, self.layer_idx, self.packing, self.transposed = cache, layer_idx, packing, transposed
        self.state: Tensor | None = None
        if cache is not None and cache.layers[layer_idx].has_previous_state[0]:
            self.state = self.laid_out(cache.layers[layer_idx].recurrent_states[0])
            check_no_packing(packing)

    def laid_out(self, state: Tensor) -> Tensor:
        """A state of the cache as ours, or one of ours as the cache's: a view."""
        return state.transpose(2, 3) if self.transposed else state

    def convolve(self, x: Tensor, conv: nn.Conv1d, activation: str) -> Tensor:
        """`causal_convolution` of x [B,T,D] behind the inputs that the cache kept, where it keeps the new ones."""
        time, row = x.shape[1], x
        if self.cache is not None:
            width = conv.weight.shape[-1]
            seen = self.cache.update_conv_state(x.transpose(1, 2), self.layer_idx, conv_kernel_size=width).transpose(1, 2)
            row = x if self.state is None else seen[:, 1 - width - time :]
        return causal_convolution(row, conv, activation, self.packing)[:, -time:]

    def recur(self, op: Op, *inputs: Tensor, **options: Any) -> Tensor:
        """o of the recurrence, from the cached state on; the cache has the new one."""
        if moves_in_place(self.state, inputs[0]):
            return step(op, *inputs, state=self.state, **options)  # type: ignore[arg-type]
        kept = self.cache is not None
        o, state = op(*inputs, initial_state=self.state, return_state=kept, cu_seqlens=self.packing, **options)
        if kept:
            self.cache.update_recurrent_state(self.laid_out(state), self.layer_idx)  # type: ignore[arg-type]
        return o


def moves_in_place(state: Tensor | None, q: Tensor) -> bool:
    """Whether `headmax.ops.step` takes these tokens: few of them after a state, without gradients."""
    return state is not None and q.shape[1] <= MOST_TOKENS and not torch.is_grad_enabled()


def check_no_packing(packing: Packing | None) -> None:
    if packing is not None:
        raise ValueError("cu_seq_lens_q packs whole sequences, but past_key_values holds the start of one: pass an empty cache or none")


@dataclass(frozen=True)
class Layer:
    """What must be known of one of transformers' classes."""

    forward: type[Forward]
    project: Callable[[Any, Tensor], tuple[Tensor, ...]]
    """(layer, x) → what is convolved, then what the recurrence and the output need beside it."""
    reads: tuple[str, ...]
    """Attributes of the layer that `project` and the output read, besides those of the forward."""
    out: str
    """The attribute that is its last projection,"""
    norm: str = "norm"
    """and the norm before that."""


class Forward:
    """Stands in a layer as its `forward`. The layer stays what it is: its class, its parameters and their names, its hooks."""

    reads: ClassVar[tuple[str, ...]]
    """Attributes of the layer."""
    heads: ClassVar[str]
    """Which of them is the number of gates,"""
    key_width: ClassVar[str]
    """and which is the width of a key."""

    def __init__(self, layer: nn.Module, about: Layer) -> None:
        self.layer: Any = layer
        self.about, self.read_after_norm = about, False

    @property
    def head_gate(self) -> HeadGate | None:
        return getattr(self.layer, "head_gate", None)

    def gate_sizes(self) -> dict[str, int]:
        """What `HeadGateConfig.build` asks for."""
        layer = self.layer
        out = getattr(layer, self.about.out)
        return {"hidden_size": out.out_features, "num_heads": getattr(layer, self.heads), "head_dim": getattr(layer, self.key_width)}

    def add_head_gate(self, config: HeadGateConfig) -> None:
        """Gates for a layer that has none, on its device and in its dtype."""
        self.layer.head_gate = config.build(**self.gate_sizes(), like=getattr(self.layer, self.about.out).weight)
        self.read_after_norm = config.read_position == "after_norm"

    def gates(self, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(write, read on the query, read after the norm), [B,T,heads] each, or None."""
        if self.head_gate is None:
            return None, None, None
        read, write = self.head_gate(q, k, x)
        return (write, None, read) if self.read_after_norm else (write, read, None)


class Convolved(Forward):
    """A layer with a short convolution over q, k and v."""

    transposed: ClassVar[bool] = False
    """Whether the cache has states as [B,H,V,K]."""

    @property
    def conv1d(self) -> nn.Conv1d:
        """Where accelerate's hooks are looked for."""
        return self.layer.conv1d

    @force_accelerate_hooks("conv1d")
    def __call__(self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        x = masked(hidden_states, attention_mask)
        memory = Memory(cache_params, self.layer.layer_idx, packing_of(x, **kwargs), self.transposed)
        mixed, *side = self.about.project(self.layer, x)
        mixed = memory.convolve(mixed, self.conv1d, self.layer.activation)
        return self.mix(x, mixed, side, memory, attention_mask)

    @abstractmethod
    def mix(self, x: Tensor, mixed: Tensor, side: list[Tensor], memory: Memory, mask: Tensor | None) -> Tensor:
        """What the layer gives, from what its convolution gave and its other projections."""


class GatedDelta(Convolved):
    """The gated delta rule: Qwen3-Next, Qwen3.5, OLMo-Hybrid. `project` gives q, k, v side by side, then z, b and a."""

    reads = ("layer_idx", "activation", "conv1d", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "A_log", "dt_bias")
    heads, key_width = "num_v_heads", "head_k_dim"

    def mix(self, x: Tensor, mixed: Tensor, side: list[Tensor], memory: Memory, mask: Tensor | None) -> Tensor:
        layer, dtype = self.layer, compute_dtype(x.dtype)
        z, b, a = side
        keys = layer.num_k_heads * layer.head_k_dim
        q, k, v = mixed.split([keys, keys, layer.num_v_heads * layer.head_v_dim], dim=-1)
        q, k = (y.unflatten(-1, (-1, layer.head_k_dim)) for y in (q, k))
        v, z = (y.unflatten(-1, (-1, layer.head_v_dim)) for y in (v, z))
        write, on_query, after_norm = self.gates(q, k, x)
        log_decay = -layer.A_log.to(dtype).exp() * F.softplus(a.to(dtype) + layer.dt_bias)
        beta = b.sigmoid().to(dtype) * (2 if getattr(layer, "allow_neg_eigval", False) else 1)
        o = memory.recur(gated_delta_rule, q, k, v, log_decay, beta, normalize_qk=True, read_gate=on_query, write_gate=write)
        o = getattr(layer, self.about.norm)(o.flatten(0, 2), z.flatten(0, 2)).view_as(z)
        return getattr(layer, self.about.out)(gated(o, after_norm).flatten(2))


class KimiDelta(Convolved):
    """Kimi delta attention: Kimi-Linear and its relatives. `project` gives q, k, v side by side, then the output's gate."""

    reads = ("layer_idx", "activation", "conv1d", "num_heads", "head_dim", "forget_gate", "b_proj", "o_norm", "o_proj")
    heads, key_width = "num_heads", "head_dim"

    def mix(self, x: Tensor, mixed: Tensor, side: list[Tensor], memory: Memory, mask: Tensor | None) -> Tensor:
        layer, dtype = self.layer, compute_dtype(x.dtype)
        q, k, v, gate = (y.unflatten(-1, (layer.num_heads, -1)) for y in (*mixed.chunk(3, dim=-1), *side))
        write, on_query, after_norm = self.gates(q, k, x)
        log_decay, beta = layer.forget_gate(x).to(dtype), layer.b_proj(x).sigmoid().to(dtype)
        o = memory.recur(kda, q, k, v, log_decay, beta, normalize_qk=True, read_gate=on_query, write_gate=write)
        return layer.o_proj(gated(layer.o_norm(o, gate), after_norm).flatten(2))


class Mamba2(Convolved):
    """S_t = exp(dt A) S_{t-1} + dt B_t^T x_t ;  o_t = C_t S_t + D x_t: linear attention whose write gate is dt.

    Mamba-2, Nemotron-H, Falcon-H1, Bamba, Granite 4, Zamba2. `project` gives x, B, C side by side, then the output's gate and dt.
    """

    reads = ("layer_idx", "activation", "conv1d", "num_heads", "n_groups", "ssm_state_size", "intermediate_size", "conv_dim",
             "time_step_limit", "A_log", "dt_bias", "D", "in_proj", "norm", "out_proj")  # fmt: skip
    heads, key_width = "num_heads", "ssm_state_size"
    transposed = True

    def mix(self, x: Tensor, mixed: Tensor, side: list[Tensor], memory: Memory, mask: Tensor | None) -> Tensor:
        layer, dtype = self.layer, compute_dtype(x.dtype)
        gate, dt = side
        keys = layer.n_groups * layer.ssm_state_size
        v, k, q = masked(mixed, mask).split([layer.intermediate_size, keys, keys], dim=-1)
        v, k, q = (y.unflatten(-1, (heads, -1)) for y, heads in ((v, layer.num_heads), (k, layer.n_groups), (q, layer.n_groups)))
        write, on_query, after_norm = self.gates(q, k, x)
        dt = F.softplus(dt.to(dtype) + layer.dt_bias.to(dtype))
        if memory.state is None or x.shape[1] > 1:  # as transformers has it: no limits on a single token after a state
            dt = dt.clamp(*layer.time_step_limit)
        log_decay = -layer.A_log.to(dtype).exp() * dt
        write = dt if write is None else dt * write
        o = memory.recur(linear_attention, q, k, v, log_decay, read_gate=on_query, write_gate=write, scale=1.0)
        o = (o + v * layer.D.to(v.dtype)[:, None]).flatten(2)
        # Falcon-H1 has a norm or none
        o = layer.norm(o, gate) if getattr(layer, "mamba_rms_norm", True) else o * F.silu(gate)
        return layer.out_proj(gated(o.to(x.dtype).unflatten(-1, (layer.num_heads, -1)), after_norm).flatten(2))


class Lightning(Forward):
    """Linear attention with a fixed decay per head: MiniMax. `project` gives q, k and v of each head side by side."""

    reads = ("layer_idx", "num_attention_heads", "head_dim", "slope_rate", "norm", "output_gate", "out_proj")
    heads, key_width = "num_attention_heads", "head_dim"

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer, x, packing = self.layer, hidden_states, packing_of(hidden_states, **kwargs)
        (mixed,) = self.about.project(layer, x)
        q, k, v = masked(mixed, attention_mask).unflatten(-1, (layer.num_attention_heads, -1)).chunk(3, dim=-1)
        write, on_query, after_norm = self.gates(q, k, x)
        inputs = q, k, v, -layer.slope_rate.flatten().to(compute_dtype(x.dtype))
        options: dict[str, Any] = {"scale": 1.0, "read_gate": on_query, "write_gate": write}
        state = None if past_key_values is None else past_key_values.get_linear_cache(layer.layer_idx)
        if state is not None:
            check_no_packing(packing)
        if moves_in_place(state, q):
            state = state.clone()  # type: ignore[union-attr]  # it is an output too
            o = step(linear_attention, *inputs, state=state, **options)
        else:
            o, state = linear_attention(*inputs, initial_state=state, return_state=True, cu_seqlens=packing, **options)
        if past_key_values is not None:
            past_key_values.set_linear_cache(layer.layer_idx, state)
        o = layer.output_gate(x).sigmoid() * layer.norm(o.flatten(2))
        return layer.out_proj(gated(o.unflatten(-1, (layer.num_attention_heads, -1)), after_norm).flatten(2)), state
