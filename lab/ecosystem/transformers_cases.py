"""transformers' tests of a causal language model, on every mixer with and without gates; `tests` is transformers', not ours."""

from __future__ import annotations

import unittest
from typing import Any

import torch
from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester
from transformers.models.auto import modeling_auto

from headmax import (
    HeadGateConfig,
    HeadmaxCache,
    HeadmaxConfig,
    HeadmaxForCausalLM,
    HeadmaxForSequenceClassification,
    HeadmaxForTokenClassification,
    HeadmaxModel,
)
from headmax.layers import MIXERS, AttentionConfig
from headmax.layers.mixers.attention import AttentionState

HYBRID = ["gated_deltanet", AttentionConfig(num_kv_heads=1, qk_norm=True, output_gate=True, rotary_dim=8)]
MODELS: dict[str, Any] = {name: name for name, kind in MIXERS.items() if kind.language} | {"hybrid": HYBRID}


modeling_auto.MODEL_MAPPING_NAMES["headmax"] = "HeadmaxModel"  # where the tests look up which labels a class takes
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["headmax"] = "HeadmaxForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["headmax"] = "HeadmaxForSequenceClassification"
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES["headmax"] = "HeadmaxForTokenClassification"


class Tester(CausalLMModelTester):
    """Makes the small configurations that the tests ask for."""

    base_model_class, causal_lm_class, config_class = HeadmaxModel, HeadmaxForCausalLM, HeadmaxConfig
    sequence_classification_class, token_classification_class = HeadmaxForSequenceClassification, HeadmaxForTokenClassification
    mixer: Any
    gate: HeadGateConfig | None

    def get_config(self) -> HeadmaxConfig:
        own = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "pad_token_id", "bos_token_id", "eos_token_id")
        given = {name: getattr(self, name) for name in own}
        return HeadmaxConfig(mixer=self.mixer, num_heads=self.num_attention_heads, head_gate=self.gate, **given)


class Suite(CausalLMModelTest):
    """What is particular to models with states of their own."""

    has_attentions = False
    """Whether the model returns maps of attention."""

    def setUp(self) -> None:
        super().setUp()
        stateful = HeadmaxForCausalLM._is_stateful  # of a class that is stateful or not by its configuration
        HeadmaxForCausalLM._is_stateful = "linear_attention" in self.model_tester.get_config().layer_types
        self.addCleanup(setattr, HeadmaxForCausalLM, "_is_stateful", stateful)

    def test_left_padding_compatibility(self) -> None:
        """Which the models without maps of attention would skip."""
        self.has_attentions = True
        super().test_left_padding_compatibility()

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: HeadmaxCache, seq_length: int, config: HeadmaxConfig
    ) -> None:
        assert len(past_key_values) == config.num_hidden_layers
        for layer in past_key_values.layers:
            assert layer.get_seq_length() == seq_length
            assert layer.state is not None
            assert len(layer.state[0]) == batch_size
            if isinstance(layer.state, AttentionState):
                assert layer.state.keys.shape[2] == seq_length

    def _check_caches_are_equal(self, cache1: HeadmaxCache, cache2: HeadmaxCache) -> None:
        for one, other in zip(cache1.layers, cache2.layers, strict=True):
            torch.testing.assert_close(one.state, other.state)
            assert one.seen == other.seen


def suite(name: str, mixer: Any, gate: HeadGateConfig | None) -> type:
    tester = type(f"{name}_tester", (Tester,), {"mixer": mixer, "gate": gate})
    return type(name, (Suite, unittest.TestCase), {"model_tester_class": tester, "__module__": __name__})


for _name, _mixer in MODELS.items():
    globals()[f"Test_{_name}"] = suite(f"Test_{_name}", _mixer, None)
    if _name != "attention":
        globals()[f"Test_{_name}_gated"] = suite(f"Test_{_name}_gated", _mixer, HeadGateConfig())
