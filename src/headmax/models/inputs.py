"""What a model is called with: which arguments go together, and what follows from them for the blocks."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from headmax.layers.block import Block
from headmax.layers.fusion import Fusion, fusion_enabled
from headmax.layers.head_parallel import embed
from headmax.layers.loss import IGNORED
from headmax.layers.mixers.attention import AttentionSlots, AttentionState, attention_mask
from headmax.layers.padding import Padding
from headmax.layers.rotary import Rotary, RotarySettings
from headmax.models.cache import HeadmaxCache, adopt
from headmax.ops.checks import check_packing
from headmax.ops.packing import Packing
from headmax.ops.registry import autocast_dtype
from headmax.ops.step import MOST_TOKENS

if TYPE_CHECKING:
    from headmax.models.modeling import HeadmaxModel

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OWN_ARGUMENTS = ("return_gates", "cu_seqlens", "skip_logits")
UNSUPPORTED = {
    "output_attentions": "recurrent layers have no attention maps; return_gates=True gives the head gates",
    "head_mask": "heads cannot be masked; a gate of a head is its share of the softmax",
    "token_type_ids": "the model has one kind of token",
    "encoder_hidden_states": "the model is a decoder without cross-attention",
    "encoder_attention_mask": "the model is a decoder without cross-attention",
}
"""Arguments of Hugging Face models that would change the result, and why they cannot here."""


@functools.cache
def misspelt(name: str) -> str | None:
    """The argument of our own that a name is all but equal to."""
    return next(iter(difflib.get_close_matches(name, OWN_ARGUMENTS, n=1, cutoff=0.9)), None)


def check_arguments(others: Mapping[str, Any]) -> None:
    """Arguments that the model does not know. As Hugging Face models do, it ignores those that cannot change the result."""
    for name, value in others.items():
        if (meant := misspelt(name)) is not None:
            raise ValueError(f"unknown argument {name!r}; did you mean {meant!r}?")
        if name in UNSUPPORTED and value is not None and value is not False:
            raise ValueError(f"{name} is not supported: {UNSUPPORTED[name]}")


def check_tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None, hidden_size: int) -> None:
    """One of the two, of its shape and a dtype it can have."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    name, x = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    if inputs_embeds is None and (x.ndim != 2 or x.dtype not in (torch.int64, torch.int32)):
        raise ValueError(f"input_ids must be [batch, time] of torch.int64 or torch.int32, got {list(x.shape)} of {x.dtype}")
    if inputs_embeds is not None and (x.ndim != 3 or x.shape[2] != hidden_size or not x.is_floating_point()):
        raise ValueError(f"inputs_embeds must be floating [batch, time, hidden_size = {hidden_size}], got {list(x.shape)} of {x.dtype}")
    if x.shape[0] == 0 or x.shape[1] == 0:
        raise ValueError(f"{name} must have at least one sequence and one token, got {list(x.shape)}")


def read_labels(labels: Tensor | None, tokens: Tensor | None) -> Tensor | None:
    """As int64: a label for each token."""
    if labels is None or tokens is None:
        return labels
    if not isinstance(labels, Tensor) or labels.shape != tokens.shape[:2] or labels.dtype not in INTEGERS:
        got = f"{list(labels.shape)} of {labels.dtype}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels must be integers [batch, time] = {list(tokens.shape[:2])}, got {got}")
    return labels.long()


def look_up(model: HeadmaxModel, input_ids: Tensor) -> Tensor:
    """Embeddings [batch, time, hidden]."""
    if model.embed_tokens.weight.is_meta and not input_ids.is_meta:
        raise ValueError("the model is on the meta device, where weights have no values: load them before you call it")
    try:
        return embed(model.embed_tokens, model.tensor_group, input_ids)
    except IndexError:
        said = f"{int(input_ids.min())} to {int(input_ids.max())}"
        raise ValueError(f"input_ids must be from 0 to {model.config.vocab_size - 1}, the vocabulary, got {said}") from None


@torch.compiler.disable(reason="attention_mask is read on the host to find padding: leave it out where there is none")
def find_padding(mask: Tensor) -> Padding | None:
    return Padding.of(mask)


@torch.compiler.disable(reason="position_ids are read on the host to find packed sequences: pass cu_seqlens as a Packing instead")
def packing_of_positions(position_ids: Tensor, batch: int) -> Packing | None:
    """The packing of positions [batch or 1, time] that restart where a sequence begins; only a batch of one may be packed."""
    if batch == 1:
        return Packing.from_positions(position_ids)
    if (position_ids.diff(dim=1) != 1).any():
        raise ValueError("position_ids restart inside a row: pack sequences into a batch of one, or pad them and pass attention_mask")
    return None


def find_packing(
    tokens: Tensor, padding: Padding | None, position_ids: Tensor | None, cu_seqlens: Tensor | Packing | None
) -> Packing | None:
    """The packing of tokens [batch, time, ...]: as given, or where the positions of unpadded tokens restart."""
    batch, time = tokens.shape[:2]
    if cu_seqlens is not None:
        return check_packing("HeadmaxModel", cu_seqlens, batch, time, tokens.device)
    if position_ids is None or padding is not None or time == 1:
        return None
    return packing_of_positions(position_ids, batch)


def named_packing(cu_seqlens: Tensor | Packing | None, position_ids: Tensor | None, others: dict[str, Any]) -> Tensor | Packing | None:
    """`cu_seqlens`, or what transformers' collators pass under another name."""
    if cu_seqlens is None:
        cu_seqlens = others.pop("cu_seq_lens_q", None)
    if "seq_idx" in others and position_ids is None and cu_seqlens is None:
        raise ValueError("seq_idx alone does not tell where sequences lie: pass cu_seqlens or position_ids")
    return cu_seqlens


def within_sequences(
    labels: Tensor, tokens: Tensor | None, mask: Tensor | None, position_ids: Tensor | None, cu_seqlens: Tensor | Packing | None
) -> tuple[Tensor | Packing | None, Tensor]:
    """The packing, and the labels with those dropped that the last token of another sequence would predict."""
    if tokens is None:
        return cu_seqlens, labels
    padding = None if mask is None else find_padding(mask[:, -tokens.shape[1] :])
    packing = find_packing(tokens, padding, position_ids, cu_seqlens)
    return packing, labels if packing is None else labels.masked_fill(packing.positions == 0, IGNORED)


def check_token_shapes(batch: int, time: int, past: int, position_ids: Tensor | None, mask: Tensor | None) -> None:
    """Positions and mask have a number for each token of x [batch, time], which follow `past` tokens in the cache."""
    for name, given in (("position_ids", position_ids), ("attention_mask", mask)):
        if given is not None and not isinstance(given, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(given).__name__}")
    if position_ids is not None and tuple(position_ids.shape) not in ((1, time), (batch, time)):
        raise ValueError(f"position_ids must be [batch or 1, time] = {[batch, time]}, got {list(position_ids.shape)}")
    if mask is not None and mask.ndim == 4:
        raise ValueError("attention_mask must be [batch, time]: a 4-D mask hides pairs of tokens, and recurrent layers have no pairs")
    if mask is not None and tuple(mask.shape) not in ((batch, time), (batch, past + time)):
        raise ValueError(f"attention_mask must be [batch, seen + time] = {[batch, past + time]}, got {list(mask.shape)}")


def check_parallel(
    model: HeadmaxModel,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | Packing | None,
    mask: Tensor | None,
    cache: HeadmaxCache | None,
    use_cache: bool | None,
) -> None:
    """What ranks need that hold a piece of every sequence, or a share of the heads, and what they cannot have."""
    if model.tensor_group is not None and (use_cache or cache is not None):
        raise ValueError("use_cache: ranks with a share of the heads keep no states: pass use_cache=False and no past_key_values")
    if model.context_group is None:
        return
    if use_cache or cache is not None:
        raise ValueError("use_cache: pieces of sequences keep no states: pass use_cache=False and no past_key_values")
    if mask is not None:
        raise ValueError("attention_mask: pieces of sequences have no padding; pack sequences and pass cu_seqlens")
    if isinstance(cu_seqlens, Tensor):
        raise ValueError("cu_seqlens must be this rank's Packing.piece where there is a context group, got a tensor")
    if cu_seqlens is None and position_ids is None:
        raise ValueError("position_ids must be those of this rank's tokens, [batch or 1, time], where there is a context group")


def check_packed(model: HeadmaxModel, packing: Packing | None, padding: Padding | None, keeps_states: bool) -> None:
    """What packed sequences go together with."""
    if packing is not None and padding is not None:
        raise ValueError("attention_mask pads rows and cu_seqlens packs sequences: give one of them")
    if packing is not None and keeps_states and any(model.uses_attention):
        raise ValueError("attention layers keep no states of packed sequences: pass use_cache=False and no past_key_values")


def count_positions(x: Tensor, cache: HeadmaxCache | None, packing: Packing | None, padding: Padding | None) -> Tensor:
    """[batch or 1, time]: how many tokens of its sequence precede each token."""
    past = 0 if cache is None else cache.layers[0].tokens
    if padding is not None:
        positions = padding.positions
    else:
        positions = (torch.arange(x.shape[1], device=x.device) if packing is None else packing.positions)[None]
    if isinstance(past, Tensor):  # a number for each sequence
        past = past[:, None] if packing is None else past[packing.sequence_ids]
    return positions + past


@dataclass(frozen=True)
class Inputs:
    """What the blocks are given."""

    x: Tensor
    """The residual stream [batch, time, hidden]."""
    cache: HeadmaxCache | None
    use_cache: bool
    packing: Packing | None
    padding: Padding | None
    angles: dict[tuple[bool, RotarySettings | None], Rotary | None]
    """Rotary angles of the tokens: for attention (padding included) or not, and for each setting in the model."""
    masks: dict[int | None, Tensor | None]
    """Which keys a query of an attention layer may see, for each window in the model."""
    states: tuple[tuple | None, ...]
    """The state each block continues from: slots for few tokens, which are updated in place."""
    fusion: tuple[Fusion, ...]
    """What runs fused, for each block."""
    blocks: tuple[tuple[bool, RotarySettings | None, int | None], ...]
    """Of each block: whether it is attention, its rotary positions, and its window."""
    return_gates: bool

    def fused_step(self, n: int) -> bool:
        """Whether block n runs one token per sequence as its fused `step`. Keys and values that grow cannot be updated in place."""
        return self.fusion[n].step and not isinstance(self.states[n], AttentionState)

    def for_block(self, n: int) -> dict[str, Any]:
        """The arguments of block n, besides x."""
        attends, rotary, window = self.blocks[n]
        return {
            "state": self.states[n],
            "return_state": self.use_cache,
            "positions": self.angles[attends, rotary],
            "packing": self.packing,
            "mask": self.masks[window] if attends else self.padding,
            "return_gates": self.return_gates,
            "fusion": self.fusion[n],
        }

    def advance(self, n: int, state: tuple | None, time: int) -> None:
        """Stores block n's state after `time` more tokens, if there is a cache."""
        if self.cache is not None and self.use_cache:
            self.cache.layers[n].advance(state, time, self.packing, self.padding)


def read_inputs(
    model: HeadmaxModel,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: HeadmaxCache | None,
    inputs_embeds: Tensor | None,
    use_cache: bool | None,
    cu_seqlens: Tensor | Packing | None,
    return_gates: bool,
) -> Inputs:
    """Checks the arguments of `HeadmaxModel.forward` and prepares what the blocks share."""
    x = _embedded(model, input_ids, inputs_embeds)
    batch, time, _ = x.shape
    check_parallel(model, position_ids, cu_seqlens, attention_mask, cache, use_cache)
    if cache is not None:
        adopt(cache, len(model.layers))
    past = 0 if cache is None else cache.get_seq_length()
    check_token_shapes(batch, time, past, position_ids, attention_mask)
    padding = None if attention_mask is None else find_padding(attention_mask[:, -time:])
    packing = find_packing(x, padding, None if model.context_group else position_ids, cu_seqlens)
    check_packed(model, packing, padding, keeps_states=bool(use_cache or past))
    if use_cache is None:
        parallel = model.context_group is not None or model.tensor_group is not None
        use_cache = model.config.use_cache and not (model.training or packing is not None or parallel)
    if use_cache and cache is None:
        cache = HeadmaxCache(model.config.num_hidden_layers)
    few = past > 0 and time <= MOST_TOKENS and use_cache and packing is None and padding is None and not torch.is_grad_enabled()
    layers = [] if cache is None else cache.layers
    return Inputs(
        x,
        cache,
        use_cache,
        packing,
        padding,
        _rotary_angles(model, x, cache, position_ids, packing, padding),
        _attention_masks(model, x, cache, past, attention_mask),
        tuple(layer.in_place() if few else layer.to_keep() for layer in layers) or (None,) * len(model.layers),
        _fusion(model, x, one_step=few and time == 1 and not return_gates),
        tuple(zip(model.uses_attention, model.rotary, model.windows, strict=True)),
        return_gates,
    )


def _embedded(model: HeadmaxModel, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """The residual stream [batch, time, hidden] before the first block, in the dtype that autocast computes in."""
    check_tokens(input_ids, inputs_embeds, model.config.hidden_size)
    x = look_up(model, cast(Tensor, input_ids)) if inputs_embeds is None else inputs_embeds
    return x.to(autocast_dtype(x.device) or x.dtype)


def _fusion(model: HeadmaxModel, x: Tensor, one_step: bool) -> tuple[Fusion, ...]:
    if one_step and fusion_enabled(model.config.fused, model.config.backend, x):
        return model.decoder.fusion(model, x)
    return tuple(cast(Block, block).fusion(x) for block in model.layers)


def _rotary_angles(
    model: HeadmaxModel,
    x: Tensor,
    cache: HeadmaxCache | None,
    position_ids: Tensor | None,
    packing: Packing | None,
    padding: Padding | None,
) -> dict[tuple[bool, RotarySettings | None], Rotary | None]:
    """A token's position is the number of tokens of its sequence before it, unless `position_ids` say otherwise."""
    kinds = set(zip(model.uses_attention, model.rotary, strict=True))
    if position_ids is None and any(settings is not None for _, settings in kinds):
        position_ids = count_positions(x, cache, packing, padding)
    unpadded = position_ids if padding is None or position_ids is None else padding.remove(position_ids.expand(x.shape[:2]))
    return {
        (attends, settings): settings and settings.at(position_ids if attends else unpadded, x.dtype)  # type: ignore[arg-type]
        for attends, settings in kinds
    }


def _attention_masks(
    model: HeadmaxModel, x: Tensor, cache: HeadmaxCache | None, past: int, mask: Tensor | None
) -> dict[int | None, Tensor | None]:
    """None where causality and the packing say it all."""
    windows = {window for window, attends in zip(model.windows, model.uses_attention, strict=True) if attends}
    if not windows:
        return {}
    slots = None if cache is None else next((s for s in (y.state for y in cache.layers) if isinstance(s, AttentionSlots)), None)
    if slots is not None:
        return {window: slots.mask(window) for window in windows}
    if mask is not None and mask.shape[1] != past + x.shape[1]:
        raise ValueError(f"attention_mask must cover the cache too, [batch, seen + time] = {[x.shape[0], past + x.shape[1]]}")
    if mask is not None and find_padding(mask) is None:
        mask = None
    return {window: attention_mask(x.shape[1], past, mask, x.device, window) for window in windows}
