"""One model for all mixers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from headmax.layers.block import Block
from headmax.layers.head_parallel import all_logits, divide, shard_parameter
from headmax.layers.initialized import Initialized
from headmax.layers.loss import IGNORED, linear_cross_entropy
from headmax.layers.mixers.attention import Attention
from headmax.layers.norm import RMSNorm
from headmax.layers.rotary import RotarySettings
from headmax.models.cache import HeadmaxCache, adopt
from headmax.models.configuration import HeadmaxConfig
from headmax.models.decoding import Decoder
from headmax.models.inputs import check_arguments, named_packing, read_inputs, read_labels, within_sequences
from headmax.ops.packing import Packing

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
    _is_stateful = True
    """Whether a state cannot be rolled back, so that transformers refuses assisted decoding; false where all layers are attention."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range * getattr(module, "init_factor", 1.0))
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, Initialized):
            for parameter, value in module.initial_parameters():
                init.copy_(parameter, value)


class HeadmaxModel(HeadmaxPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: HeadmaxConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            Block(
                config.build_mixer(mixer),
                config.hidden_size,
                config.mlp_width(mixer),
                config.norm_eps,
                config.backend,
                config.fused,
            )
            for mixer in config.mixers
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.backend)
        self.uses_attention = [isinstance(block.mixer, Attention) for block in self.layers]
        self.rotary: list[RotarySettings | None] = [getattr(block.mixer, "rotary", None) for block in self.layers]
        self.windows: list[int | None] = [getattr(block.mixer, "window", None) for block in self.layers]
        for block in self.layers:
            block.mixer.o_proj.init_factor = config.init_factor(config.output_init)  # type: ignore[union-attr]
            block.mlp.down_proj.init_factor = config.init_factor(config.down_init)  # type: ignore[union-attr]
        self.decoder = Decoder()
        self.context_group: ProcessGroup | None = None
        self.tensor_group: ProcessGroup | None = None
        self.gradient_checkpointing = False
        self.compiler_limits: Callable[[], AbstractContextManager[Any]] = nullcontext
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

        Where `attention_mask` is 0 there is no token, wherever that is. Mask and positions are read on the host for this, so in a compiled
        model without graph breaks leave the mask out and pass `cu_seqlens` as a `Packing`.
        Without attention layers packed sequences may keep their states (`use_cache=True`), one per sequence, and continue from such states:
        packed again, or as the rows of a batch.
        """
        check_arguments(kwargs)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        inputs = read_inputs(
            self, input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, cu_seqlens, return_gates
        )
        x = inputs.x
        gates: list = []
        hidden_states: list = []
        with self.compiler_limits():
            for n, block in enumerate(self.layers):
                if output_hidden_states:
                    hidden_states.append(x)
                x, state, gate = (block.step if inputs.fused_step(n) else block)(x, **inputs.for_block(n))  # type: ignore[operator]
                inputs.advance(n, state, x.shape[1])
                gates.append(gate)
        x = self.norm(x)
        return HeadmaxModelOutput(
            last_hidden_state=x,
            past_key_values=inputs.cache if inputs.use_cache else None,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            gates=tuple(gates) if return_gates else None,
        )

    def set_context_group(self, group: ProcessGroup | None) -> None:
        """From now on inputs are this rank's segment of every sequence, in the order of the group's ranks; with None, whole sequences."""
        self.context_group = group
        for block in self.layers:
            block.mixer.context_group = group  # type: ignore[union-attr]

    def set_tensor_mesh(self, mesh: DeviceMesh) -> None:
        """From now on the ranks of the mesh share the heads, the columns of MLPs and the vocabulary; their inputs must be the same."""
        divide("vocab_size", self.config.vocab_size, mesh.size())
        self.tensor_group = mesh.get_group()
        shard_parameter(self.embed_tokens, "weight", mesh, 0)
        for block in self.layers:
            cast(Block, block).set_tensor_mesh(mesh)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compiles block by block: the blocks share their code, so one compilation serves all layers, and none holds a graph break.

        Each kind of mixer, dtype, and way of calling (training, packed, with a state) is a compilation of that shared code, more of them
        than PyTorch allows by itself; the limit is raised while the blocks run.
        """
        limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS * len({type(mixer) for mixer in self.config.mixers}))
        self.compiler_limits = functools.partial(torch._dynamo.config.patch, recompile_limit=limit)
        for block in self.layers:
            block.compile(fullgraph=True, backend=backend)


class HeadmaxForCausalLM(HeadmaxPreTrainedModel, GenerationMixin):
    """The language model. It is used like any Hugging Face causal LM: `model(input_ids, labels=...)`, `model.generate(...)`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: HeadmaxConfig) -> None:
        super().__init__(config)
        self.model = HeadmaxModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._is_stateful = not all(self.model.uses_attention)
        self.post_init()

    def set_tensor_mesh(self, mesh: DeviceMesh) -> None:
        """As the model's; the last layer's vocabulary too."""
        self.model.set_tensor_mesh(mesh)
        if self.config.tie_word_embeddings:
            self.tie_weights()
        else:
            shard_parameter(self.lm_head, "weight", mesh, 0)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any) -> None:  # type: ignore[override]
        """What `generate` calls for a cache: a HeadmaxCache, the one kind this model has."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation {generation_config.cache_implementation!r}: this model has a HeadmaxCache only; leave it out"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = HeadmaxCache(self.config.num_hidden_layers)

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """What `generate_batch` begins with."""
        raise ValueError(
            "generate_batch keeps pages of keys and values, which a HeadmaxCache does not have: call generate on a padded batch, "
            "or run headmax serve"
        )

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
        """Logits and loss, as of any Hugging Face causal LM.

        Args:
            input_ids: token ids [batch, time].
            attention_mask: [batch, time], 0 where there is no token, anywhere in a row.
            position_ids: [batch, time]; in a batch of one, positions that restart mark packed sequences.
            past_key_values: a `HeadmaxCache`, to continue a text.
            inputs_embeds: [batch, time, hidden], instead of `input_ids`.
            labels: [batch, time], shifted inside the model; -100 is ignored.
            use_cache: return the states as `.past_key_values`.
            logits_to_keep: compute logits of the last so many tokens, or of these positions, only; 0 for all.
            cu_seqlens: boundaries of packed sequences, with batch 1: [sequences + 1] integers, or a `Packing`; also as `cu_seq_lens_q`.
            return_gates: return the head gates as `.gates`, a pair (read, write) of [batch, time, heads] per layer.
            output_hidden_states: return the hidden states of all layers.
            skip_logits: compute the loss in parts and leave `.logits` None; done in training mode with labels unless given.
        """
        check_arguments(kwargs)
        cu_seqlens = named_packing(cu_seqlens, position_ids, kwargs)
        tokens = input_ids if input_ids is not None else inputs_embeds
        labels = read_labels(labels, tokens)
        if labels is not None and self.model.context_group is not None:
            kwargs = self._piece_of_the_mean(**kwargs)
        elif labels is not None:
            cu_seqlens, labels = within_sequences(labels, tokens, attention_mask, position_ids, cu_seqlens)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        unusual = return_gates or output_hidden_states or cu_seqlens is not None
        output = self._replay(input_ids, attention_mask, position_ids, past_key_values, use_cache, unusual)
        if output is None:
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
        loss, logits = self._read_out(cast(Tensor, output.last_hidden_state), labels, logits_to_keep, skip_logits, kwargs)
        return HeadmaxCausalLMOutput(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,  # type: ignore[arg-type]
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            gates=output.gates,
        )

    def _read_out(
        self, hidden: Tensor, labels: Tensor | None, logits_to_keep: int | Tensor, skip_logits: bool | None, others: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """(loss, logits) of the last hidden states; one of them is None where it is not asked for."""
        last = getattr(self.lm_head, "weight", None)  # an adapter may have none
        if last is not None and last.is_meta and not hidden.is_meta:  # PyTorch 2.13 multiplies by whatever lies in memory
            raise ValueError("lm_head is on the meta device, where weights have no values: load it before you call the model")
        plain = type(self.lm_head) is nn.Linear  # an adapter around it, such as LoRA's, must be called itself
        if skip_logits and labels is not None and not plain:
            raise ValueError(f"skip_logits=True takes the loss from lm_head's weight, but lm_head is a {type(self.lm_head).__name__}")
        if skip_logits is None:
            skip_logits = self.training and labels is not None and plain
        if skip_logits:
            return None if labels is None else self._loss(hidden, labels, **others), None
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = all_logits(self.lm_head, self.model.tensor_group, hidden[:, kept])
        if labels is None:
            return None, logits
        return self._loss_of_logits(logits, labels, **others), logits

    def _replay(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: HeadmaxCache | None,
        use_cache: bool | None,
        unusual: bool,
    ) -> HeadmaxModelOutput | None:
        """One more token of each sequence as a CUDA graph, where that can be."""
        if cache is not None:
            adopt(cache, len(self.model.layers))
        if cache is None or input_ids is None or input_ids.shape[1] != 1 or torch.is_grad_enabled():
            return None
        if use_cache is False or cache.get_seq_length() == 0:
            return None
        if not self.model.decoder.graphs_on(input_ids.device):
            return None
        if unusual:
            self.model.decoder.log_once("hidden states, gates or packed sequences are requested")
            return None
        hidden = self.model.decoder.replay(self.model, input_ids, attention_mask, position_ids, cache)
        return None if hidden is None else HeadmaxModelOutput(last_hidden_state=hidden, past_key_values=cache)

    def _piece_of_the_mean(self, shift_labels: Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Of the loss over all ranks' tokens: the sum over ranks is their mean."""
        if shift_labels is None:
            raise ValueError("shift_labels must say what this rank's tokens predict: the last one's next token is on another rank")
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != IGNORED).sum()
            dist.all_reduce(num_items_in_batch, group=self.model.context_group)
        return {"shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch, **kwargs}

    def _loss_of_logits(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        try:
            return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        except IndexError as error:
            raise ValueError(f"labels must be {IGNORED} or 0 to {self.config.vocab_size - 1}, the vocabulary: {error}") from None

    def _loss(
        self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, shift_labels: Tensor | None = None, **_: Any
    ) -> Tensor:
        """The mean loss of predicting each next token; Hugging Face's Trainer hands the number of them in over all its devices."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        shift_labels = shift_labels.to(x.device)
        weight, group = self.lm_head.weight, self.model.tensor_group
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        total = linear_cross_entropy(x, weight, shift_labels, self.config.backend, group)
        return total / ((shift_labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)
