"""What transformers' tools expect of a model: its cache, its layer types, its heads for labels; and what is refused by name."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, DynamicCache, StaticCache

from headmax import HeadmaxForCausalLM, HeadmaxForSequenceClassification, HeadmaxForTokenClassification
from headmax.layers import LORA_TARGETS
from headmax.models import HeadmaxCache
from tests.generate.checkpoint import make_model, tokens

NAMES = ("gla", "retnet", "gated_deltanet", "hybrid", "attention")


def make(name: str, **changes: Any) -> HeadmaxForCausalLM:
    return make_model("gla", mixer="attention", head_gate=None, **changes) if name == "attention" else make_model(name, **changes)


def text(rows: int, length: int) -> torch.Tensor:
    return torch.tensor([tokens(length, seed=n) for n in range(rows)])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_an_empty_dynamic_cache_is_taken(name: str) -> None:
    model, ids = make(name), text(2, 12)
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        model(ids[:, :5], past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 5
        assert (model(ids[:, 5:], past_key_values=cache).logits - model(ids).logits[:, 5:]).abs().max() <= 1e-4
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, past_key_values=DynamicCache(), **options), model.generate(ids, **options))


def test_caches_of_keys_and_values_alone_are_refused_by_name() -> None:
    model, ids = make("gla"), text(1, 6)
    filled = DynamicCache()
    filled.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    for cache in (filled, StaticCache(model.config, 10)):
        with pytest.raises(
            ValueError, match=f"past_key_values must be a HeadmaxCache or an empty DynamicCache, got {type(cache).__name__}"
        ):
            model(ids, past_key_values=cache)
    for kind in ("static", "offloaded", "quantized"):
        with pytest.raises(ValueError, match=f"cache_implementation '{kind}': this model has a HeadmaxCache only"):
            model.generate(ids, cache_implementation=kind, max_new_tokens=2)
    with pytest.raises(ValueError, match="generate_batch keeps pages of keys and values"):
        model.generate_batch([tokens(4)])
    with pytest.raises(ValueError, match=r"attention_mask must be \[batch, time\]: a 4-D mask"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6))


@pytest.mark.parametrize("name", [*NAMES, "linear", "kda", "mamba2"])
@torch.no_grad()
def test_a_model_can_be_pickled_and_copied(name: str) -> None:
    model, ids = make(name), text(1, 6)
    expected = model(ids).logits
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    model.lm_head.weight.zero_()
    assert all(torch.equal(other(ids).logits, expected) for other in copies)


@torch.no_grad()
def test_attention_layers_show_keys_and_values_and_can_be_cropped() -> None:
    model, ids = make("attention"), text(2, 12)
    cache = model(ids, use_cache=True).past_key_values
    assert cache.is_croppable
    assert cache.layers[0].keys.shape == cache.layers[0].values.shape == (2, 2, 12, 16)
    cache.crop(-5)
    assert cache.get_seq_length() == 7
    assert (model(ids[:, 7:], past_key_values=cache).logits - model(ids).logits[:, 7:]).abs().max() <= 1e-5
    with pytest.raises(ValueError, match="crop takes the number of tokens to forget as a negative one, got 3"):
        cache.crop(3)


@torch.no_grad()
def test_a_cache_that_refuses_to_be_cropped_stays_whole() -> None:
    model, ids = make("hybrid"), text(1, 12)
    cache = model(ids, use_cache=True).past_key_values
    cache.layers.reverse()  # attention first
    with pytest.raises(ValueError, match="a recurrent state cannot be cropped"):
        cache.crop(-2)
    assert [layer.get_seq_length() for layer in cache.layers] == [12, 12]
    assert cache.layers[0].keys.shape[2] == 12
    assert cache.layers[1].keys is None


def test_assisted_decoding_where_all_layers_are_attention() -> None:
    model, ids = make("attention"), text(1, 8)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=make("attention", initializer_range=0.1), **options), expected)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), expected)


@pytest.mark.parametrize("name", NAMES)
def test_export_with_the_cache(name: str) -> None:
    model, ids = make(name), text(2, 20)
    exported = torch.export.export(model, (ids[:, :19],), kwargs={"use_cache": True}).module()
    cache = exported(ids[:, :19], use_cache=True).past_key_values
    assert type(cache) is HeadmaxCache
    assert cache.get_seq_length() == 19
    assert (model(ids[:, 19:], past_key_values=cache).logits - model(ids).logits[:, 19:]).abs().max() <= 1e-4
    halved = tree_map_only(torch.Tensor, lambda x: x / 2, cache)
    assert torch.equal(halved.layers[0].state[0], cache.layers[0].state[0] / 2)


def test_a_configuration_says_what_its_layers_are() -> None:
    assert make("gla").config.layer_types == ["linear_attention"] * 2
    assert make("attention").config.layer_types == ["full_attention"] * 2
    hybrid = make("hybrid").config
    assert (hybrid.layer_types, hybrid.sliding_window) == (["linear_attention", "sliding_attention"], 24)
    model, ids = make("gla"), text(1, 4)
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == len(model.model(ids).hidden_states) == 3


@pytest.mark.parametrize("name", ["gla", "hybrid"])
def test_labels_of_texts_and_tokens(name: str, tmp_path: Path) -> None:
    config, ids = make(name, pad_token_id=0).config, text(3, 9)
    config.num_labels = 4
    whole = AutoModelForSequenceClassification.from_config(config).eval()
    each = AutoModelForTokenClassification.from_config(config).eval()
    assert (type(whole), type(each)) == (HeadmaxForSequenceClassification, HeadmaxForTokenClassification)
    padded = torch.nn.functional.pad(ids, (0, 3))
    scores = whole(padded, attention_mask=(padded != 0).long()).logits
    assert torch.allclose(scores, whole(ids).logits, atol=1e-5)
    assert whole(ids, labels=torch.tensor([0, 1, 3])).loss.isfinite()
    assert each(ids, labels=ids % 4).loss.isfinite()
    assert each(ids).logits.shape == (3, 9, 4)
    whole.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=False)
    assert torch.equal(again(ids).logits, whole(ids).logits)
    with pytest.raises(ValueError, match="output_attentions is not supported"):
        whole(ids, output_attentions=True)


def test_lora_finds_its_targets_by_itself() -> None:
    from peft import LoraConfig, get_peft_model

    config = get_peft_model(make("gla"), LoraConfig(r=2)).peft_config["default"]
    assert config.target_modules == set(LORA_TARGETS)
