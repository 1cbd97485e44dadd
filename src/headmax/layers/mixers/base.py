"""What the recurrent mixers share: projections, short convolution, gates, output norm and swish gate, and the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from headmax.layers.fusion import intact
from headmax.layers.head_gate import HeadGate, HeadGateConfig
from headmax.layers.head_parallel import divide, shard_part
from headmax.layers.initialized import Initialized
from headmax.layers.mixers.config import RecurrentConfig
from headmax.layers.norm import OutputNorm, RMSNorm, apply_gates, read_out
from headmax.layers.padding import Padding
from headmax.layers.projection import product_matrices
from headmax.layers.rotary import Rotary, RotarySettings
from headmax.layers.short_conv import ShortConvolution, inputs_before
from headmax.ops.packing import Packing
from headmax.ops.spec import Case
from headmax.ops.step import Op, step

WIDEST_KEY = 256
"""Channels of a head's key that a program of the decoding kernel holds."""


class RecurrentState(NamedTuple):
    """All a recurrent layer remembers, of constant size."""

    recurrent: Tensor
    """[sequences, heads, key, value]"""
    conv: tuple[Tensor, ...]
    """The last inputs of the short convolutions on q, k and v, [sequences, width - 1, channels]; empty without them."""
    tokens: Tensor | None = None
    """[sequences] how many tokens it holds, where a mixer that was given no positions counts them."""


class RecurrentSlots(NamedTuple):
    """The same as memory that a step moves on in place, a slot for each sequence."""

    recurrent: Tensor
    """[slots, heads, key, value]"""
    inputs: Tensor | None
    """[slots, width - 1, channels of q, k and v]; None without convolutions."""
    channels: tuple[int, ...]
    """How many of them each has."""

    @property
    def conv(self) -> tuple[Tensor, ...]:
        """As RecurrentState has it: views."""
        return () if self.inputs is None else self.inputs.split(self.channels, dim=-1)

    @classmethod
    def of(cls, state: RecurrentState) -> RecurrentSlots:
        """Copies of what a state holds."""
        inputs = torch.cat(state.conv, dim=-1) if state.conv else None
        return cls(state.recurrent.clone(memory_format=torch.contiguous_format), inputs, tuple(x.shape[-1] for x in state.conv))

    def rows(self, rows: slice) -> RecurrentSlots:
        """Some of the slots: views."""
        return RecurrentSlots(self.recurrent[rows], None if self.inputs is None else self.inputs[rows], self.channels)

    def state(self) -> RecurrentState:
        """The same memory, to be left as it is."""
        return RecurrentState(self.recurrent, self.conv)

    def moved_on(self, conv: tuple[Tensor, ...]) -> RecurrentSlots:
        """The same slots with the convolutions' new inputs."""
        for own, new in zip(self.conv, conv, strict=True):
            own.copy_(new)
        return self

    def store(self, state: RecurrentState | RecurrentSlots) -> None:
        torch._foreach_copy_([self.recurrent, *self.conv], [state.recurrent, *state.conv])


class StepTerms(NamedTuple):
    """What a fused decoding step must know of a mixer, besides what all mixers share."""

    decay: Literal["none", "retnet", "channel", "delta", "channel delta", "step"]
    """Of the state: none, RetNet's per head, GLA's per channel, the delta rule with one per head or per channel, or Mamba-2's, whose step
    is also a write gate."""
    feature: str
    """What becomes of q and k: the name of a feature map, or "unit_length"."""
    projections: tuple[nn.Linear, ...] = ()
    """The further projections of the hidden state from which decay and the delta rule's beta are computed."""
    decay_weight: Tensor | None = None
    decay_bias: Tensor | None = None
    normalizer: float = 1.0
    decay_up: nn.Linear | None = None
    """Raises the first projection to every key channel: GLA's in the step's kernel, KDA's as a product of its own."""
    gate: tuple[nn.Linear, nn.Linear] | None = None
    """Two narrow matrices whose product's sigmoid is a gate after the norm."""
    skip: Tensor | None = None
    """[heads] how much of its value a head reads directly."""
    swish_first: bool = False
    """Whether the swish gate comes before the norm."""
    scale: float | None = None
    """Of queries: 1 / sqrt(key) unless given."""


class MixerOutput(NamedTuple):
    hidden: Tensor
    """[batch, time, hidden]"""
    state: tuple | None
    """What to hand to the next call, if `return_state`."""
    gates: tuple[Tensor | None, Tensor | None] | None
    """(read, write), each [batch, time, heads]; None for attention, and from a block where they were not requested."""

    def restored(self, padding: Padding) -> MixerOutput:
        """Of a batch whose padding was removed: with it again."""
        gates = self.gates and tuple(gate if gate is None else padding.restore(gate) for gate in self.gates)
        return MixerOutput(padding.restore(self.hidden), self.state, gates)  # type: ignore[arg-type]


class Recurrence(NamedTuple):
    """What a mixer runs: an op, its inputs by position, and its own options, before which gates, backend, state and packing are added."""

    op: Op
    inputs: tuple[Tensor, ...]
    options: dict[str, Any] = {}


class Projected(NamedTuple):
    """What a mixer makes of the hidden state before its recurrence."""

    q: Tensor
    """[B,T,H,K]"""
    k: Tensor
    """[B,T,H,K]"""
    v: Tensor
    """[B,T,HV,V]"""
    side: tuple[Tensor, ...]
    """What decays and strengths are made from, as the mixer's `side` names them."""
    swish: Tensor | None
    """The gate of the output before its activation, [B,T,HV*V], if there is one."""
    read: Tensor | None
    """The head gates [B,T,HV]: what a token reads from each head,"""
    write: Tensor | None
    """and what it writes to each."""
    conv: tuple[Tensor, ...]
    """The convolutions' new states."""
    tokens: Tensor | None = None
    """As in RecurrentState."""
    unit_length: bool = False
    """As in Convolved."""


class Weights(NamedTuple):
    """A mixer's matrices in the dtype of their products, for fused ones."""

    joint: Tensor
    """Those that share a product, under each other, zeros below them."""
    columns: list[int]
    """Columns of that product: of each projection, of the gates' scores (0 where they are no product of x), and of the zeros."""
    single: dict[str, Tensor]
    """The others, by the names of their modules."""


class Convolved(NamedTuple):
    """What the short convolutions give."""

    qkv: list[Tensor]
    conv: tuple[Tensor, ...]
    """Their new states, if requested."""
    scores: Tensor | None
    """The head gates' scores [B,T,gates * HV], where a fused convolution makes them."""
    unit_length: bool = False
    """Whether each head of q and k has unit length."""


def head_width(name: str, width: int | None, total: int, num_heads: int) -> int:
    """A head's width: as given, or its share of `total`."""
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    if width is not None:
        return width
    if total % num_heads or total < num_heads:
        raise ValueError(f"{name}: {total} channels do not split over {num_heads} heads; give {name} or another num_heads")
    return total // num_heads


class RecurrentMixer(Initialized):
    """Softmax-X of the paper: o = X(read_gate * q, write_gate * k, v), then norm, swish gate and output projection.

    A subclass says what X is (`recurrence`); the delta rule has the write gate on v. With `head_gate=None` it is the plain backbone.
    """

    rotary: RotarySettings | None = None
    """How a subclass rotates q and k by their positions."""
    side: tuple[str, ...] = ()
    """Names of further projections that a subclass's recurrence takes."""
    single: tuple[str, ...] = ("k_proj", "v_proj", "g_proj", "o_proj")
    """Names of the projections that have a product of their own where fused ones share theirs."""
    shared: tuple[str, ...] = ()
    """Names of the projections that are not of single heads."""
    context_group: ProcessGroup | None = None
    """Ranks that hold a piece of every sequence each, in their order."""
    first_head: int = 0
    """Of the model's, where ranks have a share of them each; `num_heads` and `num_v_heads` are then this rank's."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        config: RecurrentConfig,
        *,
        norm_eps: float = 1e-6,
        head_gate: HeadGateConfig | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.config, self.num_heads, self.num_v_heads = config, config.key_heads(num_heads), config.value_heads(num_heads)
        self.head_k_dim = head_width("head_k_dim", config.head_k_dim, int(config.expand_k * hidden_size), self.num_heads)
        self.head_v_dim = head_width("head_v_dim", config.head_v_dim, int(config.expand_v * hidden_size), self.num_v_heads)
        self.conv_size, self.backend = config.conv_size, backend
        key, value = self.num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self.q_proj = nn.Linear(hidden_size, key, bias=False)
        self.k_proj = nn.Linear(hidden_size, key, bias=False)
        self.v_proj = nn.Linear(hidden_size, value, bias=False)
        self.g_proj = nn.Linear(hidden_size, value, bias=False) if config.output_gate else None
        self.o_proj = nn.Linear(value, hidden_size, bias=False)
        self.convs: nn.ModuleList | None = None
        if config.conv_size:
            self.convs = nn.ModuleList(ShortConvolution(width, config.conv_size, config.conv_bias) for width in (key, key, value))
        self.output_norm = OutputNorm(config.output_norm, self.num_v_heads, self.head_v_dim, norm_eps, backend)
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

    def set_tensor_mesh(self, mesh: DeviceMesh) -> None:
        """Its heads are from now on shared by the ranks of the mesh, as many for each, in their order."""
        group, ranks, norm = mesh.get_group(), mesh.size(), self.output_norm
        if self.num_heads < self.num_v_heads:
            divide(f"the key heads of {type(self).__name__}", self.num_heads, ranks)
        self.num_heads = divide(f"the heads of {type(self).__name__}", self.num_heads, ranks)
        self.num_v_heads //= ranks
        self.first_head = group.rank() * self.num_v_heads
        norm.tensor_group = group
        if self.head_gate is not None:
            self.head_gate.tensor_group = group
        shard_part(self, mesh, "o_proj", (*self.shared, *(["output_norm"] if norm.kind == "head" else [])))

    def fusible(self) -> bool:
        """Whether its parts are as they were built, so that fused ops may take their weights."""
        norm = self.output_norm
        return (
            intact(*(getattr(self, name) for name in ("q_proj", *self.side, *self.single) if getattr(self, name) is not None))
            and intact(*(self.convs or ()), kind=ShortConvolution, bias=True)
            and intact(norm, kind=OutputNorm)
            and (norm.kind == "none" or intact(norm.norm, kind=RMSNorm))
        )

    def forward(
        self,
        x: Tensor,
        *,
        state: RecurrentState | RecurrentSlots | None = None,
        return_state: bool = False,
        positions: Tensor | Rotary | None = None,
        packing: Packing | None = None,
        mask: Tensor | Padding | None = None,
        fused: bool = False,
    ) -> MixerOutput:
        """x [B,T,E] → MixerOutput. Where `mask` [B,T] is 0 there is no token, and nothing happens to the state.

        Slots move on in place; a state stays as it is, and another one is returned.
        """
        if self.context_group is not None and (state is not None or mask is not None):
            raise ValueError("context_group: pieces of sequences take no state and no mask; pack sequences and leave padding out")
        padding = Padding.of(mask) if isinstance(mask, Tensor) else mask
        if padding is not None and padding.empty:
            return MixerOutput(torch.zeros_like(x), state, None)
        if padding is not None:
            x, packing = padding.remove(x), padding.packing
        keep = return_state or isinstance(state, RecurrentSlots)
        weights = self.weights(x) if fused else None
        p = self.project(x, state=state, return_state=keep, positions=positions, packing=packing, weights=weights)
        op, inputs, options = self.recurrence(p)
        query_gate, norm_gate = (None, p.read) if self.read_after_norm else (p.read, None)
        options = {"read_gate": query_gate, "write_gate": p.write, "backend": self.backend, **options}
        new_state: RecurrentState | RecurrentSlots | None
        if isinstance(state, RecurrentSlots):
            o, new_state = step(op, *inputs, state=state.recurrent, **options), state.moved_on(p.conv)
        else:
            initial = None if state is None else state.recurrent
            if self.context_group is not None:
                options["context_group"] = self.context_group
            o, recurrent = op(*inputs, initial_state=initial, return_state=keep, cu_seqlens=packing, **options)
            new_state = None if recurrent is None else RecurrentState(recurrent, p.conv, p.tokens)
        output = MixerOutput(self.read_out(o, p, norm_gate, weights), new_state, (p.read, p.write))
        return output if padding is None else output.restored(padding)

    def joint(self) -> list[str]:
        """Names of the projections that fused ones compute in one product, together with the gates' scores.

        Only what is small joins: what goes to kernels has to be copied out of a joint product, and gradients into it.
        """
        return ["q_proj", *self.side]

    def weights(self, x: Tensor) -> Weights:
        """For fused products with x."""
        names, rows = self.joint(), self.score_rows()
        joint = [getattr(self, name).weight for name in names]
        if rows is not None:
            joint.append(rows)
        single = [name for name in self.single if name not in names and getattr(self, name) is not None]
        product, *others = product_matrices(x, [joint, *([getattr(self, name).weight] for name in single)])
        columns = [matrix.shape[0] for matrix in joint] + [0] * (rows is None)
        return Weights(product, [*columns, product.shape[0] - sum(columns)], dict(zip(single, others, strict=True)))

    def product(self, name: str, x: Tensor, weights: Weights | None) -> Tensor:
        """x through a projection, or times its weight where products are fused."""
        return getattr(self, name)(x) if weights is None else F.linear(x, weights.single[name])

    def joint_product(self, x: Tensor, weights: Weights) -> tuple[list[Tensor], Tensor | None]:
        """x times the joint matrix: what belongs to each projection, and the gates' scores, if they are among it."""
        *parts, scores, _ = F.linear(x, weights.joint).split_with_sizes(weights.columns, dim=-1)
        return parts, scores if weights.columns[-2] else None

    def project(
        self,
        x: Tensor,
        *,
        state: RecurrentState | RecurrentSlots | None,
        return_state: bool,
        positions: Tensor | Rotary | None,
        packing: Packing | None,
        weights: Weights | None,
    ) -> Projected:
        """q, k and v after the short convolution if there is one, the head gates made from them, and all else that is a product of x."""
        if weights is None:
            parts, scores = [getattr(self, name)(x) for name in ("q_proj", *self.side)], None
        else:
            parts, scores = self.joint_product(x, weights)
        qkv = [parts[0], self.product("k_proj", x, weights), self.product("v_proj", x, weights)]
        convolved = self.convolve(qkv, state, packing, return_state, weights is not None)
        q, k, v = convolved.qkv
        q, k = (y.unflatten(-1, (-1, self.head_k_dim)) for y in (q, k))
        read, write = self.gates(q, k, x, convolved.scores if scores is None else scores)
        swish = self.output_gate(x, weights)
        v = v.unflatten(-1, (-1, self.head_v_dim))
        return Projected(q, k, v, tuple(parts[1:]), swish, read, write, convolved.conv, unit_length=convolved.unit_length)

    def output_gate(self, x: Tensor, weights: Weights | None) -> Tensor | None:
        """The gate of the output before its activation, [B,T,HV*V], if there is one."""
        return None if self.g_proj is None else self.product("g_proj", x, weights)

    def score_rows(self) -> Tensor | None:
        """The gates' scores as a matrix on the hidden state [gates * HV, E], where they are linear in it."""
        if self.head_gate is None or (self.convs is not None and self.head_gate.source == "head"):
            return None
        return self.head_gate.rows(self.q_proj.weight, self.k_proj.weight)

    def gates(self, q: Tensor, k: Tensor, x: Tensor, scores: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(read, write) [B,T,HV], from their scores where these are known."""
        return (None, None) if self.head_gate is None else self.head_gate(q, k, x, scores, self.backend)

    def convolve(
        self,
        qkv: Sequence[Tensor],
        state: RecurrentState | RecurrentSlots | None,
        packing: Packing | None,
        return_state: bool,
        fused: bool,
    ) -> Convolved:
        """q, k and v [B,T,...] after the short convolutions, if there are such."""
        if self.convs is None:
            return Convolved(list(qkv), (), None)
        before = self.inputs_before(qkv, state, packing)
        options = {"packing": packing, "return_state": return_state, "backend": self.backend}
        pairs = [conv(y, past, **options) for conv, y, past in zip(self.convs, qkv, before, strict=True)]
        return Convolved([y for y, _ in pairs], tuple(past for _, past in pairs), None)

    def inputs_before(
        self, qkv: Sequence[Tensor], state: RecurrentState | RecurrentSlots | None, packing: Packing | None
    ) -> Sequence[Tensor | None]:
        """The convolutions' inputs before q, k and v: those of the state, or of the rank before this one."""
        if self.context_group is None:
            return (None, None, None) if state is None else state.conv
        joint = torch.cat(list(qkv), dim=-1)
        return inputs_before(joint, self.conv_size, packing, self.context_group).split([y.shape[-1] for y in qkv], dim=-1)

    def recurrence(self, p: Projected) -> Recurrence:
        """The op, and its own inputs from p's q [B,T,H,K], k [B,T,H,K], v [B,T,HV,V] and side projections."""
        raise TypeError(f"{type(self).__name__} does not define a recurrence")

    def read_out(self, o: Tensor, p: Projected, read: Tensor | None, weights: Weights | None) -> Tensor:
        """What the heads read, o [B,T,HV,V], normalised, times the swish gate and a read gate that comes after the norm, projected."""
        if weights is not None and self.output_norm.kind == "head":
            norm = self.output_norm.norm
            return read_out(o, p.swish, read, norm.weight, weights.single["o_proj"], norm.eps, self.backend)
        return self.product("o_proj", apply_gates(self.output_norm(o), p.swish, read), weights)

    def flops(self, length: int) -> float:
        """Of the recurrence, per token of a sequence of that length, forward."""
        case = Case(1, length, self.num_heads, self.head_k_dim, self.head_v_dim, value_heads=self.num_v_heads)
        return self.config.spec.flops(case) / length

    def slots(self, number: int, dtype: torch.dtype) -> RecurrentSlots:
        """Empty slots, recurrent states in `dtype`."""
        weight = self.q_proj.weight
        recurrent = weight.new_zeros(number, self.num_v_heads, self.head_k_dim, self.head_v_dim, dtype=dtype)
        if not self.conv_size:
            return RecurrentSlots(recurrent, None, ())
        key, value = self.num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        return RecurrentSlots(recurrent, weight.new_zeros(number, self.conv_size - 1, 2 * key + value), (key, key, value))

    def step_terms(self) -> StepTerms | None:
        """For the kernel that decodes one token; None where it does not know the recurrence."""
        return None

    def step_obstacle(self) -> str | None:
        """Why one token cannot run in the kernels of triton_block.py, or None."""
        terms = self.step_terms()
        if terms is None:
            return f"no kernel knows one token of {type(self).__name__}"
        if self.head_k_dim > WIDEST_KEY:
            return f"keys are at most {WIDEST_KEY} wide, got {self.head_k_dim}"
        ups = [] if terms.decay_up is None else [terms.decay_up]
        whole = self.fusible() and intact(*ups, bias=terms.decay == "channel")
        return None if whole else f"a part of a {type(self).__name__} block has been replaced"
