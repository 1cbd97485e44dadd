"""What the recurrent mixers share: projections, short convolution, gates, output norm and swish gate, and the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from headmax.layers.head_gate import HeadGate, HeadGateConfig
from headmax.layers.initialized import Initialized
from headmax.layers.norm import OutputNorm, OutputNormKind, RMSNorm, read_out, times_gates
from headmax.layers.projection import as_multiplied, bare, joins, joint_product, project
from headmax.layers.rotary import Rotary, RotarySettings, turned
from headmax.layers.short_conv import ShortConvolution
from headmax.ops.packing import Packing
from headmax.ops.recompute import recomputed


class RecurrentState(NamedTuple):
    """All a recurrent layer remembers, of constant size."""

    recurrent: Tensor
    """[sequences, heads, key, value]"""
    conv: tuple[Tensor, ...]
    """The last inputs of the short convolutions on q, k and v, [sequences, width - 1, channels]; empty without them."""


class StepTerms(NamedTuple):
    """What a fused decoding step must know of a mixer beside what all have in common."""

    decay: Literal["none", "head", "channel", "delta"]
    """Of the state: none, exp(decay_bias) per head, GLA's per channel, or the delta rule with its own."""
    feature: str
    """What becomes of q and k: the name of a feature map, or "unit_length"."""
    projections: tuple[nn.Linear, ...] = ()
    """Of the hidden state, beside q, k, v and the swish gate: what the decay, and the delta rule's beta, are made from."""
    decay_weight: Tensor | None = None
    decay_bias: Tensor | None = None
    normalizer: float = 1.0


class MixerOutput(NamedTuple):
    hidden: Tensor
    """[batch, time, hidden]"""
    state: tuple | None
    """What to hand to the next call, if `return_state`."""
    gates: tuple[Tensor | None, Tensor | None] | None
    """(read, write), each [batch, time, heads]; None for attention, and from a block that was not asked."""


class Projected(NamedTuple):
    """What a mixer makes of the hidden state before its recurrence."""

    heads: tuple[Tensor, ...]
    """q, k [B,T,H,K] and v [B,T,HV,V]."""
    conv: tuple[Tensor, ...]
    """The convolutions' new states."""
    side: list[Tensor]
    swish: Tensor | None
    """The gate of the output, if there is one, [B,T,HV*V]."""
    scores: Tensor | None
    """Those of the head gates side by side, if they came out of a product or of the convolutions."""
    ready: bool = False
    """Whether q and k are turned by their positions, or scaled, as the recurrence takes them."""


def head_width(name: str, width: int | None, total: int, num_heads: int) -> int:
    """A head's width: as given, or its share of `total`."""
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    if width is not None:
        if width < 1:
            raise ValueError(f"{name} must be at least 1, got {width}")
        return width
    if total % num_heads or total < num_heads:
        raise ValueError(f"{name}: {total} channels do not split over {num_heads} heads; give {name} or another num_heads")
    return total // num_heads


class RecurrentMixer(Initialized):
    """Softmax-X of the paper: o = X(read_gate * q, write_gate * k, v), then norm, swish gate and output projection.

    A subclass says what X is (`recur`); the delta rule has the write gate on v. With `head_gate=None` it is the plain backbone.
    """

    rotary: RotarySettings | None = None
    """What a subclass with rotary positions turns q and k by."""
    turns_projections = False
    """Whether it turns them as the projections give them."""
    side: tuple[str, ...] = ()
    """Names of further projections that a subclass's recurrence takes."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_k_dim: int,
        head_v_dim: int,
        num_v_heads: int | None = None,
        conv_size: int | None = None,
        output_gate: bool = True,
        output_norm: OutputNormKind = "head",
        norm_eps: float = 1e-6,
        head_gate: HeadGateConfig | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.num_heads, self.num_v_heads = num_heads, num_heads if num_v_heads is None else num_v_heads
        if self.num_v_heads < 1 or self.num_v_heads % num_heads:
            raise ValueError(f"num_v_heads must be a multiple of num_heads {num_heads}, got {num_v_heads}")
        self.head_k_dim, self.head_v_dim, self.conv_size, self.backend = head_k_dim, head_v_dim, conv_size, backend
        key, value = num_heads * head_k_dim, self.num_v_heads * head_v_dim
        self.q_proj = nn.Linear(hidden_size, key, bias=False)
        self.k_proj = nn.Linear(hidden_size, key, bias=False)
        self.v_proj = nn.Linear(hidden_size, value, bias=False)
        self.g_proj = nn.Linear(hidden_size, value, bias=False) if output_gate else None
        self.o_proj = nn.Linear(value, hidden_size, bias=False)
        self.convs = nn.ModuleList(ShortConvolution(width, conv_size) for width in (key, key, value)) if conv_size else None
        self.output_norm = OutputNorm(output_norm, self.num_v_heads, head_v_dim, norm_eps, backend)
        self.head_gate: HeadGate | None = None
        self.read_after_norm = False
        if head_gate is not None:
            self.add_head_gate(head_gate)

    def add_head_gate(self, config: HeadGateConfig) -> None:
        """Gates for a mixer that has none, on its device and in its dtype."""
        if not isinstance(config, HeadGateConfig):
            raise ValueError(f"head_gate must be a HeadGateConfig or None, got {config!r}")
        if self.head_gate is not None:
            raise ValueError("head_gate: the mixer has gates already")
        self.head_gate = config.build(
            hidden_size=self.q_proj.in_features, num_heads=self.num_v_heads, head_dim=self.head_k_dim, like=self.q_proj.weight
        )
        self.read_after_norm = config.read_position == "after_norm"

    def turn(
        self, q: Tensor, k: Tensor, positions: Tensor | Rotary | None, state: RecurrentState | None, packing: Packing | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [B,T,H,K] by their positions, where a subclass has such."""
        return q, k

    def recur(self, q: Tensor, k: Tensor, v: Tensor, side: Sequence[Tensor], ready: bool, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The recurrence on q, k [B,T,H,K], v [B,T,HV,V] and the `side` projections; `options` are gates, state, packing and backend."""
        raise TypeError(f"{type(self).__name__} does not define a recurrence")

    def step_terms(self) -> StepTerms:
        """For the kernel that decodes one token."""
        raise TypeError(f"{type(self).__name__} does not say how one token is decoded")

    def forward(
        self,
        x: Tensor,
        *,
        state: RecurrentState | None = None,
        return_state: bool = False,
        positions: Tensor | Rotary | None = None,
        packing: Packing | None = None,
        mask: Tensor | None = None,
    ) -> MixerOutput:
        """x [B,T,E] → MixerOutput. `mask` [B,T] is 0 where a token is padding: on the left, where it leaves no trace in the state.

        On the right it changes no output before it, but the state then decays through it and must not be continued.
        """
        if mask is not None:
            x = x.masked_fill(~mask.bool().unsqueeze(-1), 0.0)
        (q, k, v), conv, side, swish, scores, ready = self.project(x, state, packing, return_state, positions)
        read, write = (None, None) if self.head_gate is None else self.head_gate(q, k, x, scores, self.backend)
        if not ready:
            q, k = self.turn(q, k, positions, state, packing)
        o, recurrent = self.recur(
            *(q, k, v),
            side,
            ready,
            read_gate=None if self.read_after_norm else read,
            write_gate=write,
            initial_state=None if state is None else state.recurrent,
            return_state=return_state,
            cu_seqlens=packing,
            backend="reference" if self.backend == "auto" and x.shape[1] == 1 else self.backend,  # one token is no chunk
        )
        mixed = self.finish(o, swish, read if self.read_after_norm else None)
        new_state = RecurrentState(recurrent, conv) if recurrent is not None else None
        return MixerOutput(mixed, new_state, (read, write))

    def finish(self, o: Tensor, swish: Tensor | None, read: Tensor | None) -> Tensor:
        """The read-out [B,T,H,V] normalised, times a read gate that comes after the norm and the swish gate, and projected."""
        whole = bare(self.output_norm, OutputNorm) and self.output_norm.kind == "head" and bare(self.output_norm.norm, RMSNorm)
        if whole and joins(self.o_proj):
            norm = self.output_norm.norm
            return read_out(o, swish, read, norm.weight, as_multiplied(self.o_proj.weight, o), norm.eps, self.backend)
        return self.o_proj(recomputed(lambda o, *gates: times_gates(self.output_norm(o), *gates), o, swish, read))

    def project(
        self, x: Tensor, state: RecurrentState | None, packing: Packing | None, return_state: bool, positions: Tensor | Rotary | None
    ) -> Projected:
        """All that is a product of x, q, k and v after the short convolution if there is one.

        In a training graph the gates' scores, and what else is small, come out of one product with q (see `project`). Not so v and the
        swish gate, which are larger: what goes to kernels, or comes from them in the backward pass, has to be copied out of the product, or
        into its gradient. Queries and keys that are turned first are both in it, and their kernel does the copying.
        """
        rotary = positions if self.turns_projections and isinstance(positions, Rotary) and joins(self.q_proj, self.k_proj) else None
        modules = [self.q_proj, *([getattr(self, name) for name in self.side] if rotary is None else [self.k_proj])]
        rows = None
        if self.head_gate is not None and (self.convs is None or self.head_gate.source != "head") and joins(*modules, self.k_proj):
            rows = self.head_gate.rows(self.q_proj.weight, self.k_proj.weight)
        v, swish = self.v_proj(x), None if self.g_proj is None else self.g_proj(x)
        if rotary is not None:
            product, sizes = joint_product(x, modules, rows)
            q, k, rest = turned(product, rotary, self.num_heads, self.head_k_dim, self.backend)
            heads = q, k, v.unflatten(-1, (-1, self.head_v_dim))
            return Projected(heads, (), [], swish, None if rows is None else rest[..., : sizes[-1]], True)
        (q, *side), scores = project(x, modules, rows)
        qkv, conv, found, ready = self.convolve([q, self.k_proj(x), v], state, packing, return_state)
        widths = (self.head_k_dim, self.head_k_dim, self.head_v_dim)
        heads = tuple(y.unflatten(-1, (-1, width)) for y, width in zip(qkv, widths, strict=True))
        return Projected(heads, conv, side, swish, scores if found is None else found, ready)

    def convolve(
        self, qkv: list[Tensor], state: RecurrentState | None, packing: Packing | None, return_state: bool
    ) -> tuple[list[Tensor], tuple[Tensor, ...], Tensor | None, bool]:
        """q, k and v [B,T,...] after the short convolutions, if there are such, and these' states; scores and `ready` as in Projected."""
        if self.convs is None:
            return qkv, (), None, False
        before = (None, None, None) if state is None else state.conv
        options = {"packing": packing, "return_state": return_state, "backend": self.backend}
        pairs = [conv(y, past, **options) for conv, y, past in zip(self.convs, qkv, before, strict=True)]
        return [y for y, _ in pairs], tuple(past for _, past in pairs), None, False
