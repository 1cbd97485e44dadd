"""Configurations: a mixer's own settings, the shorthand for them, and models and runs that version 0.1 wrote."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM
from headmax.layers import MIXERS, AttentionConfig, GatedDeltaNetConfig, GLAConfig, LinearAttentionConfig, RetNetConfig
from headmax.layers.block import LORA_TARGETS
from headmax.recipes import book
from headmax.train.metrics import read_lines
from tests.command_line import run

OLD = Path(__file__).parents[1] / "fixtures" / "v0.1"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 64, "intermediate_size": 32}
NESTED = [
    LinearAttentionConfig(feature_map="elu"),
    RetNetConfig(rotary_base=500.0, output_norm="joint"),
    GLAConfig(decay_rank=3, decay_normalizer=4.0, conv_size=3),
    GatedDeltaNetConfig(num_v_heads=8, head_k_dim=6),
    AttentionConfig(head_k_dim=12),
]


def round_trip(config: HeadmaxConfig, folder: Path) -> HeadmaxConfig:
    config.save_pretrained(folder)
    return HeadmaxConfig.from_pretrained(folder)


@pytest.mark.parametrize("mixer", NESTED, ids=lambda mixer: mixer.name)
def test_settings_of_a_mixer_reach_it_and_come_back(mixer: object, tmp_path: Path) -> None:
    config = HeadmaxConfig(mixer=mixer, **SMALL)
    model = HeadmaxForCausalLM(config)
    assert [block.mixer.config for block in model.model.layers] == [mixer] * 2
    again = round_trip(config, tmp_path)
    assert again.mixer == mixer
    assert again.mixers == config.mixers
    assert HeadmaxConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_every_layer_may_have_settings_of_its_own(tmp_path: Path) -> None:
    config = HeadmaxConfig(**SMALL | {"mixer": NESTED, "num_hidden_layers": 5, "head_gate": HeadGateConfig()})
    model = HeadmaxForCausalLM(config)
    assert model.model.layers[2].mixer.decay_down_proj.out_features == 3
    assert model.model.layers[4].mixer.head_dim == 12
    ids = torch.arange(40)[None] % 64
    model.save_pretrained(tmp_path)
    assert torch.equal(HeadmaxForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_names_take_the_settings_of_the_model_that_they_have() -> None:
    config = HeadmaxConfig(**SMALL | {"mixer": ["gla", "attention"], "head_k_dim": 6, "feature_map": "silu", "conv_size": 0})
    assert config.mixers == [GLAConfig(head_k_dim=6, feature_map="silu"), AttentionConfig()]  # attention keeps its own width in a hybrid
    assert HeadmaxConfig(**SMALL | {"mixer": "attention", "head_k_dim": 6}).mixers == [AttentionConfig(head_k_dim=6)] * 2
    assert HeadmaxConfig(**SMALL | {"mixer": ["gla", GLAConfig(decay_rank=5)], "head_v_dim": 3}).mixers == [
        GLAConfig(head_v_dim=3),
        GLAConfig(decay_rank=5),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixer": {"name": "gla", "decay_rang": 3}}, "GLAConfig: unknown field 'decay_rang'; did you mean 'decay_rank'"),
        ({"mixer": {"name": "gla", "decay_rank": 0}}, "GLAConfig: decay_rank must be a positive integer, got 0"),
        ({"mixer": {"name": "gla", "decay_rank": 10**6}}, "GLAConfig: decay_rank must be at most 65,536, got 1,000,000"),
        ({"mixer": {"name": "gla", "decay_normalizer": float("nan")}}, "decay_normalizer must be a positive, finite number, got nan"),
        ({"mixer": {"name": "glas"}}, "HeadmaxConfig: unknown mixer 'glas'; did you mean 'gla'"),
        ({"mixer": {"decay_rank": 3}}, "HeadmaxConfig: mixer must be a name, settings such as GLAConfig"),
        ({"mixer": [["gla"], "gla"]}, "HeadmaxConfig: mixer must be a name, settings such as GLAConfig"),
        ({"mixer": GLAConfig(), "head_k_dim": 8}, "HeadmaxConfig: head_k_dim has no use in a model of configured layers"),
        ({"mixer": GatedDeltaNetConfig(num_v_heads=3)}, "num_v_heads must be a multiple of num_heads 4, got 3"),
    ],
)
def test_errors_name_the_setting(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadmaxForCausalLM(HeadmaxConfig(**SMALL | settings))


def test_adapters_know_all_matrices_of_every_mixer() -> None:
    for name, kind in MIXERS.items():
        block = HeadmaxForCausalLM(HeadmaxConfig(**SMALL | {"mixer": name})).model.layers[0]
        matrices = {path.rpartition(".")[2] for path, module in block.named_modules() if isinstance(module, torch.nn.Linear)}
        assert matrices <= set(LORA_TARGETS), name
        assert set(kind.lora_targets) - {"g_proj"} <= matrices, name


@pytest.mark.parametrize("name", ["linear", "retnet", "gla", "gated_deltanet", "attention", "hybrid"])
def test_models_of_version_0_1_compute_what_they_did(name: str) -> None:
    model = HeadmaxForCausalLM.from_pretrained(OLD / "models" / name)
    with torch.no_grad():
        logits = model(torch.arange(9)[None] * 5 % 32).logits[0, -1]
    expected = load_file(OLD / "models" / "logits.safetensors")[name]
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_run_of_version_0_1_goes_on(tmp_path: Path) -> None:
    shutil.copytree(OLD / "run", tmp_path / "run")
    options = {"hidden-size": 16, "num-hidden-layers": 1, "intermediate-size": 16, "head-k-dim": 4, "head-v-dim": 4}
    sizes = [word for name, size in options.items() for word in (f"--model.{name}", str(size))]
    words = "--batch-tokens 196 --token-budget 1176 --compute.micro-batch 4 --schedule.warmup-tokens 0 --eval.every 100 --device cpu"
    done = run("train", "mqar-softmax-gla", *sizes, *words.split(), "--checkpoint-every", "2", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    losses = [line["loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert losses == pytest.approx(json.loads((OLD / "whole.json").read_text())["loss"], abs=1e-5)


def test_projections_onto_the_residual_stream_may_start_smaller(tmp_path: Path) -> None:
    models = {}
    for factor in (1.0, 0.25, "depth"):
        torch.manual_seed(0)
        models[factor] = HeadmaxForCausalLM(
            HeadmaxConfig(**SMALL | {"mixer": ["gla", "attention"], "output_init": factor, "down_init": 0.5})
        )
    for name, weight in models[1.0].named_parameters():
        scale = (1.0, 0.25, 0.5) if name.endswith("o_proj.weight") else (1.0,) * 3  # two layers: 1 / sqrt(4)
        for factor, model in zip(scale, models.values(), strict=True):
            assert torch.equal(model.get_parameter(name), factor * weight), name
    whole, halved = HeadmaxForCausalLM(HeadmaxConfig(**SMALL, down_init=1.0)), models["depth"]
    ratio = halved.model.layers[0].mlp.down_proj.weight.std() / whole.model.layers[0].mlp.down_proj.weight.std()
    assert 0.4 < ratio < 0.6
    halved.save_pretrained(tmp_path)
    again = HeadmaxForCausalLM.from_pretrained(tmp_path)  # loaded weights are not scaled once more
    assert all(torch.equal(p, q) for p, q in zip(halved.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match="output_init must be a finite number of at least 0 or 'depth', got -1"):
        HeadmaxConfig(output_init=-1.0)
    with pytest.raises(ValueError, match="unknown output_init 'deep'; did you mean 'depth'"):
        HeadmaxConfig(output_init="deep")


def test_presets() -> None:
    gate = HeadGateConfig.paper()
    assert (gate.read, gate.write, gate.source, gate.read_position, gate.kind, gate.scale) == (True, True, "head", "query", "softmax", 1.0)
    assert HeadGateConfig.recommended() == gate, "until docs/findings.md says otherwise"
    assert book.get("softmax-gla-tiny").model.head_gate == gate
