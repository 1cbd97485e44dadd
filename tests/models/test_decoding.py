"""`model.generate` and calls with a cache: one step for all of them, replayed as a graph on slots that the model lends to one cache."""

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headmax import HeadmaxForCausalLM
from headmax.models import HeadmaxCache
from headmax.models import decoding as module
from tests.generate.checkpoint import make_model, tokens

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
here = pytest.mark.gpu if GPU else lambda test: test
MIXERS = ("gla", "retnet", "gated_deltanet", "linear", "kda", "mamba2")


class Recorded(module.Replay):
    """Without a GPU: the function itself, called twice and then once more as a capture does; its results always lie in the same place."""

    captures = 0

    def __init__(self, function: Callable[[], Tensor], device: torch.device, pool: Any = None) -> None:
        Recorded.captures += 1
        if GPU:
            super().__init__(function, device, pool)
            return
        self.function, self.pool, self.replays = function, pool, 0
        function(), function()
        self.results = function()

    def __call__(self) -> Tensor:
        if GPU:
            return super().__call__()
        self.results.copy_(self.function())
        return self.results


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "Replay", Recorded)
    monkeypatch.setattr(module.Decoder, "graphs_on", lambda self, device: True)
    Recorded.captures = 0
    with torch.no_grad():
        yield


def make(name: str = "gla", **changes: Any) -> HeadmaxForCausalLM:
    return make_model(name, **{"eos_token_id": None, "fused": True} | changes).to(DEVICE)


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, device=DEVICE)


def read(model: HeadmaxForCausalLM, text: Tensor) -> HeadmaxCache:
    return model(text, use_cache=True).past_key_values


def follow(model: HeadmaxForCausalLM, cache: HeadmaxCache, text: Tensor, **options: Any) -> Tensor:
    """Logits after each token of text [batch, time], one call each."""
    return torch.cat([model(text[:, t : t + 1], past_key_values=cache, use_cache=True, **options).logits for t in range(text.shape[1])], 1)


def assert_follows(model: HeadmaxForCausalLM, cache: HeadmaxCache, before: Tensor, text: Tensor, **options: Any) -> None:
    expected = model(torch.cat([before, text], 1)).logits[:, before.shape[1] :]
    assert (follow(model, cache, text, **options) - expected).abs().max() <= 1e-4


@here
@pytest.mark.parametrize("name", MIXERS)
def test_generate_gives_the_tokens_of_the_full_forward_and_captures_once(name: str) -> None:
    model, prompt = make(name), ids(tokens(9))
    for _ in range(2):
        made = model.generate(prompt, max_new_tokens=6, do_sample=False)
        expected = model(made[:, :-1]).logits[:, 8:].argmax(-1)
        assert torch.equal(made[:, 9:], expected)
    assert (Recorded.captures, list(model.model.decoder.graphs)) == (1, [1])


@here
def test_rows_of_unequal_length_keep_their_own_positions() -> None:
    model = make("retnet")
    texts = [tokens(12, seed=1), tokens(7, seed=2)]
    padded = ids(texts[0], [0] * 5 + texts[1])
    mask = (torch.arange(12, device=DEVICE) >= torch.tensor([[0], [5]], device=DEVICE)).long()
    made = model.generate(padded, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert Recorded.captures == 1
    for row, text in zip(made, texts, strict=True):
        alone = model(ids(text + row[12:-1].tolist())).logits[0, len(text) - 1 :].argmax(-1)
        assert torch.equal(row[12:], alone)


@here
def test_beams_move_their_states_along() -> None:
    model, plain = make(), make(fused=False)
    prompt = ids(tokens(9))
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))
    assert Recorded.captures == 1


@here
def test_a_second_live_cache_goes_without_a_graph_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    texts = [ids(tokens(20, seed=n)) for n in range(2)]
    caches = [read(model, text[:, :5]) for text in texts]
    expected = [model(text).logits[:, 5:] for text in texts]
    with caplog.at_level(logging.INFO, "headmax"):
        for t in range(5, 20):
            for cache, text, logits in zip(caches, texts, expected, strict=True):
                assert (follow(model, cache, text[:, t : t + 1])[:, 0] - logits[:, t - 5]).abs().max() <= 1e-4
    assert caplog.text.count("another cache is being continued with the model's slots") == 1
    borrower = model.model.decoder.borrower
    assert borrower is not None
    assert borrower() is caches[1]  # the second step is the first that finds a graph
    del cache, caches[1]
    follow(model, caches[0], ids(tokens(1)))
    assert model.model.decoder.borrower is not None
    assert model.model.decoder.borrower() is caches[0]


@here
def test_a_deep_copy_of_a_cache_goes_its_own_way() -> None:
    model, before = make("gated_deltanet"), ids(tokens(8))
    cache = read(model, before)
    first = ids(tokens(4, seed=1))
    follow(model, cache, first)
    assert Recorded.captures == 1
    copied, seen = copy.deepcopy(cache), torch.cat([before, first], 1)
    one, other = ids(tokens(3, seed=2)), ids(tokens(3, seed=3))
    assert_follows(model, copied, seen, other)
    assert_follows(model, cache, seen, one)


@here
def test_states_selected_from_a_lent_cache_stay_as_they_are() -> None:
    model, before = make(), ids(tokens(8))
    cache = read(model, before)
    first = ids(tokens(3, seed=1))
    follow(model, cache, first)
    two = cache.select(torch.tensor([0, 0], device=DEVICE))
    follow(model, cache, ids(tokens(3, seed=2)))
    assert_follows(model, two, torch.cat([before, first], 1).expand(2, -1), ids(tokens(4, seed=3), tokens(4, seed=4)))


@here
def test_batches_that_grow_and_shrink() -> None:
    model = make()
    for batch in (1, 3, 2, 3):
        text = ids(*(tokens(14, seed=n) for n in range(batch)))
        assert_follows(model, read(model, text[:, :6]), text[:, :6], text[:, 6:])
    assert sorted(model.model.decoder.graphs) == [2, 3]
    assert Recorded.captures == 3  # three rows asked for more slots than one row had


@here
@pytest.mark.parametrize("change", ["weights", "elsewhere", "temperature", "module", "hook"])
def test_changes_of_the_model_are_seen(change: str) -> None:
    model, text = make(), ids(tokens(16))
    assert_follows(model, read(model, text[:, :4]), text[:, :4], text[:, 4:10])
    mixer = model.model.layers[0].mixer
    if change == "weights":
        mixer.v_proj.weight.mul_(1.5)
    elif change == "elsewhere":
        mixer.v_proj.weight.data = 1.5 * mixer.v_proj.weight.data
    elif change == "temperature":
        mixer.head_gate.temperature = 3.0
    elif change == "module":
        mixer.v_proj = torch.nn.Sequential(mixer.v_proj, torch.nn.Tanh())
    else:
        mixer.v_proj.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    assert_follows(model, read(model, text[:, :4]), text[:, :4], text[:, 4:])
    assert Recorded.captures == {"weights": 1, "module": 1, "hook": 1}.get(change, 2)


@here
def test_requests_for_more_go_without_a_graph_and_come_back() -> None:
    model, text = make(), ids(tokens(20))
    cache = read(model, text[:, :5])
    for start, options in ((5, {}), (8, {"return_gates": True}), (11, {}), (14, {"output_hidden_states": True}), (17, {})):
        assert_follows(model, cache, text[:, :start], text[:, start : start + 3], **options)
    assert Recorded.captures == 1
    assert "hidden states, gates or packed sequences are requested" in model.model.decoder.announced


@here
def test_several_tokens_and_gradients_after_a_lent_cache() -> None:
    model, text = make(), ids(tokens(60))
    cache = read(model, text[:, :5])
    assert_follows(model, cache, text[:, :5], text[:, 5:9])
    expected = model(text).logits
    assert (model(text[:, 9:15], past_key_values=cache).logits - expected[:, 9:15]).abs().max() <= 1e-4
    with torch.enable_grad():
        kept = model(text[:, 15:40], past_key_values=cache, use_cache=True)
        other = read(model, text[:, :5])
        with torch.no_grad():
            follow(model, other, text[:, 5:9])  # the slots move on before the gradients are taken
        kept.logits.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    state = read(model, text[:, :15])
    with torch.enable_grad():
        model(text[:, 15:40], past_key_values=state, use_cache=True).logits.square().sum().backward()
    for ours, p in zip(grads, model.parameters(), strict=True):
        assert (ours - p.grad).abs().max() <= 1e-4 * p.grad.abs().max().clamp_min(1e-3)


@here
def test_copies_of_a_model_begin_without_graphs() -> None:
    model, text = make(), ids(tokens(9))
    model.generate(text, max_new_tokens=4)
    assert list(model.model.decoder.graphs) == [1]
    twin = copy.deepcopy(model)
    assert not twin.model.decoder.graphs
    assert_follows(twin, read(twin, text), text, ids(tokens(4, seed=1)))


@here
def test_attention_layers_go_without_a_graph_and_say_why(caplog: pytest.LogCaptureFixture) -> None:
    model, text = make("hybrid"), ids(tokens(12))
    with caplog.at_level(logging.INFO, "headmax"):
        assert_follows(model, read(model, text[:, :4]), text[:, :4], text[:, 4:])
    assert "decoding without a CUDA graph: keys and values of attention layers grow with the sequence" in caplog.text
    assert Recorded.captures == 0


def test_without_graphs_a_step_runs_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model, text = make_model("gated_deltanet"), torch.tensor([tokens(30)])
    cache = read(model, text[:, :10])
    assert_follows(model, cache, text[:, :10], text[:, 10:20])
    assert (model(text[:, 20:], past_key_values=cache).logits - model(text).logits[:, 20:]).abs().max() <= 1e-4
    assert not model.model.decoder.graphs
