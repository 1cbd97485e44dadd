"""What a model remembers between calls: one state per layer, of constant size for recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import SequenceKey, _register_namedtuple, register_pytree_node, tree_leaves, tree_map_only
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from headmax.layers.mixers.attention import AttentionSlots, AttentionState
from headmax.layers.mixers.state import RecurrentSlots, RecurrentState
from headmax.layers.padding import Padding
from headmax.ops.packing import Packing


class StateLayer(CacheLayerMixin):
    """A layer's state, whatever tuple of tensors its mixer hands over, sequences along the first axis."""

    is_sliding = False

    def __init__(self) -> None:
        self.is_initialized = False
        self.state: tuple | None = None
        self.seen = 0
        """How many places of each row have been read, padding included; of packed sequences those of the longest."""
        self.tokens: int | Tensor = 0
        """How many tokens, [sequences] where each has its own number."""

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Of an attention layer, [sequences, heads, seen, dim]; None for a recurrent one."""
        return getattr(self.state, "keys", None)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """As `keys`."""
        return getattr(self.state, "values", None)

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

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return isinstance(self.state, AttentionState)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last places, their number given as a negative one."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to forget as a negative one, got {tokens_to_remove}")
        if not tokens_to_remove or self.state is None:
            return
        if not isinstance(self.state, AttentionState):
            raise ValueError("a recurrent state cannot be cropped: it holds the whole past in one tensor")
        self.state = AttentionState(*(x[:, :, :tokens_to_remove] for x in self.state))
        self.seen, self.tokens = self.seen + tokens_to_remove, self.tokens + tokens_to_remove

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

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last places of all layers, or of none: a cache with a recurrent state cannot be cropped."""
        for layer in sorted(self.layers, key=lambda layer: layer.is_croppable):  # what refuses comes first
            layer.crop(tokens_to_remove)

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


def _is_empty(layer: Any) -> bool:
    """Whether a layer of transformers' caches holds nothing yet."""
    held = [getattr(layer, name, None) for name in ("keys", "conv_states", "recurrent_states")]
    return not isinstance(layer, StateLayer) and not any(isinstance(x, Tensor) for x in tree_leaves(held))


def adopt(cache: Cache, num_layers: int) -> None:
    """Makes sure that a cache holds states of such a model; an empty DynamicCache, as others pass around, is given headmax's layers."""
    if not isinstance(cache, Cache):
        raise ValueError(f"past_key_values must be a HeadmaxCache, got {type(cache).__name__}")
    if type(cache) is DynamicCache and not cache.offloading and all(map(_is_empty, cache.layers)):
        cache.layers, cache.layer_class_to_replicate = list(HeadmaxCache(num_layers).layers), None
    if not all(isinstance(layer, StateLayer) for layer in cache.layers) or cache.offloading:
        kind = f"offloaded {type(cache).__name__}" if cache.offloading else type(cache).__name__
        raise ValueError(
            f"past_key_values must be a HeadmaxCache or an empty DynamicCache, got {kind}; "
            "static, quantised and offloaded caches hold keys and values, not recurrent states"
        )
    if len(cache.layers) != num_layers:
        raise ValueError(f"past_key_values has {len(cache.layers)} layers, the model {num_layers}")


def _flatten(cache: HeadmaxCache) -> tuple[list[Any], None]:
    return [(layer.state, layer.tokens, layer.seen) for layer in cache.layers], None


def _flatten_with_keys(cache: HeadmaxCache) -> tuple[list[tuple[Any, Any]], None]:
    return [(SequenceKey(n), layer) for n, layer in enumerate(_flatten(cache)[0])], None


def _unflatten(layers: Iterable[Any], _: None) -> HeadmaxCache:
    held = list(layers)
    cache = HeadmaxCache(len(held))
    for layer, (state, tokens, seen) in zip(cache.layers, held, strict=True):
        layer.state, layer.tokens, layer.seen, layer.is_initialized = state, tokens, seen, state is not None
    return cache


NAME = "headmax.HeadmaxCache"
register_pytree_node(HeadmaxCache, _flatten, _unflatten, serialized_type_name=NAME, flatten_with_keys_fn=_flatten_with_keys)
for kind in (AttentionState, RecurrentState, AttentionSlots, RecurrentSlots):
    _register_namedtuple(kind, serialized_type_name=f"headmax.{kind.__name__}")
