"""Short causal convolution: each channel sees its own last few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from headmax.layers.initialized import Initialized
from headmax.ops.checks import compute_dtype
from headmax.ops.context import from_previous
from headmax.ops.gated_delta_rule.reference import unit_length
from headmax.ops.head_gate.reference import scores_of
from headmax.ops.packing import Packing
from headmax.ops.registry import Lazy, dispatch, register

Convolution = Callable[[Tensor, Tensor | None], tuple[Tensor | None, ...]]


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
    time, width = x.shape[1], weight.shape[1]
    padded, weight = F.pad(x, (0, 0, width - 1, 0)), weight.to(x.dtype)
    y = x * weight[:, -1]
    for i in range(width - 1):
        term = padded[:, i : i + time] * weight[:, i]
        if before is not None:  # a token this early in its sequence has no such predecessor
            term = term * (before >= width - 1 - i).to(x.dtype).unsqueeze(-1)
        y = y + term
    return F.silu(y if bias is None else y + bias.to(x.dtype))


def _unit_reference(x: Tensor, weight: Tensor, before: Tensor | None, scorer: Tensor | None, heads: int) -> tuple[Tensor, Tensor | None]:
    y = _reference(x, weight, None, before).unflatten(-1, (heads, -1))
    return unit_length(y.to(compute_dtype(y.dtype))).flatten(2).to(x.dtype), None if scorer is None else scores_of(y, scorer)


for _name, _plain in (("short_conv", _reference), ("unit_conv", _unit_reference)):
    register(_name, {"reference": _plain, "triton": Lazy("headmax.ops.kernels.conv", _name, needs="triton", interpreted=True)})


def _after_states(state: Tensor, x: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """x [1,T,D] with each sequence preceded by its state [N,W-1,D], and the indices of the tokens in it."""
    states = torch.arange(state.shape[0], device=x.device).repeat_interleave(state.shape[1])
    order = torch.cat([states, packing.sequence_ids]).argsort(stable=True)
    return torch.cat([state.flatten(0, 1)[None], x], dim=1)[:, order], order.argsort()[len(states) :]


def _convolve(run: Convolution, x: Tensor, state: Tensor | None, packing: Packing | None) -> tuple[Tensor | None, ...]:
    """run(x, predecessors) on x [B,T,D], each sequence continued from its `state` [sequences,W-1,D], the inputs before it."""
    if state is None:
        return run(x, None if packing is None else packing.positions)
    if packing is None:
        results = run(torch.cat([state.to(x.dtype), x], dim=1), None)
        return tuple(y if y is None else y[:, state.shape[1] :] for y in results)
    row, tokens = _after_states(state.to(x.dtype), x, packing)
    return tuple(y if y is None else y[:, tokens] for y in run(row, None))


def short_convolution(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    packing: Packing | None = None,
    backend: str = "auto",
    bias: Tensor | None = None,
) -> Tensor:
    """silu(bias + conv(x)): the causal depthwise convolution of x [B,T,D] with weight [D,W], bias [D] being optional. `state`
    [sequences,W-1,D] holds the inputs before x."""
    kernel = dispatch("short_conv", backend, x)
    return _convolve(lambda x, before: (kernel(x, weight, bias, before),), x, state, packing)[0]  # type: ignore[return-value]


def unit_convolution(
    x: Tensor,
    weight: Tensor,
    scorer: Tensor | None,
    heads: int,
    state: Tensor | None = None,
    packing: Packing | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`short_convolution`, then each head scaled to unit length as in the delta rule. Also the scores [B,T,gates] of `head_gate`, from
    scorer [gates,K] and the heads before scaling."""
    kernel = dispatch("unit_conv", backend, x)
    return _convolve(lambda x, before: kernel(x, weight, before, scorer, heads), x, state, packing)  # type: ignore[return-value]


def last_inputs(x: Tensor, width: int, state: Tensor | None, packing: Packing | None) -> Tensor:
    """The state after x: the last W - 1 inputs of each sequence, zeros where there were fewer."""
    sequences = x.shape[0] if packing is None else packing.num_sequences
    state = x.new_zeros(sequences, width - 1, x.shape[2]) if state is None else state.to(x.dtype)
    if packing is None:
        return torch.cat([state, x[:, 1 - width :]], dim=1)[:, 1 - width :]
    row, _ = _after_states(state, x, packing)
    ends = packing.cu_seqlens[1:] + (width - 1) * torch.arange(1, sequences + 1, device=x.device)
    return row[0, ends[:, None] + torch.arange(1 - width, 0, device=x.device)]


def inputs_before(x: Tensor, width: int, packing: Packing | None, group: ProcessGroup) -> Tensor:
    """The state before a rank's piece x [B,T,D] of every sequence: the last W - 1 inputs of the previous rank."""
    if x.shape[1] < width - 1:
        raise ValueError(
            f"conv_size {width}: a piece of a sequence must have at least {width - 1} tokens, the inputs before the next, got {x.shape[1]}"
        )
    before = from_previous(x[:, 1 - width :], group)
    if packing is None:
        return before
    own = packing.positions[0] >= torch.arange(width - 1, 0, -1, device=x.device)
    before = before * own.to(x.dtype).unsqueeze(-1)  # the sequence begun there may be shorter
    return torch.cat([before, before.new_zeros(packing.num_sequences - 1, *before.shape[1:])])


class ShortConvolution(Initialized):
    """y_t = silu(bias + Σ_i weight_i x_{t-width+1+i}), depthwise, the bias being optional; the state is the last width - 1 inputs
    [sequences, width - 1, channels]."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        if width < 2:
            raise ValueError(f"conv_size must be at least 2, the tokens that a short convolution spans, got {width}")
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def initial_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        bound = self.width**-0.5
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                yield parameter, torch.empty_like(parameter).uniform_(-bound, bound)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        packing: Packing | None = None,
        *,
        return_state: bool = False,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor | None]:
        y = short_convolution(x, self.weight, state, packing, backend, self.bias)
        return y, last_inputs(x, self.width, state, packing) if return_state else None

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.width}, bias={self.bias is not None}"
