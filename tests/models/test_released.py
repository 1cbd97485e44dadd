"""transformers' own models on our ops: nothing but the speed changes."""

from __future__ import annotations

import copy
import inspect
import io
import sys
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headmax import load_gates, softmaxify
from headmax.models.accelerate import LAYERS, accelerate, forward_of, forwards
from tests.generate.checkpoint import make_model
from tests.models.released import ALL, MODELS, VOCAB, build

LENGTH = 70
"""More than a chunk of 64 tokens."""
CLOSE = 1e-5
"""Largest difference of a logit; logits have a standard deviation of about a third."""

LINEAR = {"granitemoehybrid": {"layer_types": ["mamba"] * 3}, "glm5_next_text": {"layer_types": ["linear_attention"] * 3}}
"""Models whose own attention layers keep packed sequences apart in flash attention alone: without them."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = build(request.param)
    on_plain_pytorch(model, monkeypatch)
    return model


def on_plain_pytorch(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flash-linear-attention: transformers calls it wherever it is installed, and it crashes without a GPU."""
    for module in {type(layer).__module__ for layer in model.modules() if type(layer).__name__ in LAYERS}:
        for name, function in inspect.getmembers(sys.modules[module], inspect.isfunction):
            if "gated_delta" in name or "kimi_delta" in name:
                monkeypatch.setattr(sys.modules[module], name, inspect.unwrap(function))


def cache_of(output: Any) -> dict[str, Any]:
    """As the next call takes it."""
    return {name: output[name] for name in ("past_key_values", "cache_params") if output.get(name) is not None}


def logits(model: Any, ids: Tensor, cuts: tuple[int, ...] = (), cache: dict[str, Any] | None = None, **inputs: Any) -> Tensor:
    """Of every token: all at once, or piece after piece with a cache."""
    if not cuts and cache is None:
        return said(model(ids, use_cache=False, **inputs))
    pieces, mask = [], inputs.pop("attention_mask", None)
    for start, end in pairwise((0, *cuts, ids.shape[1])):
        masked = {} if mask is None else {"attention_mask": mask[:, :end]}
        output = model(ids[:, start:end], use_cache=True, **(cache or {}), **masked, **inputs)
        pieces.append(said(output))
        cache = cache_of(output)
    return torch.cat(pieces, dim=1)


def said(output: Any) -> Tensor:
    return output["logits"] if "logits" in output else output["last_hidden_state"]


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def packed(lengths: list[int]) -> dict[str, Tensor]:
    """What `DataCollatorWithFlattening` gives, for one row of sequences of these lengths."""
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    order = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]
    lengths_ = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": max(lengths), "max_length_k": max(lengths)}
    return {"position_ids": positions, "seq_idx": order, **lengths_}


@torch.no_grad()
def test_nothing_but_the_ops_changes(model: Any) -> None:
    """Logits at once, in steps of several sizes and of one, with padding on the left, and from a cache that transformers filled."""
    ids, mask, cuts, steps = tokens(), torch.ones(2, LENGTH, dtype=torch.long), (40, 41, 42, 52), tuple(range(66, LENGTH))
    mask[0, :11] = 0
    calls: list[dict[str, Any]] = [{}, {"attention_mask": mask}, {"cuts": cuts}, {"cuts": steps, "attention_mask": mask}]
    before, names = [logits(model, ids, **call) for call in calls], [name for name, _ in model.named_modules()]
    classes, weights = [type(x) for x in model.modules()], {name: x.data_ptr() for name, x in model.state_dict().items()}
    begun = cache_of(model(ids[:, :40], use_cache=True))
    assert accelerate(model) is model
    assert accelerate(model) is model
    assert [name for name, _ in model.named_modules()] == names
    assert [type(x) for x in model.modules()] == classes
    assert {name: x.data_ptr() for name, x in model.state_dict().items()} == weights
    for call, expected in zip(calls, before, strict=True):
        given = logits(model, ids, **call)
        apart = (given - expected)[call.get("attention_mask", torch.ones(2, LENGTH)).bool()].abs().max()
        assert 0 < apart <= CLOSE, (call.keys(), apart)
    ours = cache_of(model(ids[:, :40], use_cache=True))
    for cache in (ours, begun):
        assert (logits(model, ids[:, 40:], (1, 2, 12), cache) - before[2][:, 40:]).abs().max() <= CLOSE


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_packed_sequences_are_kept_apart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers refuses them, or mixes them up."""
    model = build(kind, **LINEAR.get(kind, {}))
    on_plain_pytorch(model, monkeypatch)
    model = model.backbone if kind == "mamba2" else model  # its model with a head does not hand the marks on
    lengths = [3, 1, 30, 6]
    row = tokens(1, sum(lengths))
    expected = torch.cat([logits(model, piece) for piece in row.split(lengths, dim=1)], dim=1)
    accelerate(model)
    marks = packed(lengths)
    for names in (marks, marks.keys() - {"cu_seq_lens_q", "cu_seq_lens_k"}, ["position_ids"]):  # as one collator or another marks them
        given = {name: marks[name] for name in names}
        assert (logits(model, row, **given) - expected).abs().max() <= CLOSE, given.keys()


def test_gradients_are_those_of_transformers(model: Any) -> None:
    ids = tokens(2, 20)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        logits(model, ids).square().mean().backward()
        return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

    before = gradients()
    after = gradients() if accelerate(model) else {}
    assert before.keys() == after.keys()
    largest = max(x.abs().max() for x in before.values())
    assert all((after[name] - x).abs().max() <= 1e-4 * largest for name, x in before.items())


def test_this_transformers_has_them_all() -> None:
    assert ALL.keys() - MODELS.keys() <= {"bailing_hybrid"}  # which 5.17 does not have


@pytest.mark.parametrize("kind", MODELS)
def test_the_attributes_that_are_read_are_there(kind: str) -> None:
    """Its failure says which one moved."""
    layers = [layer for layer in build(kind).modules() if type(layer).__name__ in LAYERS]
    assert layers, (
        f"{kind}: transformers' class has another name; the model has {sorted({type(x).__name__ for x in build(kind).modules()})}"
    )
    about = LAYERS[type(layers[0]).__name__]
    moved = {name for layer in layers for name in (*about.forward.reads, *about.reads) if not hasattr(layer, name)}
    assert not moved, f"{kind}: {type(layers[0]).__name__} has lost {moved}"


def test_a_layer_that_has_changed_is_refused_by_attribute() -> None:
    model = build("qwen3_next")
    layer = model.model.layers[0].linear_attn
    layer.in_projection_ba = layer.in_proj_ba
    del layer.in_proj_ba
    with pytest.raises(ValueError, match=r"Qwen3NextGatedDeltaNet of transformers 5\.\S+ has no in_proj_ba, which headmax reads"):
        accelerate(model)
    with pytest.raises(ValueError, match="accelerate: Linear has no layer that headmax knows: Qwen3NextGatedDeltaNet, "):
        accelerate(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="accelerate: a HeadmaxForCausalLM runs on headmax's ops as it is"):
        accelerate(make_model())
    for function in (accelerate, softmaxify, lambda name: load_gates(name, "gates")):
        with pytest.raises(ValueError, match=r"model must be a loaded model, got 'Qwen/Qwen3\.5-4B'; AutoModelForCausalLM"):
            function("Qwen/Qwen3.5-4B")


@torch.no_grad()
def test_copies_and_pickles_have_forwards_of_their_own() -> None:
    model, ids = accelerate(build("falcon_h1")), tokens()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(logits(other, ids), logits(model, ids))
        for (_, a), (_, b) in zip(forwards(model), forwards(other), strict=True):
            assert forward_of(b.layer) is b
            assert a.layer is not b.layer
        next(iter(forwards(other)))[1].layer.A_log.add_(1.0)
        assert not torch.equal(logits(other, ids), logits(model, ids))


@torch.no_grad()
def test_hooks_of_the_accelerate_package_stay_in_force() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Count(hooks.ModelHook):
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            self.calls += 1
            return args, kwargs

    model, ids = build("kimi_linear"), tokens()
    layer, on_layer, on_convolution = model.model.layers[0].self_attn, Count(), Count()
    hooks.add_hook_to_module(layer, on_layer)
    hooks.add_hook_to_module(layer.conv1d, on_convolution)
    accelerate(model)
    logits(model, ids)
    assert (on_layer.calls, on_convolution.calls) == (1, 1)
    hooks.remove_hook_from_module(layer)
    assert forward_of(layer) is not None
    assert torch.equal(logits(model, ids), logits(accelerate(copy.deepcopy(model)), ids))


@torch.no_grad()
def test_a_packed_row_does_not_go_on_from_a_cache() -> None:
    for kind in ("mamba2", "minimax"):
        model, ids = accelerate(build(kind)), tokens(1, 12)
        model = model.backbone if kind == "mamba2" else model
        cache = cache_of(model(ids, use_cache=True))
        with pytest.raises(ValueError, match="cu_seq_lens_q packs whole sequences, but past_key_values holds the start of one"):
            model(ids, use_cache=True, **cache, **packed([5, 7]))


@torch.no_grad()
def test_packed_rows_that_are_none_are_refused() -> None:
    model = accelerate(build("bamba"))
    with pytest.raises(ValueError, match="accelerate: cu_seqlens packs sequences into batch 1, got batch 2"):
        model(tokens(2, 12), **packed([5, 7]))
    with pytest.raises(ValueError, match="cu_seqlens must end at time = 13, got 12"):
        model(tokens(1, 13), seq_idx=None, cu_seq_lens_q=torch.tensor([0, 5, 12]))
    rows = packed([5, 7])["position_ids"]
    with pytest.raises(ValueError, match="position_ids restart inside a row: pack sequences into a batch of one"):
        model(tokens(2, 12), position_ids=rows)
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    assert logits(model, ids, attention_mask=mask, position_ids=rows).isfinite().all()  # beside a mask, positions are positions


def test_checkpointed_layers_have_the_same_gradients() -> None:
    for kind in ("qwen3_5_text", "minimax"):
        model, ids, found = accelerate(build(kind)).train(), tokens(2, 20), []
        for _ in range(2):
            logits(model, ids).square().mean().backward()
            found.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
            model.zero_grad()
            model.gradient_checkpointing_enable()
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_kernels_give_what_pytorch_gives(kind: str) -> None:
    """Logits, cached steps, packed sequences and gradients on a GPU beside those of a CPU."""
    found = []
    for device in ("cpu", "cuda"):
        model, ids = accelerate(build(kind, **LINEAR.get(kind, {}))).to(device), tokens(1).to(device)
        inner = model.backbone if kind == "mamba2" else model
        marks = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in packed([30, 1, LENGTH - 31]).items()}
        logits(model, ids).square().mean().backward()
        gradients = {name: x.grad.cpu() for name, x in model.named_parameters() if x.grad is not None}
        with torch.no_grad():
            found.append([x.cpu() for x in (logits(model, ids), logits(model, ids, (40, 41, 50)), logits(inner, ids, **marks))])
        found[-1].append(torch.cat([x.flatten() for _, x in sorted(gradients.items())]))
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).abs().max() <= 1e-4 * max(1.0, expected.abs().max().item())
