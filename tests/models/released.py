"""Tiny models of transformers' own, random weights: one per model type that headmax accelerates."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

VOCAB = 96
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
GROUPED = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
KINDS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
KIMI = {"linear_head_dim": 12, "linear_num_heads": 3, "mlp_layer_types": ["dense", "sparse", "dense"], "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_expand": 2, "mamba_chunk_size": 16}
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
ALL: dict[str, dict[str, Any]] = {
    "qwen3_next": ATTENTION | GROUPED | EXPERTS | KINDS | {"head_dim": 16},
    "qwen3_5_text": ATTENTION | GROUPED | KINDS | {"head_dim": 32},
    "qwen3_5_moe_text": ATTENTION | GROUPED | EXPERTS | KINDS | {"head_dim": 32},
    "qwen4_exp_text": ATTENTION
    | GROUPED
    | EXPERTS
    | KINDS
    | {"head_dim": 32, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32}
    | {"indexer_budget": 64, "indexer_compress_ratio": 4},
    "olmo_hybrid": ATTENTION | GROUPED | KINDS | {"num_key_value_heads": 4},
    "kimi_linear": ATTENTION | LATENT | KIMI | KINDS | FEW,
    "bailing_hybrid": ATTENTION
    | LATENT
    | KIMI
    | KINDS
    | FEW
    | {"n_group": 1, "topk_group": 1, "head_dim": 12, "num_attention_heads": 3, "num_key_value_heads": 3},
    "glm5_next_text": ATTENTION
    | LATENT
    | KIMI
    | KINDS
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 16, "qk_rope_head_dim": 0}
    | {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 64, "index_kpool": 1},
    "mamba2": {"num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 12, "n_groups": 2, "chunk_size": 16}
    | {"time_step_limit": (0.05, 0.08)},
    "nemotron_h": ATTENTION
    | {"layers_block_type": ["mamba", "attention", "mlp", "mamba"], "ssm_state_size": 12, "mamba_num_heads": 4, "mamba_head_dim": 16}
    | {"n_groups": 2, "chunk_size": 16, "head_dim": 8},
    "falcon_h1": ATTENTION
    | MAMBA
    | {"num_hidden_layers": 2, "mamba_d_ssm": 64, "ssm_in_multiplier": 1.3, "ssm_multipliers": [0.8, 0.9, 1.1, 1.2, 0.7]},
    "bamba": ATTENTION | MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": ATTENTION
    | MAMBA
    | FEW
    | {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 16},
    "zamba2": ATTENTION
    | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 4, "mamba_ngroups": 2}
    | {"mamba_d_state": 12, "chunk_size": 16, "num_key_value_heads": 4, "adapter_rank": 8},
    "minimax": ATTENTION | KINDS | FEW | {"block_size": 16, "head_dim": 12},
}
MODELS = {kind: settings for kind, settings in ALL.items() if kind in transformers.CONFIG_MAPPING}
"""Those that this transformers has."""
CLASSES = {"mamba2": "Mamba2ForCausalLM", "qwen4_exp_text": "Qwen4ExpForCausalLM", "glm5_next_text": "Glm5NextTextModel"}
"""Those that the Auto classes do not give: flash-linear-attention, once imported, takes the name mamba2."""


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """The model in float32, with biases, decays and norms drawn too, so that every part of it counts."""
    kind_of = getattr(transformers, CLASSES.get(kind) or modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    torch.manual_seed(seed)
    model = kind_of(kind_of.config_class(**(COMMON | MODELS[kind] | changes))).eval()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if name.endswith("A_log"):
                parameter.uniform_(-2.0, 1.0)
            elif parameter.ndim < 2:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.06)
    return model
