"""What a mixer hands from one of its parts to the next, to its block, and to the decoding kernels."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from headmax.layers.padding import Padding
from headmax.ops.step import Op


class MixerOutput(NamedTuple):
    hidden: Tensor
    """[batch, time, hidden]"""
    state: tuple | None
    """The state after these tokens, if `return_state`."""
    gates: tuple[Tensor | None, Tensor | None] | None
    """(read, write), each [batch, time, heads]; None for attention, and from a block unless requested."""

    def pad(self, padding: Padding) -> MixerOutput:
        """Puts back the padding that was removed from a batch."""
        gates = self.gates and tuple(gate if gate is None else padding.restore(gate) for gate in self.gates)
        return MixerOutput(padding.restore(self.hidden), self.state, gates)  # type: ignore[arg-type]


class Weights(NamedTuple):
    """A mixer's matrices in the dtype of their products, for fused products."""

    joint: Tensor
    """Those that share a product, stacked, with rows of zeros at the end."""
    columns: list[int]
    """Columns of that product: of each projection, of the gates' scores (0 where they are no product of x), and of the zeros."""
    single: dict[str, Tensor]
    """The others, by the names of their modules."""


class Convolved(NamedTuple):
    """Output of the short convolutions."""

    qkv: list[Tensor]
    conv: tuple[Tensor, ...]
    """Their new states, if requested."""
    scores: Tensor | None
    """The head gates' scores [B,T,gates * HV], where a fused convolution computes them."""
    unit_length: bool = False
    """Whether each head of q and k has unit length."""


class Projected(NamedTuple):
    """What a mixer computes from the hidden state before its recurrence."""

    q: Tensor
    """[B,T,H,K]"""
    k: Tensor
    """[B,T,H,K]"""
    v: Tensor
    """[B,T,HV,V]"""
    side: tuple[Tensor, ...]
    """Outputs of the further projections, in the order of the mixer's `side`: for decays and strengths."""
    swish: Tensor | None
    """The output gate before its activation, [B,T,HV*V], if there is one."""
    read: Tensor | None
    """The read gate [B,T,HV]."""
    write: Tensor | None
    """The write gate [B,T,HV]."""
    conv: tuple[Tensor, ...]
    """The convolutions' new states."""
    tokens: Tensor | None = None
    """As in RecurrentState."""
    unit_length: bool = False
    """As in Convolved."""


class Recurrence(NamedTuple):
    """An op, its own inputs by position, and its own options; gates, backend, state and packing are added by `RecurrentMixer.forward`."""

    op: Op
    inputs: tuple[Tensor, ...]
    options: dict[str, Any] = {}


class StepTerms(NamedTuple):
    """What the fused decoding step needs to know of a mixer, besides what all mixers share."""

    decay: Literal["none", "retnet", "channel", "delta", "channel delta", "step"]
    """Decay of the state: none; RetNet's per head; GLA's per channel; the delta rule's per head or per channel; or Mamba-2's, whose step
    size is also a write gate."""
    feature: str
    """What q and k go through: the name of a feature map, or "unit_length"."""
    projections: tuple[nn.Linear, ...] = ()
    """Further projections of the hidden state, for the decay and the delta rule's beta."""
    decay_weight: Tensor | None = None
    decay_bias: Tensor | None = None
    normalizer: float = 1.0
    decay_up: nn.Linear | None = None
    """Maps the first projection to all key channels: inside the step's kernel for GLA, as a product of its own for KDA."""
    gate: tuple[nn.Linear, nn.Linear] | None = None
    """Two narrow matrices; the sigmoid of their product is a gate after the norm."""
    skip: Tensor | None = None
    """[heads] weight of the value that is added to a head's output (Mamba-2's D)."""
    swish_first: bool = False
    """Whether the swish gate comes before the norm."""
    scale: float | None = None
    """Scale of queries; 1 / sqrt(key) unless given."""
