"""The softmax over heads: which heads a token writes to, and which it reads from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from headmax.fields import suggest
from headmax.layers.initialized import Initialized
from headmax.ops import head_gate
from headmax.ops.checks import compute_dtype
from headmax.ops.head_gate import split_gates

Source = Literal["head", "hidden_heads", "hidden"]
Kind = Literal["softmax", "sigmoid", "uniform"]
ReadPosition = Literal["query", "after_norm"]


@dataclass(frozen=True)
class HeadGateConfig:
    """Settings of the head gates; the defaults are the paper's."""

    read: bool = True
    """Gate the queries (G^Q): the read gate."""
    write: bool = True
    """Gate the keys (G^K): the write gate."""
    source: Source = "head"
    """What is scored: "head": <q_h, w_h> and <k_h, w_h>; "hidden_heads": <x_h, w_h>, x split over heads; "hidden": x W."""
    read_position: ReadPosition = "query"
    """What the read gate multiplies: "query", as in the equation, or "after_norm", the normalised output, where no norm cancels it."""
    kind: Kind = "softmax"
    """"softmax" lets heads compete; the controls are "sigmoid" (gates without competition) and "uniform" (frozen at the mean)."""
    scale: float | Literal["heads"] = 1.0
    """Sum of the gates over heads; "heads" is their number, so that a uniform gate is 1."""
    temperature: float = 1.0
    """Factor on the scores; larger values give sharper gates."""
    init_std: float = 0.02
    """Standard deviation of the initial score weights; 0 starts from uniform gates."""

    @classmethod
    def paper(cls) -> Self:
        """The paper's equation: both gates, a softmax scored on q and k, the read gate on the query. This preset never changes."""
        return cls(read=True, write=True, source="head", read_position="query", kind="softmax", scale=1.0, temperature=1.0, init_std=0.02)

    @classmethod
    def recommended(cls) -> Self:
        """The settings supported by the evidence: the paper's, until docs/findings.md shows others to be better."""
        return cls.paper()

    def __post_init__(self) -> None:
        for name, kind in (("source", Source), ("read_position", ReadPosition), ("kind", Kind)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"HeadGateConfig: unknown {name} {getattr(self, name)!r}{suggest(getattr(self, name), get_args(kind))}")
        if not (self.read or self.write):
            raise ValueError("HeadGateConfig: read and write are both False; a model without gates has head_gate=None")
        if self.scale != "heads" and not (isinstance(self.scale, int | float) and 0 < self.scale < math.inf):
            raise ValueError(f"HeadGateConfig: scale must be a positive number or 'heads', got {self.scale!r}")
        if not (isinstance(self.temperature, int | float) and 0 < self.temperature < math.inf):
            raise ValueError(f"HeadGateConfig: temperature must be a positive number, got {self.temperature!r}")
        if not (isinstance(self.init_std, int | float) and 0 <= self.init_std < math.inf):
            raise ValueError(f"HeadGateConfig: init_std must be a number that is not negative, got {self.init_std!r}")

    def build(self, *, hidden_size: int, num_heads: int, head_dim: int, like: Tensor) -> HeadGate:
        """The module, for `num_heads` gates scored on heads of width `head_dim`, on the device and in the dtype of `like`."""
        gate = HeadGate(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            read=self.read,
            write=self.write,
            source=self.source,
            kind=self.kind,
            scale=float(num_heads if self.scale == "heads" else self.scale),
            temperature=self.temperature,
            init_std=self.init_std,
        )
        return gate.to(like.device, like.dtype if like.is_floating_point() else None)  # a quantized weight has no dtype to share


class HeadGate(Initialized):
    """G = scale * softmax over heads of (temperature * score), once from the query (read), once from the key (write).

    "sigmoid" is (2 scale / H) sigmoid(temperature * score) and "uniform" scale / H, so that all kinds start from the same mean gate.
    """

    tensor_group: ProcessGroup | None = None
    """Tensor parallelism: ranks that score a share of the heads each. H counts all heads."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        read: bool = True,
        write: bool = True,
        source: Source = "head",
        kind: Kind = "softmax",
        scale: float = 1.0,
        temperature: float = 1.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if source == "hidden_heads" and hidden_size % num_heads:
            raise ValueError(
                f"HeadGateConfig: source 'hidden_heads' needs a hidden_size that num_heads {num_heads} divides, got {hidden_size}: "
                "take source 'head' or 'hidden'"
            )
        self.num_heads, self.read, self.write = num_heads, read, write
        self.source, self.kind, self.scale, self.temperature, self.init_std = source, kind, scale, temperature, init_std
        width = {"head": head_dim, "hidden_heads": hidden_size // num_heads, "hidden": hidden_size}[source]
        learned = kind != "uniform"
        self.read_weight = nn.Parameter(torch.empty(num_heads, width)) if read and learned else None
        self.write_weight = nn.Parameter(torch.empty(num_heads, width)) if write and learned else None
        self.reset_parameters()

    def initial_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for weight in (self.read_weight, self.write_weight):
            if weight is not None:
                yield weight, torch.randn_like(weight) * self.init_std

    def rows(self, query: Tensor, key: Tensor) -> Tensor | None:
        """The matrix that maps x to the scores, [H,E] for reading stacked on [H,E] for writing; None where nothing is scored.

        With q and k being `query` and `key` times x, <W_h x, w_h> = <x, W_h^T w_h>. One sum for both gates compiles to one kernel.
        """
        pairs = [(m, w) for m, w in ((query, self.read_weight), (key, self.write_weight)) if w is not None]
        if not pairs:
            return None
        if self.source != "head":
            return torch.cat([self.hidden_rows(w) for _, w in pairs])
        heads = query.shape[0] // pairs[0][1].shape[1]
        products = [w.unflatten(0, (heads, -1)).unsqueeze(-1) * m.unflatten(0, (heads, 1, -1)) for m, w in pairs]
        return torch.cat(products).sum(2).flatten(0, 1)

    def hidden_rows(self, weight: Tensor) -> Tensor:
        """A gate's weight as a matrix [H,E] on the hidden state, for sources "hidden" and "hidden_heads"."""
        if self.source == "hidden":
            return weight
        first, own = self.own_heads()
        width = weight.shape[1]
        return F.pad(torch.block_diag(*weight), (first * width, (self.num_heads - first - own) * width))

    def own_heads(self) -> tuple[int, int]:
        """This rank's first head and number of heads."""
        if self.tensor_group is None:
            return 0, self.num_heads
        own = self.num_heads // self.tensor_group.size()
        return self.tensor_group.rank() * own, own

    def forward(
        self, q: Tensor, k: Tensor, x: Tensor, scores: Tensor | None = None, backend: str = "auto"
    ) -> tuple[Tensor | None, Tensor | None]:
        """(read, write) gates [B,T,H] for q, k [B,T,heads,K], taken before feature map, rotary and norm, and the hidden state x [B,T,E].

        `scores` are x times the `rows`, if the caller has them already.
        """
        if scores is not None:
            number = self.read + self.write
            factors, group = (self.temperature, self.scale), self.tensor_group
            gates = split_gates(scores, number, *factors, kind=self.kind, backend=backend, tensor_group=group)
            return gates[0] if self.read else None, gates[-1] if self.write else None
        read = self._gate(q, x, self.read_weight, backend) if self.read else None
        write = self._gate(k, x, self.write_weight, backend) if self.write else None
        return read, write

    def _gate(self, heads: Tensor, x: Tensor, weight: Tensor | None, backend: str) -> Tensor:
        first, own = self.own_heads()
        if weight is None:
            return x.new_full((*x.shape[:2], own), self.scale / self.num_heads, dtype=compute_dtype(x.dtype))
        kind: Literal["softmax", "sigmoid"] = "sigmoid" if self.kind == "sigmoid" else "softmax"
        if self.source == "head":
            scored = heads
        else:
            scored = x if self.source == "hidden" else x.unflatten(-1, (self.num_heads, -1))[:, :, first : first + own]
        factors, group = (self.temperature, self.scale), self.tensor_group
        return head_gate(scored, weight, *factors, kind=kind, backend=backend, tensor_group=group)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, read={self.read}, write={self.write}, source={self.source}, kind={self.kind}, scale={self.scale:g}"
