"""One model for all mixers."""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from headmax.layers import MIXERS
from headmax.layers.block import Block
from headmax.layers.initialized import Initialized
from headmax.layers.loss import IGNORED, linear_cross_entropy
from headmax.layers.mixers.attention import attention_mask as make_attention_mask
from headmax.layers.norm import RMSNorm
from headmax.layers.rotary import RotarySettings
from headmax.models.cache import HeadmaxCache
from headmax.models.configuration import HeadmaxConfig
from headmax.ops.checks import check_packing
from headmax.ops.packing import Packing
from headmax.ops.registry import autocast_dtype

RECOMPILATIONS = 32
"""Ways to call a block that may each be compiled."""
Gates = tuple[tuple[Tensor | None, Tensor | None] | None, ...]


@dataclass
class HeadmaxModelOutput(BaseModelOutputWithPast):
    gates: Gates | None = None
    """One (read, write) pair per layer, each [batch, time, heads]; None for attention layers."""


@dataclass
class HeadmaxCausalLMOutput(CausalLMOutputWithPast):
    gates: Gates | None = None
    """One (read, write) pair per layer, each [batch, time, heads]; None for attention layers."""


class HeadmaxPreTrainedModel(PreTrainedModel):
    config: HeadmaxConfig
    config_class = HeadmaxConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    _is_stateful = True  # a recurrent state cannot be rolled back, so Hugging Face refuses assisted decoding by this model's name

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, Initialized):
            for parameter, value in module.initial_parameters():
                init.copy_(parameter, value)


def padding(attention_mask: Tensor | None) -> Tensor | None:
    """The mask where it masks anything. `torch.compile` cannot look, and keeps it."""
    if attention_mask is None or torch.compiler.is_compiling():
        return attention_mask
    return None if attention_mask.all() else attention_mask


@functools.cache
def misspelt(name: str) -> str | None:
    """The argument of our own that a name is all but equal to."""
    return next(iter(difflib.get_close_matches(name, ("return_gates", "cu_seqlens", "skip_logits"), n=1, cutoff=0.9)), None)


def find_packing(
    tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cu_seqlens: Tensor | Packing | None
) -> Packing | None:
    """The packing of tokens [batch, time, ...]: as given, or where unpadded positions do not count on by one."""
    packing = check_packing("HeadmaxModel", cu_seqlens, tokens.shape[0], tokens.shape[1], tokens.device)
    return packing if packing is not None or position_ids is None else packing_of_positions(tokens, attention_mask, position_ids)


@torch.compiler.disable(reason="position_ids are read on the host to find packed sequences: pass cu_seqlens as a Packing instead")
def packing_of_positions(tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor) -> Packing | None:
    if padding(attention_mask) is not None:
        return None  # positions of padding mean nothing
    if position_ids.shape[0] == 1 and tokens.shape[0] == 1:
        return Packing.from_positions(position_ids)
    if (position_ids.diff(dim=1) != 1).any():
        raise ValueError("position_ids restart inside a row: pack sequences into a batch of one, or pad them and pass attention_mask")
    return None


def pads_on_the_right(attention_mask: Tensor | None) -> bool:
    """Whether padding follows a token somewhere; not known under `torch.compile`, which cannot look."""
    if attention_mask is None or torch.compiler.is_compiling():
        return False
    return bool((attention_mask.int().diff(dim=1) < 0).any())


class HeadmaxModel(HeadmaxPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: HeadmaxConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            Block(MIXERS[name](**config.mixer_arguments(name)), config.hidden_size, config.mlp_width(name), config.norm_eps, config.backend)
            for name in config.mixers
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.backend)
        self.uses_attention = [name == "attention" for name in config.mixers]
        self.rotary: list[RotarySettings | None] = [getattr(block.mixer, "rotary", None) for block in self.layers]
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HeadmaxCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        return_gates: bool = False,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> HeadmaxModelOutput:
        """`cu_seqlens`, or `position_ids` that restart in a batch of one, pack sequences: nothing crosses their boundaries.

        Positions are read on the host for that, so under `torch.compile` pass `cu_seqlens` as a `Packing`.
        Without attention layers packed sequences may keep their states (`use_cache=True`), one per sequence, and continue from such states:
        packed again, or as the rows of a batch.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = x.to(
            autocast_dtype(x.device) or x.dtype
        )  # embeddings are looked up in float32; the residual stream is what autocast computes in
        batch, time, _ = x.shape
        if past_key_values is not None:
            if not isinstance(past_key_values, HeadmaxCache):
                raise ValueError(f"past_key_values must be a HeadmaxCache, got {type(past_key_values).__name__}")
            if len(past_key_values.layers) != len(self.layers):
                raise ValueError(f"past_key_values has {len(past_key_values.layers)} layers, the model {len(self.layers)}")
        if position_ids is not None and tuple(position_ids.shape) not in ((1, time), (batch, time)):
            raise ValueError(f"position_ids must be [batch or 1, time] = {[batch, time]}, got {list(position_ids.shape)}")
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if attention_mask is not None and tuple(attention_mask.shape) not in ((batch, time), (batch, past + time)):
            raise ValueError(f"attention_mask must be [batch, seen + time] = {[batch, past + time]}, got {list(attention_mask.shape)}")
        new_only = past > 0 and attention_mask is not None and attention_mask.shape[1] == time
        attention_mask, compiling = padding(attention_mask), torch.compiler.is_compiling()
        looked_at = None if compiling else position_ids  # with labels they were looked at already
        packing = find_packing(x, attention_mask, looked_at, cu_seqlens)
        if packing is not None and (use_cache or past) and any(self.uses_attention):
            raise ValueError("attention layers keep no states of packed sequences: pass use_cache=False and no past_key_values")
        pads_right = pads_on_the_right(attention_mask)
        if past and not all(self.uses_attention) and (pads_right or (new_only and attention_mask is not None and not compiling)):
            raise ValueError(
                "attention_mask pads tokens that follow a state, which would decay through them: continue such rows by themselves"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and packing is None and not pads_right
        elif use_cache and pads_right and not all(self.uses_attention):
            raise ValueError("attention_mask must pad on the left where a state is kept, or the state decays through the padding")
        if use_cache and past_key_values is None:
            past_key_values = HeadmaxCache(self.config.num_hidden_layers)

        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.layers[0].seen
            if isinstance(seen, Tensor):  # after packed sequences, each of its own length
                seen = seen.unsqueeze(1) if packing is None else seen[packing.sequence_ids]
            position_ids = torch.arange(time, device=x.device) if packing is None else packing.positions
            position_ids = (position_ids + seen).view(-1, time)
        mask, full_mask = self._masks(x, past, attention_mask, packing)
        gates: list = []
        hidden_states: list = []
        positions = {turn: turn and turn.at(position_ids, x.dtype) for turn in set(self.rotary)}
        for n, (block, attends) in enumerate(zip(self.layers, self.uses_attention, strict=True)):
            if output_hidden_states:
                hidden_states.append(x)
            layer = None if past_key_values is None else past_key_values.layers[n]
            x, state, gate = block(
                x,
                state=layer and layer.state,
                return_state=use_cache,
                positions=positions[self.rotary[n]],
                packing=packing,
                mask=full_mask if attends else mask,
                return_gates=return_gates,
            )
            if return_gates:
                gates.append(gate)
            if layer is not None and use_cache:
                layer.advance(state, time if packing is None else packing.cu_seqlens.diff())
        x = self.norm(x)
        return HeadmaxModelOutput(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            gates=tuple(gates) if return_gates else None,
        )

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compiles block by block: the blocks share their code, so one compilation serves all layers, and none holds a graph break.

        Each kind of mixer, dtype, and way of calling (training, packed, with a state) is a compilation of that shared code; as many as
        those may come to are allowed.
        """
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS * len(set(self.config.mixers)))
        for block in self.layers:
            block.compile(fullgraph=True, backend=backend)

    def _masks(self, x: Tensor, past: int, attention_mask: Tensor | None, packing: Packing | None) -> tuple[Tensor | None, Tensor | None]:
        """The padding of these tokens [batch, time] for recurrent layers, and the mask of attention layers."""
        batch, time, _ = x.shape
        mask = None if attention_mask is None else attention_mask[:, -time:]
        if not any(self.uses_attention):
            return mask, None
        if attention_mask is not None and attention_mask.shape[1] != past + time:
            raise ValueError(f"attention_mask must cover the cache too, [batch, seen + time] = {[batch, past + time]}")
        return mask, make_attention_mask(time, past, attention_mask, packing, x.device)


class HeadmaxForCausalLM(HeadmaxPreTrainedModel, GenerationMixin):
    """The language model: `model(input_ids, labels=...)`, `model.generate(...)`, and all else a Hugging Face causal LM does."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: HeadmaxConfig) -> None:
        super().__init__(config)
        self.model = HeadmaxModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any) -> None:  # type: ignore[override]
        """What `generate` calls for a cache: a HeadmaxCache, the one kind this model has."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(f"cache_implementation {generation_config.cache_implementation!r}: this model has a HeadmaxCache only")
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = HeadmaxCache(self.config.num_hidden_layers)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HeadmaxCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | Packing | None = None,
        return_gates: bool = False,
        output_hidden_states: bool | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> HeadmaxCausalLMOutput:
        """As any Hugging Face causal LM; `cu_seqlens` (or `cu_seq_lens_q`) packs sequences, `return_gates` adds `.gates`.

        With labels in training mode (or `skip_logits=True`) the loss is computed piece by piece, and `.logits` is None.
        """
        if not torch.compiler.is_compiling():
            for name in kwargs:  # as Hugging Face models do, it takes what others pass around, but not a misspelt argument of its own
                if (meant := misspelt(name)) is not None:
                    raise ValueError(f"unknown argument {name!r}; did you mean {meant!r}?")
        if cu_seqlens is None:
            cu_seqlens = kwargs.pop("cu_seq_lens_q", None)
        if "seq_idx" in kwargs and position_ids is None and cu_seqlens is None:
            raise ValueError("seq_idx alone does not tell where sequences lie: pass cu_seqlens or position_ids")
        tokens = input_ids if input_ids is not None else inputs_embeds
        if labels is not None and tokens is not None:
            cu_seqlens = find_packing(tokens, attention_mask, position_ids, cu_seqlens)
            if cu_seqlens is not None:  # the last token of a sequence does not predict the first of the next
                labels = labels.masked_fill(cu_seqlens.positions == 0, -100)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            return_gates=return_gates,
            output_hidden_states=output_hidden_states,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = None, None
        plain = type(self.lm_head) is nn.Linear  # an adapter around it, such as LoRA's, must be asked itself
        if skip_logits is None:
            skip_logits = self.training and labels is not None and plain
        elif skip_logits and labels is not None and not plain:
            raise ValueError(f"skip_logits=True takes the loss from lm_head's weight, but lm_head is a {type(self.lm_head).__name__}")
        if not skip_logits:
            logits = self.lm_head(output.last_hidden_state[:, kept])
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        elif labels is not None:
            loss = self._loss(output.last_hidden_state, labels, kwargs.get("num_items_in_batch"), kwargs.get("shift_labels"))
        return HeadmaxCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            gates=output.gates,
        )

    def _loss(self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None, shift_labels: Tensor | None) -> Tensor:
        """The mean loss of predicting each next token; Hugging Face's Trainer hands the number of them in over all its devices."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        shift_labels = shift_labels.to(x.device)
        total = linear_cross_entropy(x, self.lm_head.weight, shift_labels, self.config.backend)
        return total / ((shift_labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)
