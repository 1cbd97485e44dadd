"""The base of all recurrent mixers: projections, short convolution, head gates, recurrence, output norm and swish gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from headmax.layers.mixers.state import RecurrentSlots, RecurrentState, check_inputs
from headmax.layers.mixers.terms import Convolved, MixerOutput, Projected, Recurrence, StepTerms, Weights
from headmax.layers.norm import OutputNorm, RMSNorm, apply_gates, read_out
from headmax.layers.padding import Padding
from headmax.layers.projection import product_matrices
from headmax.layers.rotary import Rotary, RotarySettings
from headmax.layers.short_conv import ShortConvolution, inputs_before
from headmax.ops.packing import Packing
from headmax.ops.spec import Case
from headmax.ops.step import step

WIDEST_KEY = 256
"""Most channels of a head's key that the fused decoding step takes."""


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
    """Rotary positions of q and k, in subclasses that have them."""
    side: tuple[str, ...] = ()
    """Names of further projections of x, for a subclass's decays and strengths."""
    single: tuple[str, ...] = ("k_proj", "v_proj", "g_proj", "o_proj")
    """Names of the projections that keep a product of their own when products are fused."""
    shared: tuple[str, ...] = ()
    """Names of the projections whose outputs do not belong to single heads: tensor parallelism does not split them."""
    context_group: ProcessGroup | None = None
    """Context parallelism: ranks that hold consecutive pieces of every sequence."""
    first_head: int = 0
    """Tensor parallelism: this rank's first head. `num_heads` and `num_v_heads` are then this rank's."""

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
        """Adds gates to a mixer that has none, on its device and in its dtype."""
        if not isinstance(config, HeadGateConfig):
            raise ValueError(f"head_gate must be a HeadGateConfig or None, got {config!r}")
        if self.head_gate is not None:
            raise ValueError("head_gate: the mixer has gates already; add_head_gate takes one that was built with head_gate=None")
        self.head_gate = config.build(**self.gate_sizes(), like=self.q_proj.weight)
        self.read_after_norm = config.read_position == "after_norm"

    def gate_sizes(self) -> dict[str, int]:
        """What `HeadGateConfig.build` asks for."""
        return {"hidden_size": self.q_proj.in_features, "num_heads": self.num_v_heads, "head_dim": self.head_k_dim}

    @property
    def of_all_heads(self) -> tuple[str, ...]:
        """Names of the parts that tensor parallelism does not split."""
        return (*self.shared, "output_norm") if self.output_norm.kind == "head" else self.shared

    def set_tensor_mesh(self, mesh: DeviceMesh) -> None:
        """Splits the heads over the ranks of the mesh."""
        group, ranks, norm = mesh.get_group(), mesh.size(), self.output_norm
        if self.num_heads < self.num_v_heads:
            divide(f"the key heads of {type(self).__name__}", self.num_heads, ranks)
        self.num_heads = divide(f"the heads of {type(self).__name__}", self.num_heads, ranks)
        self.num_v_heads //= ranks
        self.first_head = group.rank() * self.num_v_heads
        norm.tensor_group = group
        if self.head_gate is not None:
            self.head_gate.tensor_group = group
        shard_part(self, mesh, "o_proj", self.of_all_heads)

    def fusible(self) -> bool:
        """Whether fused ops may take the weights of its parts: all are as they were built."""
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
        """x [B,T,E] → MixerOutput. Slots are updated in place, for few tokens; a state stays as it is, and a new one is returned.

        Where `mask` [B,T] is 0 there is no token, and the state does not change.
        """
        if self.context_group is not None and (state is not None or mask is not None):
            raise ValueError("context_group: pieces of sequences take no state and no mask; pack sequences and leave padding out")
        check_inputs(type(self).__name__, x, state, packing, mask)
        padding = Padding.of(mask) if isinstance(mask, Tensor) else mask
        if padding is not None:
            return self._without_padding(x, padding, state=state, return_state=return_state, positions=positions, fused=fused)
        keep = return_state or isinstance(state, RecurrentSlots)
        weights = self.weights(x) if fused else None
        p = self.project(x, state=state, return_state=keep, positions=positions, packing=packing, weights=weights)
        op, inputs, options = self.recurrence(p)
        options = {"read_gate": self.query_gate(p), "write_gate": p.write, "backend": self.backend, **options}
        new_state: RecurrentState | RecurrentSlots | None
        if isinstance(state, RecurrentSlots):
            o, new_state = step(op, *inputs, state=state.recurrent, **options), state.update_conv(p.conv)
        else:
            if self.context_group is not None:
                options["context_group"] = self.context_group
            initial = None if state is None else state.recurrent
            o, recurrent = op(*inputs, initial_state=initial, return_state=keep, cu_seqlens=packing, **options)
            new_state = None if recurrent is None else RecurrentState(recurrent, p.conv, p.tokens)
        return MixerOutput(self.read_out(o, p, weights), new_state, (p.read, p.write))

    def _without_padding(self, x: Tensor, padding: Padding, state: RecurrentState | RecurrentSlots | None, **options: Any) -> MixerOutput:
        """`forward` on the tokens of a padded batch alone, packed."""
        if padding.empty:
            return MixerOutput(torch.zeros_like(x), state, None)
        return self.forward(padding.remove(x), state=state, packing=padding.packing, **options).pad(padding)

    def joint(self) -> list[str]:
        """Names of the projections that share one product with the gates' scores, when products are fused.

        Only narrow ones: kernels want contiguous inputs, which are copied out of a joint product, and gradients back into it.
        """
        return ["q_proj", *self.side]

    def weights(self, x: Tensor) -> Weights:
        """The matrices for fused products with x."""
        names, rows = self.joint(), self.score_rows()
        joint = [getattr(self, name).weight for name in names]
        if rows is not None:
            joint.append(rows)
        single = [name for name in self.single if name not in names and getattr(self, name) is not None]
        product, *others = product_matrices(x, [joint, *([getattr(self, name).weight] for name in single)])
        columns = [matrix.shape[0] for matrix in joint] + [0] * (rows is None)
        return Weights(product, [*columns, product.shape[0] - sum(columns)], dict(zip(single, others, strict=True)))

    def product(self, name: str, x: Tensor, weights: Weights | None) -> Tensor:
        """A projection of x: its module is called, or its weight is used directly when products are fused."""
        return getattr(self, name)(x) if weights is None else F.linear(x, weights.single[name])

    def joint_product(self, x: Tensor, weights: Weights) -> tuple[list[Tensor], Tensor | None]:
        """The output of each projection of the joint product, and the gates' scores if they are part of it."""
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
        """q, k, v after the short convolution, if there is one; the head gates; and the further projections of x."""
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
        """The output gate before its activation, [B,T,HV*V], if there is one."""
        return None if self.g_proj is None else self.product("g_proj", x, weights)

    def score_rows(self) -> Tensor | None:
        """The matrix [gates * HV, E] that maps x to the gates' scores, where these are linear in x."""
        if self.head_gate is None or (self.convs is not None and self.head_gate.source == "head"):
            return None
        return self.head_gate.rows(self.q_proj.weight, self.k_proj.weight)

    def gates(self, q: Tensor, k: Tensor, x: Tensor, scores: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(read, write) [B,T,HV], from their scores where these are known already."""
        return (None, None) if self.head_gate is None else self.head_gate(q, k, x, scores, self.backend)

    def query_gate(self, p: Projected) -> Tensor | None:
        """The read gate if it multiplies the query."""
        return None if self.read_after_norm else p.read

    def norm_gate(self, p: Projected) -> Tensor | None:
        """The read gate if it multiplies the normalised output."""
        return p.read if self.read_after_norm else None

    def convolve(
        self,
        qkv: Sequence[Tensor],
        state: RecurrentState | RecurrentSlots | None,
        packing: Packing | None,
        return_state: bool,
        fused: bool,
    ) -> Convolved:
        """q, k and v [B,T,...] after the short convolutions, if there are any."""
        held = 0 if state is None else len(state.channels if isinstance(state, RecurrentSlots) else state.conv)
        if state is not None and held != len(self.convs or ()):
            title = type(self).__name__
            raise ValueError(f"{title}: state has the inputs of {held} short convolutions, the layer has {len(self.convs or ())}")
        if self.convs is None:
            return Convolved(list(qkv), (), None)
        before = self.inputs_before(qkv, state, packing)
        options = {"packing": packing, "return_state": return_state, "backend": self.backend}
        pairs = [conv(y, past, **options) for conv, y, past in zip(self.convs, qkv, before, strict=True)]
        return Convolved([y for y, _ in pairs], tuple(past for _, past in pairs), None)

    def inputs_before(
        self, qkv: Sequence[Tensor], state: RecurrentState | RecurrentSlots | None, packing: Packing | None
    ) -> Sequence[Tensor | None]:
        """The convolutions' inputs before these tokens: from the state, or from the previous rank."""
        if self.context_group is None:
            return (None, None, None) if state is None else state.conv
        joint = torch.cat(list(qkv), dim=-1)
        return inputs_before(joint, self.conv_size, packing, self.context_group).split([y.shape[-1] for y in qkv], dim=-1)

    def recurrence(self, p: Projected) -> Recurrence:
        """The op and its inputs, from q [B,T,H,K], k [B,T,H,K], v [B,T,HV,V] and the side projections of p."""
        raise TypeError(f"{type(self).__name__} does not define a recurrence")

    def read_out(self, o: Tensor, p: Projected, weights: Weights | None) -> Tensor:
        """The heads' outputs o [B,T,HV,V]: norm, read gate if it comes after the norm, swish gate, output projection."""
        read = self.norm_gate(p)
        if weights is not None and self.output_norm.kind == "head":
            norm = self.output_norm.norm
            return read_out(o, p.swish, read, norm.weight, weights.single["o_proj"], norm.eps, self.backend)
        return self.product("o_proj", apply_gates(self.output_norm(o), p.swish, read), weights)

    def flops(self, length: int) -> float:
        """FLOPs of the recurrence per token of a sequence of that length, forward."""
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
        """For the fused decoding step; None if it does not support this recurrence."""
        return None

    def step_obstacle(self) -> str | None:
        """Why the fused decoding step cannot run this mixer, or None."""
        terms = self.step_terms()
        if terms is None:
            return f"no kernel knows one token of {type(self).__name__}"
        if self.head_k_dim > WIDEST_KEY:
            return f"keys are at most {WIDEST_KEY} wide, got {self.head_k_dim}"
        ups = [] if terms.decay_up is None else [terms.decay_up]
        whole = self.fusible() and intact(*ups, bias=terms.decay == "channel")
        return None if whole else f"a part of a {type(self).__name__} block has been replaced"
