"""The engine: the same answers as the model's own forward, and a clear answer to every odd request."""

import functools
import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from headmax import HeadmaxForCausalLM
from headmax.data.tokenizer import mistral
from headmax.generate import GREEDY, Engine, Request, Sampling
from headmax.generate.text import CONTEXT, TextStream
from lab.bench.drift import drift
from tests.generate.agreement import agreement
from tests.waiting import no_waiting

from .checkpoint import MODELS, VOCABULARY, make_model, make_tokenizer, tokens

everywhere = pytest.mark.parametrize("name", MODELS)


@functools.cache
def tokenizer_that_comes_along() -> Any:
    return mistral().tokenizer


def largest_difference(engine: Engine, model: HeadmaxForCausalLM, text: torch.Tensor, start: int) -> float:
    """Of a logit, between decoding text [batch, time] from `start` on and the model's full forward."""
    with torch.no_grad():
        whole = model(text.to(model.device)).logits
    prefixes = [engine.prefill(row[:start].tolist()) for row in text]
    apart = [(logits - whole[:, start + n]).abs().max() for n, logits in enumerate(engine.forced(prefixes, text[:, start:]))]
    assert len(apart) == text.shape[1] - start
    return float(torch.stack(apart).max())


@everywhere
def test_forced_tokens_give_the_logits_of_the_full_forward(name: str) -> None:
    model, text = make_model(name), torch.tensor([tokens(512, seed=0), tokens(512, seed=1)])
    assert largest_difference(Engine(model, max_batch=2, max_length=512), model, text, 1) <= 1e-4


@everywhere
def test_a_prompt_longer_than_any_training_sequence(name: str) -> None:
    """5,000 tokens, read in pieces of 1,000, then a few more."""
    model, text = make_model(name), torch.tensor([tokens(5010)])
    assert largest_difference(Engine(model, prefill_chunk=1000, max_length=6000), model, text, 5000) <= 1e-4


@everywhere
def test_greedy_tokens_are_those_of_hugging_face(name: str) -> None:
    model = make_model(name, eos_token_id=None)
    where, margin = agreement(model, Engine(model, max_length=200), tokens(20), 100)
    assert margin <= 1e-4, f"differs at {where}"


def test_a_difference_to_hugging_face_is_found_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(eos_token_id=None)
    engine, right = Engine(model), Engine.generate

    def wrong(self: Engine, *arguments: Any, **options: Any) -> Any:
        completions = right(self, *arguments, **options)
        completions[0].tokens[3] ^= 1
        return completions

    monkeypatch.setattr(Engine, "generate", wrong)
    where, margin = agreement(model, engine, tokens(5), 8)
    assert where == 3
    assert margin > 1e-3


@everywhere
def test_unequal_prompts_in_one_batch_give_what_each_gives_alone(name: str) -> None:
    engine = Engine(make_model(name), max_batch=5, max_length=100, prefill_chunk=64)
    rules = [
        GREEDY,
        Sampling(seed=3),
        Sampling(seed=3),
        Sampling(seed=4, top_k=9, temperature=0.7),
        Sampling(seed=5, repetition_penalty=1.3),
    ]
    requests = [Request(tokens(n, seed=n), None, 10 + n % 4, rule) for n, rule in zip((33, 7, 7, 1, 20), rules, strict=True)]
    together = engine.generate(requests, logprobs=True)
    assert together[1].tokens == together[2].tokens
    for request, completion in zip(requests, together, strict=True):
        alone = engine.generate(request, logprobs=True)[0]
        assert completion.tokens == alone.tokens
        assert len(alone.tokens) == request.max_new_tokens
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_seeds_make_the_difference() -> None:
    engine, prompt = Engine(make_model(), max_batch=8), tokens(5)
    drawn = engine.generate([Request(prompt, None, 20, Sampling(seed=seed)) for seed in range(8)])
    assert len({tuple(c.tokens) for c in drawn}) == 8
    assert engine.generate(Request(prompt, None, 20, Sampling(seed=3)))[0].tokens == drawn[3].tokens


def test_log_probabilities_are_those_of_the_full_forward() -> None:
    model, prompt = make_model(), tokens(11)
    completion = Engine(model).generate(Request(prompt, None, 30, Sampling(temperature=1.5, top_k=50)), logprobs=True)[0]
    with torch.no_grad():
        expected = model(torch.tensor([prompt + completion.tokens])).logits[0, 10:-1].log_softmax(-1)
    wanted = expected.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


def test_stop_tokens_end_a_request_and_leave_the_others_alone() -> None:
    engine, prompts = Engine(make_model(), max_batch=2), [tokens(5, seed=1), tokens(9, seed=2)]
    free = engine.generate([Request(prompt, None, 20, GREEDY) for prompt in prompts])
    stop = free[0].tokens[6]
    cut = free[0].tokens.index(stop) + 1
    ended = engine.generate([Request(prompts[0], None, 20, GREEDY, stop_tokens=[stop]), Request(prompts[1], None, 20, GREEDY)])
    assert ended[0].tokens == free[0].tokens[:cut]
    assert (ended[0].finish, ended[1].finish) == ("stop_token", "length")
    assert ended[1].tokens == free[1].tokens


def test_text_streams_in_order_and_ends_at_a_stop_string() -> None:
    engine = Engine(make_model(), max_batch=2, tokenizer=make_tokenizer())
    free = engine.generate(Request("Hello", None, 60, Sampling(seed=11)))[0]
    assert free.text == make_tokenizer().decode(free.tokens, skip_special_tokens=True)
    stop = free.text[20:23]
    pieces: list[tuple[int, int, str]] = []
    requests = [
        Request("Hello", None, 60, Sampling(seed=11), stop_strings=[stop, "never there"]),
        Request("Hello", None, 60, Sampling(seed=11)),
    ]
    ended, whole = engine.generate(requests, on_token=lambda *piece: pieces.append(piece))
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.finish == "stop_string"
    assert whole.tokens == free.tokens
    for n, completion in enumerate((ended, whole)):
        assert "".join(text for number, _, text in pieces if number == n) == completion.text
        assert [token for number, token, _ in pieces if number == n] == completion.tokens


def test_a_stop_string_in_many_tokens_is_never_shown_in_part() -> None:
    tokenizer = make_tokenizer()
    stream = TextStream(tokenizer, ["wörld!", "XX"])
    shown = [stream.push(token) for token in tokenizer("Hello wör, wörld! more")["input_ids"]]
    assert stream.stopped
    assert "".join(shown) == stream.text == "Hello wör, "
    assert "�" not in "".join(shown)
    other = TextStream(tokenizer, ["abc"])
    assert "".join([other.push(token) for token in tokenizer("xyzab")["input_ids"]]) == "xyz"
    assert other.finish() == "ab"
    half = TextStream(tokenizer)
    assert [half.push(token) for token in tokenizer("ö")["input_ids"]] == ["", "ö"]


@given(
    st.lists(
        st.one_of(st.text("🦜🦚𒀀ö ", max_size=12), st.text(max_size=12), st.sampled_from(["word after word ", " a  b", "\n"])), max_size=8
    )
)
@settings(max_examples=60, deadline=None)
def test_streamed_text_is_the_text_of_all_tokens(texts: list[str]) -> None:
    """With the tokenizer that comes along: bytes of characters in a row, a special token before each text, words with their spaces."""
    tokenizer = tokenizer_that_comes_along()
    ids = [token for text in texts for token in tokenizer.encode(text).ids]
    stream = TextStream(tokenizer)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join([stream.push(token) for token in ids]) + stream.finish() == whole
    for cut in range(1, len(ids), 5):  # after a prompt: a first space is a space
        prompt = tokenizer.decode(ids[:cut], skip_special_tokens=True)
        after = TextStream(tokenizer, (), ids[:cut])
        if any(tokenizer.decode(ids[max(0, cut - n) : cut]).strip("�") for n in range(1, CONTEXT)) and not prompt.endswith("�"):
            assert prompt + "".join([after.push(token) for token in ids[cut:]]) + after.finish() == whole


class Pieces:
    """A tokenizer of given pieces, which counts what it decodes."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.decoded = pieces, 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(tokens)
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")


def test_a_stop_string_beside_half_a_character_is_found_in_the_end() -> None:
    tokenizer = Pieces(b"a", b" end\xe4")
    stream = TextStream(tokenizer, [" end"])
    assert [stream.push(0), stream.push(1), stream.stopped] == ["a", "", False]
    assert (stream.finish(), stream.text, stream.stopped) == ("", "a", True)


@pytest.mark.parametrize("token", [0, 1, 2], ids=["whole", "in bytes", "broken"])
def test_a_token_costs_as_much_late_in_a_text_as_early(token: int) -> None:
    """Also where each character is several tokens, and where bytes never make one."""
    tokenizer = Pieces(b"ab ", b"\xe4", b"\xe4", b"\xb8", b"\xad")
    stream, ids = TextStream(tokenizer), [1, 3, 4] * 400 if token == 1 else [token] * 1200
    shown = "".join([stream.push(one) for one in ids])
    assert shown + stream.finish() == tokenizer.decode(ids, True)
    assert tokenizer.decoded < 120 * len(ids)
    assert len(shown) > 0.9 * len(stream.text), "nothing is held back for long"


def test_what_might_begin_a_stop_string_is_held_back() -> None:
    """The longest end of the text that is a beginning of one, whatever repeats in it."""
    stops = ["aab", "abac", "b" * 900]
    for text in ("aaa", "xaba", "abaa", "ab", "bb" * 10, "caa", "c"):
        stream = TextStream(Pieces(*(bytes([n]) for n in range(128))), stops)
        shown = "".join([stream.push(ord(letter)) for letter in text])
        held = max(n for n in range(len(text) + 1) if any(stop[:n] == text[len(text) - n :] for stop in stops))
        assert shown == text[: len(text) - held]


def test_text_and_tokens_are_the_same_request() -> None:
    engine = Engine(make_model(), tokenizer=make_tokenizer())
    ids = make_tokenizer()("abc")["input_ids"]
    assert engine.generate(Request("abc", None, 5))[0].tokens == engine.generate(Request(ids, None, 5))[0].tokens


@pytest.mark.parametrize(
    ("options", "request_options", "said"),
    [
        ({}, {"prompt": []}, r"prompt is empty: give at least one token, such as bos_token_id 0"),
        ({}, {"prompt": [3, VOCABULARY]}, r"prompt has token ids from 3 to 258, the vocabulary 258 tokens"),
        ({}, {"prompt": [3, -1]}, r"prompt has token ids from -1 to 3"),
        ({}, {"prompt": [[3, 4]]}, r"prompt must be one sequence of token ids, got shape \[1, 2\]"),
        ({}, {"prompt": [2**70]}, r"prompt must be one sequence of token ids below 258"),
        ({}, {"prompt": [1.5]}, r"prompt must be token ids, which are integers, got torch.float32"),
        ({"tokenizer": make_tokenizer()}, {"prompt": ""}, r"prompt is empty: give at least one token"),
        ({"max_length": 0}, {"prompt": [3]}, r"max_length must be an integer of at least 1, got 0"),
        ({}, {"prompt": "text"}, r"prompt is text, and the engine has no tokenizer"),
        ({}, {"prompt": [3], "stop_tokens": [999]}, r"stop_tokens has 999, which is not in the vocabulary of 258 tokens"),
        ({}, {"prompt": [3], "stop_strings": ["x"]}, r"stop_strings need a tokenizer"),
        ({"tokenizer": "any"}, {"prompt": [3], "stop_strings": [""]}, r"stop_strings has an empty string"),
        ({}, {"prompt": [3], "stop_tokens": 2}, r"stop_tokens must be a list of token ids, got 2"),
        ({"tokenizer": "any"}, {"prompt": [3], "stop_strings": "ab"}, r"stop_strings must be a list of strings, got 'ab'"),
        ({}, {"prompt": [3], "max_new_tokens": -1}, r"max_new_tokens must be an integer that is not negative, got -1"),
    ],
)
def test_odd_requests_get_a_clear_answer(options: dict[str, Any], request_options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Engine(make_model(), **options).generate(Request(**request_options))


def test_limits_of_an_engine() -> None:
    engine = Engine(make_model(), max_batch=2)
    with pytest.raises(ValueError, match=r"requests must be 1 to max_batch = 2 at a time, got 3"):
        engine.generate([Request([3])] * 3)
    with pytest.raises(ValueError, match=r"requests must be 1 to max_batch = 2 at a time, got 0"):
        engine.generate([])
    nothing = engine.generate([Request([3], max_new_tokens=0), Request([4], max_new_tokens=2)])
    assert [len(c.tokens) for c in nothing] == [0, 2]
    assert engine.generate(Request([3], max_new_tokens=0))[0].finish == "length"
    with pytest.raises(ValueError, match="max_length must be given: the model has attention layers"):
        Engine(make_model("hybrid"))
    with pytest.raises(ValueError, match="10 tokens and 6 more exceed the engine's max_length = 15"):
        Engine(make_model("hybrid"), max_length=15).generate(Request(tokens(10), max_new_tokens=6))
    with pytest.raises(ValueError, match="max_batch must be an integer of at least 1, got 0"):
        Engine(make_model(), max_batch=0)
    with pytest.raises(ValueError, match=r"state_dtype must be one of .*, got torch.int8"):
        Engine(make_model(), state_dtype=torch.int8)
    llama = LlamaForCausalLM(LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8))
    with pytest.raises(ValueError, match="model must be a HeadmaxForCausalLM, got LlamaForCausalLM"):
        Engine(llama)  # type: ignore[arg-type]


def test_a_sequence_that_ended_does_not_disturb_the_others_at_the_end_of_the_cache() -> None:
    engine = Engine(make_model("hybrid"), max_batch=2, max_length=20)
    requests = [Request(tokens(18), None, 2, GREEDY), Request(tokens(3, seed=5), None, 17, GREEDY)]
    together = engine.generate(requests)
    assert [c.tokens for c in together] == [engine.generate(request)[0].tokens for request in requests]


def test_a_bfloat16_state_drifts_a_little_and_a_float32_one_not_at_all() -> None:
    model, text = make_model(), torch.tensor(tokens(64))
    assert [fed for fed, _, _ in drift(model, text, torch.bfloat16, [16, 64])] == [16, 64]
    for _, largest, divergence in drift(model, text, torch.bfloat16, [16, 64]):
        assert 1e-5 < largest < 0.5
        assert 0 < divergence < 1e-2
    assert list(drift(model, text, torch.float32, [64])) == [(64, 0.0, 0.0)]


def test_layers_that_cannot_be_fused_decode_beside_those_that_can(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    layers = {"num_hidden_layers": 3, "mixer": ["gla", "attention", "gated_deltanet"]}
    plain, text = make_model("hybrid", **layers), torch.tensor([tokens(7)])
    model = make_model("hybrid", fused=True, **layers)
    model.load_state_dict(plain.state_dict())
    expected = largest_difference(Engine(plain, max_length=10), plain, text, 4)
    model.model.layers[2].mixer.b_proj = torch.nn.Sequential(model.model.layers[2].mixer.b_proj)
    with caplog.at_level(logging.WARNING):
        assert largest_difference(Engine(model, max_length=10), plain, text, 4) <= expected + 1e-5
    assert "decoding without fused kernels in some layers: a part of a GatedDeltaNet block has been replaced" in caplog.text
    assert [why is None for why in model.model.decoder.obstacles] == [True, True, False]


def test_an_adapter_on_the_head_is_asked() -> None:
    pytest.importorskip("triton")
    from peft import LoraConfig, get_peft_model

    model, text = make_model("gla", tie_word_embeddings=False, fused=True), torch.tensor([tokens(7)])
    get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    engine = Engine(model)
    assert largest_difference(engine, model, text, 4) <= 1e-4
    assert model.model.decoder.obstacles == [None] * len(model.model.layers)


@pytest.mark.gpu
@everywhere
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_graphs_give_the_logits_of_the_full_forward(name: str, batch: int) -> None:
    model = make_model(name).cuda()
    text = torch.tensor([tokens(512 if batch == 1 else 40, seed=n) for n in range(batch)])
    for fused in (True, False):
        model.config.fused = fused
        for block in model.model.layers:
            block.fused = fused
        assert largest_difference(Engine(model, max_batch=batch, max_length=512), model, text, 1) <= 1e-4


@pytest.mark.gpu
@everywhere
def test_graphs_choose_the_tokens_that_a_cpu_chooses(name: str) -> None:
    rules = [
        GREEDY,
        Sampling(seed=3),
        Sampling(seed=4, top_p=0.8),
        Sampling(seed=5, repetition_penalty=1.3, min_p=0.02),
        Sampling(seed=6, top_k=5),
    ]
    requests = [Request(tokens(5 + n, seed=n), None, 24, rule) for n, rule in enumerate(rules)]
    slow, fast = Engine(make_model(name), max_batch=5, max_length=64), Engine(make_model(name).cuda(), max_batch=5, max_length=64)
    for _ in range(2):  # the second time nothing is captured
        for a, b in zip(slow.generate(requests, logprobs=True), fast.generate(requests, logprobs=True), strict=True):
            assert a.tokens == b.tokens
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


@pytest.mark.gpu
@everywhere
def test_on_a_gpu_greedy_tokens_are_those_of_hugging_face(name: str) -> None:
    model = make_model(name, eos_token_id=None).cuda()
    where, margin = agreement(model, Engine(model, max_length=200), tokens(20), 100)
    assert margin <= 1e-4, f"differs at {where}"


@pytest.mark.gpu
def test_a_step_waits_for_nothing_and_takes_no_memory() -> None:
    from headmax.generate.sampling import Features

    model = make_model("gla").cuda()
    engine = Engine(model, max_batch=4)
    engine.step.sampler.remember()
    for features in (Features(), Features(True, True, True, True)):
        advance = engine.step.prepare(4, features)
        engine.step.load([engine.prefill(tokens(9))] * 4)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with no_waiting():
            for _ in range(100):
                advance()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
