"""The one model: counts, cache, generation, packing, padding, checkpoints, compilation."""

import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening, StaticCache

from headmax import HeadGateConfig, HeadmaxCache, HeadmaxConfig, HeadmaxForCausalLM, Packing, recipes
from headmax.layers import AttentionConfig

GATE = HeadGateConfig(init_std=1.0)
MODELS: dict[str, dict[str, Any]] = {
    "linear": {"mixer": "linear", "head_gate": GATE, "feature_map": "elu"},
    "retnet": {"mixer": "retnet", "head_gate": GATE},
    "gla": {"mixer": "gla", "head_gate": GATE, "conv_size": 4},
    "gated_deltanet": {"mixer": "gated_deltanet", "head_gate": GATE, "num_v_heads": 8},
    "kda": {"mixer": "kda", "head_gate": GATE},
    "mamba2": {"mixer": "mamba2", "head_gate": GATE, "head_k_dim": 8},
    "attention": {"mixer": "attention"},
    "hybrid": {"mixer": ["gla", "attention", "gated_deltanet"], "head_gate": GATE, "num_hidden_layers": 3},
    "qwen": {
        "mixer": ["gated_deltanet", AttentionConfig(num_kv_heads=2, window=5, qk_norm=True, output_gate=True, rotary_dim=4)],
        "head_gate": GATE,
    },
}


def make(name: str, **changes: Any) -> HeadmaxForCausalLM:
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 60, "initializer_range": 0.3, "pad_token_id": 0}
    return HeadmaxForCausalLM(HeadmaxConfig(**settings | MODELS[name] | changes)).eval()


def tokens(batch: int, time: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 60, (batch, time), generator=torch.Generator().manual_seed(seed))


def close(x: torch.Tensor, y: torch.Tensor, tolerance: float = 2e-5) -> bool:
    return bool((x - y).abs().max() <= tolerance * y.abs().max())


everywhere = pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == "kda" else name for name in MODELS])


@pytest.mark.parametrize(
    ("mixer", "parameters", "gate_parameters"),
    [
        ("attention", 341_099_520, None),
        ("retnet", 347_403_264, 49_152),
        ("gla", 341_707_776, 24_576),
        ("gated_deltanet", 341_499_072, 24_576),
    ],
)
def test_parameter_counts_of_the_paper(mixer: str, parameters: int, gate_parameters: int | None) -> None:
    def count(**options: Any) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in HeadmaxForCausalLM(HeadmaxConfig(mixer=mixer, **options)).parameters())

    assert count() == parameters
    if gate_parameters is not None:
        assert count(head_gate=HeadGateConfig()) == parameters + gate_parameters
        assert count(head_gate=HeadGateConfig(source="hidden_heads")) == parameters + 49_152
        assert count(head_gate=HeadGateConfig(kind="uniform")) == parameters


@everywhere
@pytest.mark.parametrize("at", [1, 7])
def test_cache_continues_where_it_stopped(name: str, at: int) -> None:
    model, ids = make(name), tokens(2, 12)
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :at], use_cache=True)
        second = model(ids[:, at:], past_key_values=first.past_key_values, use_cache=True)
    assert close(torch.cat([first.logits, second.logits], 1), whole)
    assert second.past_key_values.get_seq_length() == 12


def from_scratch(model: HeadmaxForCausalLM, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """Greedy tokens, each from a full pass without a cache or padding."""
    for _ in range(steps):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@everywhere
def test_greedy_generation_of_unequal_left_padded_prompts_equals_recomputing(name: str) -> None:
    model = make(name, eos_token_id=None)
    prompts = [tokens(1, length, seed=length) for length in (3, 9, 6)]
    padded = torch.cat([torch.nn.functional.pad(prompt, (9 - prompt.shape[1], 0)) for prompt in prompts])
    generated = model.generate(padded, attention_mask=(padded != 0).long(), max_new_tokens=12, do_sample=False)
    for row, prompt in zip(generated, prompts, strict=True):
        expected = from_scratch(model, prompt, 12)[0]
        assert row[9:].tolist() == expected[prompt.shape[1] :].tolist()


@everywhere
def test_beam_search_with_cache_equals_without(name: str) -> None:
    model, ids = make(name), tokens(2, 5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "num_beams": 4, "do_sample": False}
    assert model.generate(ids, **options).tolist() == model.generate(ids, use_cache=False, **options).tolist()


@everywhere
def test_beam_search_of_left_padded_prompts_equals_each_alone(name: str) -> None:
    model = make(name)
    prompts = [tokens(1, length, seed=length) for length in (3, 7)]
    padded = torch.cat([torch.nn.functional.pad(prompt, (7 - prompt.shape[1], 0)) for prompt in prompts])
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    together = model.generate(padded, attention_mask=(padded != 0).long(), **options)
    for row, prompt in zip(together, prompts, strict=True):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, prompt.shape[1] :].tolist()
        assert row[7 : 7 + len(alone)].tolist() == alone


def test_prefill_in_pieces_and_other_caches() -> None:
    model, ids = make("gla"), tokens(1, 9)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    assert model.generate(ids, prefill_chunk_size=4, **options).tolist() == model.generate(ids, **options).tolist()
    with pytest.raises(ValueError, match="cache_implementation 'static': this model has a HeadmaxCache only"):
        model.generate(ids, cache_implementation="static", **options)


@everywhere
def test_padding_changes_nothing_wherever_it_is(name: str) -> None:
    """On either side and in between, before a state and after one: logits are those of the tokens alone."""
    model, ids, mask = make(name), tokens(3, 10), torch.ones(3, 10, dtype=torch.int64)
    mask[0, :3], mask[1, [2, 3, 7]], mask[2, 6:] = 0, 0, 0
    alone = [model(row[kept.bool()][None]).logits[0] for row, kept in zip(ids, mask, strict=True)]
    logits = model(ids, attention_mask=mask).logits
    cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
    later = model(ids[:, 5:8], attention_mask=mask[:, :8], past_key_values=cache).logits
    last = model(ids[:, 8:], attention_mask=mask, past_key_values=cache).logits
    for row in range(3):
        kept = mask[row].bool()
        assert close(logits[row, kept], alone[row])
        assert close(torch.cat([logits[row, :5], later[row], last[row]])[kept], alone[row])


def test_a_recurrent_model_may_be_told_of_padding_in_the_new_tokens_only() -> None:
    model, ids = make("gla"), tokens(1, 8)
    past = model(ids[:, :5], use_cache=True).past_key_values
    later = model(torch.cat([ids[:, :1], ids[:, 5:]], 1), attention_mask=torch.tensor([[0, 1, 1, 1]]), past_key_values=past)
    assert close(later.logits[:, 1:], model(ids).logits[:, 5:])
    assert later.past_key_values.get_seq_length() == 9
    hybrid = make("hybrid")
    past = hybrid(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="attention_mask must cover the cache too"):
        hybrid(ids[:, :3], attention_mask=torch.ones(1, 3), past_key_values=past)


def test_left_padding_may_go_on_in_the_next_piece() -> None:
    model, ids = make("gla"), tokens(1, 4)
    mask = torch.tensor([[0] * 6 + [1] * 4])
    padded = torch.cat([torch.zeros(1, 6, dtype=ids.dtype), ids], 1)
    past = model(padded[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
    assert close(model(padded[:, 5:], attention_mask=mask, past_key_values=past).logits[:, 1:], model(ids).logits)


def test_compiled_training_sees_the_documents_that_positions_tell() -> None:
    model = make("gla").train()
    pieces = [{"input_ids": tokens(1, length, seed=length)[0].tolist()} for length in (5, 1, 9)]
    batch = DataCollatorWithFlattening(return_tensors="pt")(pieces)
    compiled = torch.compile(model, backend="aot_eager")
    assert close(compiled(**batch).loss, model(**batch).loss)
    assert not close(model(**batch).loss, model(batch["input_ids"], labels=batch["labels"]).loss)
    torch._dynamo.reset()


def test_a_compiled_model_keeps_apart_what_positions_tell_apart() -> None:
    model, ids, positions = make("gla"), tokens(1, 9), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    compiled = torch.compile(model.model, backend="aot_eager")
    with torch.no_grad():
        expected = model.model(ids, position_ids=positions).last_hidden_state
        assert close(compiled(ids, position_ids=positions).last_hidden_state, expected)
        assert not close(model.model(ids).last_hidden_state, expected)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_takes_padding() -> None:
    model, ids, mask = make("gla").train(), tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    compiled = torch.compile(model, backend="aot_eager")
    for given in (mask, torch.ones_like(mask)):
        assert close(compiled(ids, attention_mask=given, labels=ids).loss, model(ids, attention_mask=given, labels=ids).loss)
    torch._dynamo.reset()


def test_sampling_several_sequences_and_continuing_a_cache() -> None:
    model, ids = make("gla"), tokens(1, 5)
    ones = torch.ones_like(ids)
    assert model.generate(ids, attention_mask=ones, max_new_tokens=3, do_sample=True, num_return_sequences=3).shape == (3, 8)
    cache = model(ids[:, :3], use_cache=True).past_key_values
    continued = model.generate(ids, attention_mask=ones, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert continued.tolist() == model.generate(ids, attention_mask=ones, max_new_tokens=4, do_sample=False).tolist()


def test_assisted_decoding_is_refused_by_name() -> None:
    model = make("gla")
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models, such as HeadmaxForCausalLM"):
        model.generate(tokens(1, 5), attention_mask=torch.ones(1, 5), assistant_model=make("gla"), max_new_tokens=3)


@pytest.mark.parametrize("name", ["linear", "retnet", "gla", "gated_deltanet", "mamba2"])
def test_packed_sequences_keep_states_that_fork(name: str) -> None:
    """Contexts read in one row, then continued in several ways: packed again, and as the rows of a batch."""
    model = make(name).double()
    contexts = [tokens(1, length, seed=length) for length in (7, 1, 70)]
    with torch.no_grad():
        cache = model(torch.cat(contexts, 1), cu_seqlens=Packing([0, 7, 8, 78]), use_cache=True).past_key_values
        forks, pieces = [2, 0, 0, 1], [tokens(1, length, seed=20 + length) for length in (3, 2, 1, 5)]
        expected = [model(torch.cat([contexts[n], piece], 1)).logits[:, -piece.shape[1] :] for n, piece in zip(forks, pieces, strict=True)]
        forked = cache.select(torch.tensor(forks))
        output = model(torch.cat(pieces, 1), cu_seqlens=Packing([0, 3, 5, 6, 11]), past_key_values=forked, use_cache=True)
        assert close(output.logits, torch.cat(expected, 1), 1e-12)
        assert forked.layers[0].tokens.tolist() == [73, 9, 8, 6]
        rows = tokens(3, 4, seed=5)
        whole = [model(torch.cat([context, row[None]], 1)).logits[:, -4:] for context, row in zip(contexts, rows, strict=True)]
        assert close(model(rows, past_key_values=cache).logits, torch.cat(whole), 1e-12)


@everywhere
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    model = make(name)
    pieces = [tokens(1, length, seed=length) for length in (5, 1, 9)]
    packed = torch.cat(pieces, 1)
    with torch.no_grad():
        expected = torch.cat([model(piece).logits for piece in pieces], 1)
        assert close(model(packed, cu_seqlens=torch.tensor([0, 5, 6, 15])).logits, expected)
        assert close(model(packed, cu_seqlens=Packing([0, 5, 6, 15])).logits, expected)
        batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": piece[0].tolist()} for piece in pieces])
        output = model(**batch)
        own = model(packed, labels=packed, cu_seqlens=Packing([0, 5, 6, 15])).loss
        flash = DataCollatorWithFlattening(return_tensors="pt", return_position_ids=False, return_flash_attn_kwargs=True)
        again = model(**flash([{"input_ids": piece[0].tolist()} for piece in pieces]))
    assert close(output.logits, expected)
    assert close(again.logits, expected)
    assert close(own, output.loss)
    losses = torch.nn.functional.cross_entropy(expected[0, :-1], batch["labels"][0, 1:], ignore_index=-100)
    assert close(output.loss, losses)


@everywhere
def test_save_and_reload_through_the_auto_classes(name: str, tmp_path: Any) -> None:
    model, ids = make(name), tokens(2, 8)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reloaded(ids).logits, model(ids).logits)
    assert reloaded.config.head_gate == model.config.head_gate
    assert isinstance(AutoConfig.from_pretrained(tmp_path), HeadmaxConfig)


def test_config_survives_json() -> None:
    config = HeadmaxConfig(mixer=["gla", "attention"], num_hidden_layers=2, head_gate=HeadGateConfig(scale="heads", kind="sigmoid"))
    again = HeadmaxConfig.from_dict(config.to_dict())
    assert again.head_gate == config.head_gate
    assert again.to_dict() == config.to_dict()
    assert HeadmaxConfig(head_gate={"read": False}).head_gate == HeadGateConfig(read=False)


def test_pipeline(tmp_path: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(57))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    make("gla", eos_token_id=None).save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    generate = pipeline("text-generation", model=str(tmp_path), tokenizer=str(tmp_path))
    text = generate("w1 w2 w3", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert text.startswith("w1 w2 w3")
    assert text.count("w") == 3 + 4


@everywhere
def test_compiles_into_one_graph(name: str) -> None:
    model, ids = make(name), tokens(2, 70)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, actual = model(ids, labels=ids, use_cache=False), compiled(ids, labels=ids, use_cache=False)
    assert close(actual.logits, expected.logits)
    gradients = torch.autograd.grad(expected.loss, list(model.parameters()), retain_graph=True)
    for x, y in zip(torch.autograd.grad(actual.loss, list(model.parameters())), gradients, strict=True):
        assert close(x, y, 1e-3)
    torch._dynamo.reset()


def test_one_compiled_graph_serves_every_length() -> None:
    model = make("retnet")
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for time in (5, 9, 31, 70, 130):
            assert close(compiled(tokens(2, time), use_cache=False).logits, model(tokens(2, time), use_cache=False).logits)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


@everywhere
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    model, ids = make(name).train(), tokens(2, 12)
    model(ids, labels=ids).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert close(p.grad, gradient, 1e-5)


def test_gates_come_out_when_asked() -> None:
    model, ids = make("hybrid"), tokens(2, 8)
    assert model(ids).gates is None
    assert model.model.layers[0](model.model.embed_tokens(ids)).gates is None, "what a compiled block returns has a gradient to be filled"
    gates = model(ids, return_gates=True).gates
    assert [pair is None for pair in gates] == [False, True, False]
    for read, write in (gates[0], gates[2]):
        assert read.shape == write.shape == (2, 8, 4)
        torch.testing.assert_close(read.sum(-1), torch.ones(2, 8))
    assert make("gla", head_gate=None)(ids, return_gates=True).gates == ((None, None), (None, None))


def test_logits_to_keep_embeddings_and_hidden_states() -> None:
    model, ids = make("gla"), tokens(2, 8)
    whole = model(ids).logits
    assert model(ids, logits_to_keep=1).logits.shape == (2, 1, 60)
    assert close(model(ids, logits_to_keep=1).logits, whole[:, -1:])
    assert close(model(ids, logits_to_keep=torch.tensor([2, 5])).logits, whole[:, [2, 5]])
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, whole)
    hidden = model(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == 3
    assert torch.equal(model.lm_head(hidden[-1]), whole)
    assert isinstance(model(ids, return_dict=False), tuple)


def test_state_is_constant_in_length() -> None:
    model = make("gla")
    sizes = [model(tokens(1, time), use_cache=True).past_key_values.nbytes() for time in (5, 50)]
    assert sizes[0] == sizes[1] == 2 * 4 * (4 * 4 * 8 + 3 * 64)


def test_tied_and_untied_embeddings() -> None:
    tied, untied = make("gla"), make("gla", tie_word_embeddings=False)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@everywhere
def test_low_precision_weights_run(name: str, dtype: torch.dtype) -> None:
    model, ids = make(name), tokens(2, 20)
    expected = model(ids).logits
    actual = model.to(dtype)(ids).logits
    assert actual.dtype == dtype
    assert (actual.float() - expected).norm() / expected.norm() < 0.1


def test_autocast_keeps_parameters_in_float32() -> None:
    model, ids = make("hybrid").train(), tokens(2, 20)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixer": "gla2"}, "unknown mixer 'gla2'; did you mean 'gla'"),
        ({"mixer": ["gla"], "num_hidden_layers": 2}, "mixer lists 1 layers, num_hidden_layers is 2"),
        ({"mixer": "attention", "head_gate": HeadGateConfig()}, "head_gate has no use in a model of attention layers"),
        ({"mixer": "gla", "num_v_heads": 8}, "num_v_heads has no use in a model of gla layers"),
        ({"mixer": "gated_deltanet", "feature_map": "relu"}, "feature_map has no use in a model of gated_deltanet layers"),
        ({"num_heads": -4}, "num_heads must be a positive integer, got -4"),
        ({"head_k_dim": 12.5}, "head_k_dim must be a positive integer or None, got 12.5"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"head_gates": HeadGateConfig()}, "unknown field 'head_gates'; did you mean 'head_gate'"),
        ({"num_layers": 2}, "unknown field 'num_layers'; did you mean 'num_hidden_layers'"),
        ({"d_model": 64}, "unknown field 'd_model'; did you mean 'hidden_size'"),
        ({"head_gate": {"reed": True}}, "head_gate has no field 'reed'; did you mean 'read'"),
        ({"backend": "chunkwize"}, "unknown backend 'chunkwize'; did you mean 'chunkwise'"),
        ({"output_norm": "heads"}, "unknown output_norm 'heads'; did you mean 'head'"),
        ({"feature_map": "rellu"}, "unknown feature_map 'rellu'; did you mean 'relu'"),
        ({"conv_size": -1}, "conv_size must be 0 or a width of at least 2 or None, got -1"),
        ({"intermediate_size": 0}, "intermediate_size must be a positive integer or None, got 0"),
        ({"norm_eps": -1.0}, "norm_eps must be a positive, finite number, got -1.0"),
        ({"norm_eps": math.inf}, "norm_eps must be a positive, finite number, got inf"),
        ({"norm_eps": "1e-6"}, "norm_eps must be a positive, finite number, got '1e-6'"),
        ({"rotary_base": -1.0}, "rotary_base must be a positive, finite number, got -1.0"),
        ({"initializer_range": math.nan}, "initializer_range must be a finite number of at least 0, got nan"),
        ({"mlp_ratio": math.inf}, "mlp_ratio must be at most 1,000, got inf"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers must be at most 10,000, got 10,000,000"),
        ({"hidden_size": 10**12}, "hidden_size must be at most 16,777,216, got 1,000,000,000,000"),
        ({"pad_token_id": 10**9}, "pad_token_id 1000000000 is not in the vocabulary of"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id must be the number of a token or a list of them or None"),
        ({"mixer": None}, "mixer must be a name, settings such as GLAConfig\\(\\), or a list with one per layer, got None"),
        ({"head_gate": "softmax"}, "head_gate must be a HeadGateConfig, a dict of its fields or None, got 'softmax'"),
    ],
)
def test_config_errors(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"HeadmaxConfig: {message}"):
        HeadmaxConfig(**settings)


def test_call_errors() -> None:
    model, ids = make("hybrid"), tokens(1, 6)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="past_key_values must be a HeadmaxCache or an empty DynamicCache, got StaticCache"):
        model(ids, past_key_values=StaticCache(model.config, 10))
    with pytest.raises(ValueError, match=r"attention_mask must be \[batch, time\]: a 4-D mask"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6))
    with pytest.raises(ValueError, match=r"attention_mask must be \[batch, seen \+ time\] = \[1, 6\], got \[1, 5\]"):
        model(ids, attention_mask=torch.ones(1, 5))
    with pytest.raises(ValueError, match="attention layers keep no states of packed sequences"):
        model(ids, cu_seqlens=torch.tensor([0, 2, 6]), use_cache=True)
    with pytest.raises(ValueError, match="cu_seqlens must end at time = 6, got 5"):
        model(ids, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="cu_seqlens packs sequences into batch 1, got batch 2"):
        model(tokens(2, 6), cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match=r"position_ids must be \[batch or 1, time\] = \[1, 6\], got \[6\]"):
        model(ids, position_ids=torch.arange(6))
    with pytest.raises(ValueError, match="position_ids restart inside a row"):
        model(tokens(2, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]] * 2))
    with pytest.raises(ValueError, match="attention layers keep no states of packed sequences"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=True)
    with pytest.raises(ValueError, match="seq_idx alone does not tell"):
        model(ids, seq_idx=torch.zeros(1, 6))
    with pytest.raises(ValueError, match=r"unknown argument 'return_gate'; did you mean 'return_gates'"):
        model(ids, return_gate=True)
    with pytest.raises(ValueError, match="output_attentions is not supported: recurrent layers have no attention maps"):
        model(ids, output_attentions=True)
    assert model(ids, output_attentions=False, head_mask=None).logits.shape == (1, 6, 60)
    with pytest.raises(ValueError, match="attention_mask pads rows and cu_seqlens packs sequences"):
        model(ids, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]), cu_seqlens=torch.tensor([0, 2, 6]), use_cache=False)
    with pytest.raises(ValueError, match="past_key_values has 1 layers, the model 3"):
        model(ids, past_key_values=HeadmaxCache(1))
    with pytest.raises(ValueError, match="a recurrent state cannot be cropped"):
        model(ids, use_cache=True).past_key_values.crop(-1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks, at a block's input
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32")  # the compiler's advice; this test wants all digits
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax-gla-tiny", "softmax-retnet-tiny", "softmax-gdn-tiny", "transformer-tiny"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_on_the_gpu_computes_what_it_does_on_the_cpu(name: str, compiled: bool) -> None:
    """Kernels in the place of plain PyTorch: loss and every gradient in float32, and the loss under bfloat16."""
    torch.manual_seed(0)
    model = HeadmaxForCausalLM(recipes.get(name).model).train()
    ids = torch.randint(0, 1000, (2, 150))
    expected = model(ids, labels=ids).loss
    expected.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.cuda()
    if compiled:
        model.model.compile_blocks()
    loss = model(ids.cuda(), labels=ids.cuda()).loss
    loss.backward()
    assert abs(loss.item() - expected.item()) <= 1e-5 * expected.item()
    for key, p in model.named_parameters():
        assert p.grad is not None
        assert (p.grad.cpu() - gradients[key]).norm() <= 1e-3 * gradients[key].norm() + 1e-7, key
    with torch.autocast("cuda", torch.bfloat16):
        assert abs(model(ids.cuda(), labels=ids.cuda()).loss.item() - expected.item()) <= 1e-2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks, at a block's input
def test_blocks_compiled_one_by_one_share_a_graph_and_agree() -> None:
    torch.manual_seed(0)
    model = HeadmaxForCausalLM(recipes.get("softmax-gla-tiny").model).train()
    ids = torch.randint(0, 1000, (2, 70))
    eager = model(ids, labels=ids).loss
    expected = torch.autograd.grad(eager, list(model.parameters()))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.model.compile_blocks(backend="aot_eager")
    loss = model(ids, labels=ids).loss
    actual = torch.autograd.grad(loss, list(model.parameters()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert abs(loss - eager) <= 1e-5
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).norm() <= 1e-4 * e.norm() + 1e-7


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks, at a block's input
def test_compiled_blocks_serve_every_way_of_calling_a_hybrid() -> None:
    """More ways than the compiler allows by itself before it gives up."""
    torch._dynamo.reset()
    mixers = ["gla", "attention", "gated_deltanet", "retnet"]
    config = HeadmaxConfig(mixer=mixers, hidden_size=32, num_hidden_layers=4, num_heads=2, vocab_size=50)
    plain, model = HeadmaxForCausalLM(config).eval(), HeadmaxForCausalLM(config).train()
    model.load_state_dict(plain.state_dict())
    model.model.compile_blocks(backend="eager")
    ids = torch.randint(50, (1, 40))
    model(ids, labels=ids, cu_seqlens=Packing(torch.tensor([0, 10, 40]))).loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    model.eval()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    settings = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids[:, :14].view(2, 7), **settings), plain.generate(ids[:, :14].view(2, 7), **settings))


def test_training_holds_no_logits_and_has_the_same_loss() -> None:
    torch.manual_seed(0)
    model = HeadmaxForCausalLM(recipes.get("softmax-gla-tiny").model).train()
    ids = torch.randint(0, 1000, (2, 30))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    short, full = model(ids, labels=labels), model(ids, labels=labels, skip_logits=False)
    assert short.logits is None
    assert full.logits.shape == (2, 30, model.config.vocab_size)
    assert torch.allclose(short.loss, full.loss, rtol=1e-5)
    items = torch.tensor(100)
    assert torch.allclose(
        model(ids, labels=labels, num_items_in_batch=items).loss * 100, full.loss * (labels[:, 1:] != -100).sum(), rtol=1e-5
    )


def test_the_residual_stream_has_autocasts_dtype() -> None:
    model = HeadmaxForCausalLM(recipes.get("softmax-gla-tiny").model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.model(torch.zeros(1, 3, dtype=torch.long)).last_hidden_state.dtype == torch.bfloat16
