"""A text read once."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headmax.generate import GREEDY, Engine, PrefixState, Request, Sampling
from headmax.generate.prefill import groups
from headmax.generate.prefix import fingerprint

from .checkpoint import MODELS, make_model, tokens


def close(x: torch.Tensor, y: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return bool((x - y).abs().max() <= tolerance)


def leaves(prefix: PrefixState) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(prefix.states) if x is not None]


@pytest.mark.parametrize("name", MODELS)
def test_pieces_batches_and_prefixes_give_the_same_state(name: str) -> None:
    model, prompts = make_model(name), [tokens(n, seed=n) for n in (70, 50, 3, 41)]
    whole = [Engine(model, max_length=100).prefill(prompt) for prompt in prompts]
    pieces = Engine(model, prefill_chunk=16, max_length=100)
    together = Engine(model, prefill_chunk=200, max_length=100)._prefill([Request(prompt) for prompt in prompts])
    for prompt, one, batched in zip(prompts, whole, together, strict=True):
        in_two = pieces.prefill(prompt[2:], prefix=pieces.prefill(prompt[:2]))
        assert torch.equal(one.tokens, torch.tensor(prompt))
        for other in (pieces.prefill(prompt), in_two, batched):
            assert torch.equal(other.tokens, one.tokens)
            assert close(other.logits, one.logits)
            for x, y in zip(leaves(other), leaves(one), strict=True):
                assert close(x, y)


def test_prompts_are_read_together_where_little_is_wasted() -> None:
    """No more than 300 tokens at a time, padding included, and none less than half as long as its neighbour."""
    assert groups([1, 100, 60, 1000, 90, 2, 51], 300) == [[3], [1, 4, 2], [6], [5], [0]]
    assert groups([5, 5, 5], 100) == [[0, 1, 2]]


@pytest.mark.parametrize("name", MODELS)
def test_a_fork_continues_as_a_fresh_reading_does(name: str) -> None:
    model = make_model(name)
    engine, text = Engine(model, max_batch=4, max_length=100), tokens(40)
    prefix = engine.prefill(text[:30])
    before = [x.clone() for x in leaves(prefix)]
    rules = [GREEDY, Sampling(seed=1), Sampling(seed=2, top_p=0.9)]
    forks = engine.generate([Request(text[30:], prefix, 12, rule) for rule in rules])
    fresh = engine.generate([Request(text, None, 12, rule) for rule in rules])
    again = engine.generate([Request((), prefix, 12, rule) for rule in rules])
    assert [c.tokens for c in forks] == [c.tokens for c in fresh]
    assert [c.tokens for c in again] == [c.tokens for c in engine.generate([Request(text[:30], None, 12, rule) for rule in rules])]
    assert all(torch.equal(x, y) for x, y in zip(leaves(prefix), before, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_back_every_bit(name: str, tmp_path: Path) -> None:
    engine = Engine(make_model(name).bfloat16(), max_length=100)
    prefix = engine.prefill(tokens(20))
    prefix.save(tmp_path / "p.safetensors")
    loaded = engine.load_prefix(tmp_path / "p.safetensors")
    for x, y in zip([loaded.tokens, loaded.logits, *leaves(loaded)], [prefix.tokens, prefix.logits, *leaves(prefix)], strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    assert type(loaded.states[0]) is type(prefix.states[0])
    request = Request(tokens(3), loaded, 8)
    assert engine.generate(request)[0].tokens == engine.generate(replace(request, prefix=prefix))[0].tokens


def test_a_prefix_of_another_model_or_dtype_is_refused(tmp_path: Path) -> None:
    model = make_model("gla")
    prefix = Engine(model).prefill(tokens(9))
    prefix.save(tmp_path / "p.safetensors")
    changed = make_model("gla")
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    others = [make_model("retnet"), make_model("gla", norm_eps=1e-5), make_model("gla").bfloat16(), changed]
    for other in others:
        with pytest.raises(ValueError, match=r"p\.safetensors: prefix is of another model .*, or of the same in another dtype"):
            Engine(other).load_prefix(tmp_path / "p.safetensors")
        with pytest.raises(ValueError, match="prefix is of another model"):
            Engine(other).generate(Request(tokens(2), prefix, 1))
    assert fingerprint(make_model("gla")) == fingerprint(model)
    assert len({fingerprint(other) for other in (model, *others)}) == 5


def test_weights_are_read_for_a_fingerprint_only_where_it_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr("headmax.generate.prefix.fingerprint", lambda model: taken.append(model) or fingerprint(model))
    engine, other = Engine(make_model("gla")), Engine(make_model("gla"))
    prefix = engine.prefill(tokens(9))
    engine.generate(Request(tokens(3), engine.prefill(tokens(2), prefix), 2))
    assert taken == []
    prefix.save(tmp_path / "p.safetensors")
    assert taken == [engine.model]
    loaded = other.load_prefix(tmp_path / "p.safetensors")
    assert taken == [engine.model, other.model]
    for given in (loaded, prefix):  # handed from one engine to another
        other.generate(Request(tokens(3), given, 2))
    assert taken == [engine.model, other.model]


def test_a_fingerprint_does_not_depend_on_how_it_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that 0.1 saved is known again."""
    model = make_model("gla")
    whole = fingerprint(model)
    monkeypatch.setattr("headmax.generate.prefix.PIECE", 1000)
    assert fingerprint(model) == whole


def test_a_file_that_is_cut_short_or_something_else_is_refused(tmp_path: Path) -> None:
    engine, path = Engine(make_model("gla")), tmp_path / "p.safetensors"
    engine.prefill(tokens(9)).save(path)
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 20, 3, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"p\.safetensors: not a whole safetensors file"):
            engine.load_prefix(path)
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"not a prefix saved by headmax \(format None\)"):
        engine.load_prefix(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        engine.load_prefix(tmp_path / "other")


@pytest.mark.parametrize("name", MODELS)
def test_to_the_models_own_cache_and_back(name: str) -> None:
    model, text = make_model(name), tokens(20)
    engine = Engine(model, max_length=100)
    prefix = engine.prefill(text[:15])
    with torch.no_grad():
        output = model(torch.tensor([text[15:]]), past_key_values=prefix.to_cache(), use_cache=True)
        whole = model(torch.tensor([text])).logits
    assert close(output.logits, whole[:, 15:])
    back = PrefixState.from_cache(output.past_key_values, torch.tensor(text), output.logits[0, -1], engine.fingerprint)
    assert close(back.logits, engine.prefill(text).logits)
    assert engine.generate(Request((), back, 6, GREEDY))[0].tokens == engine.generate(Request(text, None, 6, GREEDY))[0].tokens
    with pytest.raises(ValueError, match="cache has seen 20 tokens, tokens are 3"):
        PrefixState.from_cache(output.past_key_values, torch.tensor(text[:3]), output.logits[0, -1], engine.fingerprint)
