"""What a model remembers between calls: one state per layer, of constant size for recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import Cache, CacheLayerMixin

from headmax.layers.mixers.attention import AttentionSlots
from headmax.layers.mixers.base import RecurrentSlots, RecurrentState
from headmax.layers.padding import Padding
from headmax.ops.packing import Packing


class StateLayer(CacheLayerMixin):
    """A layer's state, whatever tuple of tensors its mixer hands over, sequences along the first axis."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: tuple | None = None
        self.seen = 0
        """How many places of each row have been read, padding included; of packed sequences those of the longest."""
        self.tokens: int | Tensor = 0
        """How many tokens, [sequences] where each has its own number."""

    def advance(self, state: tuple | None, time: int, packing: Packing | None = None, padding: Padding | None = None) -> None:
        """Takes the state after `time` more places of each row."""
        lengths = padding.lengths if padding is not None else time if packing is None else packing.cu_seqlens.diff()
        self.state = state
        self.seen += time if packing is None else packing.longest
        self.tokens = self.tokens + lengths
        self.is_initialized = True

    def in_place(self) -> tuple | None:
        """The state as memory that a step moves on: a copy the first time, so that whoever shares the state keeps it. Keys and values
        that grow stay as they are."""
        if isinstance(self.state, RecurrentState):
            with torch.inference_mode(False):  # memory of inference mode could not be written outside it
                self.state = RecurrentSlots.of(self.state)
        return self.state

    def to_keep(self) -> tuple | None:
        """The state as what is left as it is: a copy where gradients may want it after its memory has moved on."""
        if not isinstance(self.state, RecurrentSlots):
            return self.state
        return (RecurrentSlots.of(self.state.state()) if torch.is_grad_enabled() else self.state).state()

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state, self.tokens = tree_map_only(Tensor, function, (self.state, self.tokens))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        self.state, self.seen, self.tokens, self.is_initialized = None, 0, 0, False

    def prefetch(self) -> None:
        raise ValueError("HeadmaxCache cannot be offloaded: a recurrent state is small and is needed at every step")

    offload = prefetch

    def crop(self, *args: Any) -> None:
        raise ValueError("a recurrent state cannot be cropped: it holds the whole past in one tensor")

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("headmax layers store their state with `advance`")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("headmax layers store their state with `advance`")


class HeadmaxCache(Cache):
    """The states of all layers: recurrent state and convolution state, or keys and values for attention layers."""

    def __init__(self, num_layers: int) -> None:
        self.layers: list[StateLayer]  # type: ignore[assignment]
        super().__init__(layers=[StateLayer() for _ in range(num_layers)])

    @classmethod
    def on(cls, slots: Sequence[RecurrentSlots | AttentionSlots]) -> HeadmaxCache:
        """A cache whose steps move these slots on, one for each layer. What has been read before does not count: give positions."""
        cache = cls(len(slots))
        for layer, memory in zip(cache.layers, slots, strict=True):
            layer.advance(memory, 1)
        return cache

    def select(self, sequences: Tensor) -> HeadmaxCache:
        """A new cache with the states of these sequences, each as often as it is named: a text read once continues in several ways."""
        chosen = HeadmaxCache(len(self.layers))
        for new, layer in zip(chosen.layers, self.layers, strict=True):
            new.state, new.seen, new.tokens, new.is_initialized = layer.state, layer.seen, layer.tokens, layer.is_initialized
        chosen.reorder_cache(sequences)  # type: ignore[arg-type]
        return chosen

    def nbytes(self) -> int:
        """The memory all states take."""
        sizes: list[int] = []
        for layer in self.layers:
            tree_map_only(torch.Tensor, lambda x: sizes.append(x.nbytes), layer.state)
        return sum(sizes)
