"""A trained model gets gates: first it computes what it did, then they learn."""

import copy
import dataclasses
import inspect
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM, Packing, softmaxify
from headmax.models.softmaxify import START
from headmax.ops.spec import distance

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 64}
FLOOR = 1e-4
"""What the norm of the gates' gradient must exceed on a real batch, so that there is something to learn from."""


@pytest.mark.parametrize("mixer", ["linear", "retnet", "gla", "gated_deltanet", ["gla", "attention"]])
@pytest.mark.parametrize("heads", [3, 4])
def test_the_model_computes_what_it_did_before(mixer: str | list[str], heads: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = SMALL | {"num_heads": heads, "hidden_size": 16 * heads}
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer=mixer, **sizes)).eval()
    ids = torch.randint(0, 64, (2, 70))
    before = model(ids).logits
    assert softmaxify(model) is model
    after = model(ids, return_gates=True)
    assert (after.logits - before).abs().max() <= 1e-6 * before.abs().max()
    assert torch.allclose(after.gates[0][0], torch.ones(2, 70, heads))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.head_gate == HeadGateConfig(scale="heads", init_std=0.0, read_position="after_norm")
    assert torch.equal(again(ids).logits, after.logits)


def text(generator: torch.Generator, count: int) -> torch.Tensor:
    """Rows that repeat themselves every six tokens: something for a model to learn and for heads to share out."""
    return torch.randint(64, (count, 6), generator=generator).repeat(1, 8)


def test_gates_trained_alone_lower_the_held_out_loss_of_a_trained_model() -> None:
    torch.manual_seed(0)
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **SMALL, conv_size=4)).train()
    generator, held_out = torch.Generator().manual_seed(0), text(torch.Generator().manual_seed(1), 128)

    def fit(steps: int, rate: float) -> None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
        for _ in range(steps):
            batch = text(generator, 32)
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def measure() -> float:
        with torch.no_grad():
            return model(held_out, labels=held_out).loss.item()

    fit(100, 3e-3)
    trained = measure()
    softmaxify(model, train="gates")
    assert measure() == pytest.approx(trained, rel=1e-5)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(learning) == 4
    assert all(".head_gate." in name for name in learning)
    model(held_out, labels=held_out).loss.backward()
    assert sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5 > FLOOR
    model.zero_grad()
    fit(60, 3e-2)
    assert measure() < trained - 1e-3


def test_what_cannot_be_softmaxified_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Linear has no layer to put gates on"):
        softmaxify(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="HeadmaxForCausalLM has no layer to put gates on"):
        softmaxify(HeadmaxForCausalLM(HeadmaxConfig(mixer="attention", **SMALL)))
    model = softmaxify(HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **SMALL)))
    with pytest.raises(ValueError, match="has gates already"):
        softmaxify(model)
    with pytest.raises(ValueError, match="train must be 'all' or 'gates'"):
        softmaxify(model, train="heads")  # type: ignore[arg-type]


def test_gates_alone_train_by_what_they_are_and_not_by_their_name() -> None:
    model = torch.nn.ModuleDict({"head_gate": HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **SMALL))})
    softmaxify(model, train="gates")
    assert sum(p.requires_grad for p in model.parameters()) == 4
    mixer = softmaxify(HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **SMALL)).model.layers[0].mixer, train="gates")
    assert [name for name, p in mixer.named_parameters() if p.requires_grad] == ["head_gate.read_weight", "head_gate.write_weight"]


def test_every_model_inside_knows_of_its_gates(tmp_path: Path) -> None:
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **SMALL)).eval()
    model.model.config = copy.deepcopy(model.config)
    plain = HeadmaxForCausalLM(HeadmaxConfig(mixer="attention", **SMALL))
    softmaxify(torch.nn.ModuleList([model, plain]))
    assert plain.config.head_gate is None
    ids = torch.randint(0, 64, (1, 9))
    for inner, auto in ((model, AutoModelForCausalLM), (model.model, AutoModel)):
        inner.save_pretrained(tmp_path / auto.__name__)
        again = auto.from_pretrained(tmp_path / auto.__name__)
        assert again.config.head_gate == model.config.head_gate == START
        assert torch.equal(again(ids)[0], inner(ids)[0])


def test_new_gates_are_of_the_dtype_they_join(qwen: Any) -> None:
    for model in (HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **SMALL)), qwen):
        softmaxify(model.to(torch.bfloat16))
        assert {p.dtype for name, p in model.named_parameters() if ".head_gate." in name} == {torch.bfloat16}


@pytest.mark.parametrize("heads", [1, 4, 41, 47, 55, 61, 82, 141])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gates_start_as_exactly_1(heads: int, device: str) -> None:
    """Also where H times 1/H is not 1 in float32."""
    gate = START.build(hidden_size=8 * heads, num_heads=heads, head_dim=8, like=torch.empty(0, device=device))
    q, k, x = (torch.randn(2, 5, *shape, device=device) for shape in ((heads, 8), (heads, 8), (8 * heads,)))
    for values in gate(q, k, x):
        assert values is not None
        assert torch.equal(values, torch.ones_like(values))


def test_gates_must_be_a_configuration() -> None:
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **SMALL))
    with pytest.raises(ValueError, match=r"softmaxify: gate must be a HeadGateConfig, got \{'scale': 'heads'\}"):
        softmaxify(model, {"scale": "heads"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_gate must be a HeadGateConfig or None, got 4"):
        model.model.layers[0].mixer.add_head_gate(4)
    softmaxify(model)


@pytest.fixture
def qwen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small Qwen3-Next, more value heads than key heads, on transformers' plain PyTorch: its dispatch to FLA crashes without a GPU."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        monkeypatch.setattr(theirs, name, inspect.unwrap(getattr(theirs, name)))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    linear = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    torch.manual_seed(0)
    return Qwen3NextForCausalLM(Qwen3NextConfig(vocab_size=100, head_dim=16, **sizes, **linear, **experts)).eval()


@torch.no_grad()
def test_a_softmaxified_qwen_computes_and_generates_what_it_did(qwen: Any) -> None:
    ids = torch.randint(1, 100, (2, 20))
    before, said = qwen(ids).logits, qwen.generate(ids, max_new_tokens=12, do_sample=False)
    keys = set(qwen.state_dict())
    softmaxify(qwen)
    assert (qwen(ids).logits - before).abs().max() <= 1e-6 * before.abs().max() + 1e-6
    assert torch.equal(qwen.generate(ids, max_new_tokens=12, do_sample=False), said)
    added = set(qwen.state_dict()) - keys
    assert len(added) == 6
    assert all(".linear_attn.head_gate." in name for name in added)
    for name, parameter in qwen.named_parameters():
        if name in added:
            parameter.normal_()
    assert (qwen(ids).logits - before).abs().max() > 1e-3


@torch.no_grad()
def test_packed_sequences_of_a_qwen(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer keeps them apart, and one Packing serves all; a row shorter than the convolution is one too."""
    softmaxify(qwen)
    layer = qwen.model.layers[0].linear_attn
    for lengths in ([1, 2], [5, 1, 30]):
        pieces = [torch.randn(1, length, 64) for length in lengths]
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        expected = torch.cat([layer(piece) for piece in pieces], dim=1)
        for cache in (None, DynamicCache(config=qwen.config)):
            assert distance(layer(torch.cat(pieces, dim=1), cache, cu_seq_lens_q=bounds), expected) <= 1e-5
    with pytest.raises(ValueError, match="cu_seq_lens_q packs whole sequences, but past_key_values holds the start of one"):
        layer(torch.cat(pieces, dim=1), cache, cu_seq_lens_q=bounds)
    built = count_packings(monkeypatch)
    for n in (1, 2):
        qwen(torch.randint(1, 100, (1, 36)), cu_seq_lens_q=bounds.clone(), use_cache=False)
        assert len(built) == n


def count_packings(monkeypatch: pytest.MonkeyPatch) -> list[Packing]:
    built: list[Packing] = []
    make = Packing.__init__
    monkeypatch.setattr(Packing, "__init__", lambda self, *arguments: built.append(self) or make(self, *arguments))
    return built


def test_the_gates_of_a_qwen_learn(qwen: Any) -> None:
    softmaxify(qwen, train="gates")
    ids = torch.randint(1, 100, (2, 20))
    qwen(ids, labels=ids).loss.backward()
    gradients = [p.grad for p in qwen.parameters() if p.grad is not None]
    assert len(gradients) == 6
    assert all(g.norm() > 0 for g in gradients)


@pytest.mark.parametrize(("kind", "settings"), [("GLA", {"use_short_conv": True}), ("RetNet", {}), ("GatedDeltaNet", {"head_dim": 16})])
@torch.no_grad()
def test_the_layers_of_a_model_of_flash_linear_attention(kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norms run on a GPU alone, so its layers are called one by one, with its own cache, beside those of the converted model."""
    pytest.importorskip("fla")
    import fla.models
    from fla.models.utils import Cache

    from headmax.models.convert import config_from_fla, weights_from_fla

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 100}
    theirs = getattr(fla.models, f"{kind}ForCausalLM")(getattr(fla.models, f"{kind}Config")(**sizes, **settings)).eval()
    config = config_from_fla(theirs.config.to_dict())
    ours = HeadmaxForCausalLM(config).eval()
    ours.load_state_dict(weights_from_fla(theirs.state_dict(), config))
    count = sum(p.numel() for p in theirs.parameters())
    with pytest.raises(ValueError, match="softmaxify: ModuleList has no config, where the settings of flash-linear-attention's layers are"):
        softmaxify(theirs.model.layers)
    softmaxify(torch.nn.Sequential(theirs))
    assert theirs.config.head_gate == dataclasses.asdict(START)
    gates = 2 * 2 * 4 * ours.model.layers[0].mixer.head_k_dim
    assert sum(p.numel() for p in theirs.parameters()) == count + gates
    x, cache = torch.randn(2, 21, 64), Cache()
    for n in range(2):
        layer, mixer = theirs.model.layers[n].attn, ours.model.layers[n].mixer
        expected = mixer(x).hidden
        assert (layer(x)[0] - expected).abs().max() <= 1e-6 * expected.abs().max()
        first, _, _ = layer(x[:, :20], past_key_values=cache, use_cache=True)
        second, _, _ = layer(x[:, 20:], past_key_values=cache, use_cache=True)
        assert distance(torch.cat([first, second], dim=1), expected) <= 1e-5
    row, bounds, built = torch.randn(1, 12, 64), torch.tensor([0, 2, 5, 12]), count_packings(monkeypatch)
    expected = torch.cat([ours.model.layers[0].mixer(row[:, a:b]).hidden for a, b in pairwise(bounds.tolist())], dim=1)
    assert distance(theirs.model.layers[0].attn(row, cu_seqlens=bounds)[0], expected) <= 1e-5
    theirs.model.layers[1].attn(row, cu_seqlens=bounds)
    assert len(built) == 1
    for parameter in theirs.model.layers[0].attn.mixer.head_gate.parameters():
        parameter.normal_()
    assert distance(theirs.model.layers[0].attn(x)[0], ours.model.layers[0].mixer(x).hidden) > 1e-2
