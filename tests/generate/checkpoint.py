"""A small model with a tokenizer of single bytes."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM
from headmax.layers import AttentionConfig

MODELS: dict[str, dict[str, Any]] = {
    "linear": {"mixer": "linear", "feature_map": "elu"},
    "retnet": {"mixer": "retnet"},
    "gla": {"mixer": "gla"},
    "gated_deltanet": {"mixer": "gated_deltanet", "num_v_heads": 4},
    "kda": {"mixer": "kda"},
    "mamba2": {"mixer": "mamba2", "head_k_dim": 16},
    "hybrid": {"mixer": ["gla", AttentionConfig(num_kv_heads=1, window=24, qk_norm=True, output_gate=True, rotary_dim=8)]},
}
VOCABULARY = 258


def make_model(name: str = "gla", **changes: Any) -> HeadmaxForCausalLM:
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 48, "vocab_size": VOCABULARY}
    settings |= {"initializer_range": 0.15, "head_gate": HeadGateConfig(init_std=1.0), "bos_token_id": 0, "eos_token_id": 1}
    return HeadmaxForCausalLM(HeadmaxConfig(**settings | MODELS[name] | changes)).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Token 0 starts a text, 1 ends it, the others are bytes."""
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save(folder: Path) -> None:
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(2, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
