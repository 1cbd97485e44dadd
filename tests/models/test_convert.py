"""Checkpoints to and from flash-linear-attention, whose own classes and functions are the judge."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM
from headmax.layers import AttentionConfig
from headmax.models.convert import config_from_fla, config_to_fla, expansion, from_fla, to_fla, weights_from_fla
from headmax.ops import gated_delta_rule, gla, linear_attention
from headmax.ops.spec import distance

fla = pytest.importorskip("fla")
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 100}
KINDS: dict[str, dict[str, Any]] = {
    "GLA": {},
    "RetNet": {"tie_word_embeddings": True, "feature_map": "relu"},
    "GatedDeltaNet": {"head_dim": 16, "num_v_heads": 8},
}
VARIANTS = [*KINDS.items(), ("GLA", {"use_short_conv": True, "expand_k": 1.0, "fuse_norm": False, "norm_eps": 1e-5})]


def their_model(kind: str, **settings: Any) -> Any:
    import fla.models

    torch.manual_seed(0)
    return getattr(fla.models, f"{kind}ForCausalLM")(getattr(fla.models, f"{kind}Config")(**SMALL | settings))


@pytest.mark.parametrize(("kind", "settings"), VARIANTS)
def test_their_checkpoint_becomes_ours_and_theirs_again_bit_for_bit(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = their_model(kind, **settings)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    from_fla(tmp_path / "theirs", tmp_path / "ours")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(ours, HeadmaxForCausalLM)
    assert (tmp_path / "ours" / "tokenizer.json").exists()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert torch.equal(ours.model.layers[1].mixer.q_proj.weight, theirs.model.layers[1].attn.q_proj.weight)
    assert ours(torch.randint(0, 100, (1, 9))).logits.isfinite().all()

    to_fla(tmp_path / "ours", tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again")
    if not settings.get("fuse_norm", True):
        return  # FLA's unfused norm goes by another name; ours is written back under the fused one
    assert again.state_dict().keys() == theirs.state_dict().keys()
    for name, x in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], x), name
    for name in ("hidden_size", "num_heads", "norm_eps", "tie_word_embeddings", "use_short_conv", "conv_size", "expand_v"):
        assert getattr(again.config, name) == getattr(theirs.config, name), name


def test_their_transformer(tmp_path: Path) -> None:
    """Made by hand: theirs refuses to be built without flash-attn."""
    config = {"model_type": "transformer", **SMALL, "rope_theta": 500.0, "hidden_ratio": 4, "tie_word_embeddings": False}
    config |= {"num_kv_heads": 2, "window_size": 30}
    ours = config_from_fla(config)
    assert (ours.mixer, ours.intermediate_size) == (AttentionConfig(num_kv_heads=2, window=30, rotary_base=500.0), 256)
    weights = HeadmaxForCausalLM(ours).state_dict()
    theirs = {name.replace("embed_tokens", "embeddings").replace(".mixer", ".attn"): x.clone() for name, x in weights.items()}
    (tmp_path / "theirs").mkdir()
    save_file(theirs, tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    from_fla(tmp_path / "theirs", tmp_path / "ours")
    to_fla(tmp_path / "ours", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], x) for name, x in theirs.items())
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (written["rope_theta"], written["num_kv_heads"], written["window_size"]) == (500.0, 2, 30)


def test_what_has_no_counterpart_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"cannot map magic \(unknown\); clamp_min=-1\.0 \(only None\); num_kv_heads=2 \(only num_heads 4\)"
    ):
        config_from_fla({"model_type": "gla", **SMALL, "clamp_min": -1.0, "num_kv_heads": 2, "magic": 1})
    with pytest.raises(ValueError, match="model_type 'rwkv7' is not a model of flash-linear-attention that headmax has"):
        config_from_fla({"model_type": "rwkv7", **SMALL})
    gated = HeadmaxConfig(mixer="gla", **SMALL, head_gate=HeadGateConfig(), output_norm="joint")
    with pytest.raises(ValueError, match=r"head_gate \(flash-linear-attention has no head gates\); output_norm='joint' \(only 'head'\)"):
        config_to_fla(gated)
    with pytest.raises(ValueError, match=r"mixer=.*linear"):
        config_to_fla(HeadmaxConfig(mixer="linear", **SMALL))


def test_what_older_checkpoints_say() -> None:
    """`torch_dtype` for `dtype`, a shared kernel where nothing is convolved, and untied embeddings where nothing is said."""
    ours = config_from_fla({"model_type": "gla", **SMALL, "torch_dtype": "bfloat16", "share_conv_kernel": True, "use_short_conv": False})
    assert (ours.conv_size, ours.tie_word_embeddings) == (0, False)
    assert config_from_fla({"model_type": "gla", **SMALL, "use_short_conv": True, "share_conv_kernel": False}).conv_size == 4
    for kind in ("gla", "gated_deltanet"):
        with pytest.raises(ValueError, match=r"cannot map share_conv_kernel=True \(only False\)"):
            config_from_fla({"model_type": kind, **SMALL, "use_short_conv": True, "share_conv_kernel": True})


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_goes_with_the_weights(key: str, tmp_path: Path) -> None:
    their_model("GLA").to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({name: x for name, x in config.items() if name != "dtype"} | {key: "bfloat16"}))
    from_fla(tmp_path / "theirs", tmp_path / "ours")
    to_fla(tmp_path / "ours", tmp_path / "again")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").dtype == torch.bfloat16
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["hidden_size", "num_heads"])
def test_a_size_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot map {name} \(missing\)"):
        config_from_fla({"model_type": "retnet"} | {key: value for key, value in SMALL.items() if key != name})


def test_every_width_survives_their_rounding() -> None:
    """They take int(width * expand): 49 * (1 / 49) is less than 1."""
    assert int(49 * (1 / 49)) == 0
    for of in range(1, 200):
        for width in range(1, 2 * of + 1):
            assert int(of * expansion(width, of)) == width
    for mixer, widths in (("gla", {"head_k_dim": 1, "head_v_dim": 3}), ("gated_deltanet", {"head_k_dim": 49, "head_v_dim": 29})):
        ours = HeadmaxConfig(mixer=mixer, hidden_size=49, num_hidden_layers=1, num_heads=1, vocab_size=10, **widths)
        again = config_from_fla(config_to_fla(ours))
        assert (again.head_k_dim, again.head_v_dim) == tuple(widths.values())
    assert config_from_fla({"model_type": "gated_deltanet", **SMALL, "head_dim": 10, "expand_v": 0.19999}).head_v_dim == 1


def test_weights_that_do_not_map_are_listed() -> None:
    theirs = their_model("GLA")
    weights = dict(theirs.state_dict())
    weights["model.layers.0.attn.magic"] = torch.zeros(1)
    weights["model.norm.weight"] = torch.zeros(3)
    del weights["model.layers.1.attn.gk_proj.1.bias"]
    with pytest.raises(ValueError, match="weights do not map") as caught:
        weights_from_fla(weights, config_from_fla(theirs.config.to_dict()))
    for line in (
        "model.layers.0.attn.magic: nothing in headmax takes it",
        "model.norm.weight: is [3], must be [64]",
        "model.layers.1.mixer.decay_up_proj.bias: not in the checkpoint",
    ):
        assert line in str(caught.value)


def test_a_folder_that_is_none_and_one_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json there"):
        from_fla(tmp_path, tmp_path / "out")
    their_model("GLA").save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="is not empty: give a new folder"):
        from_fla(tmp_path / "theirs", tmp_path / "theirs")
    with pytest.raises(ValueError, match="model_type is 'gla', not a headmax model"):
        to_fla(tmp_path / "theirs", tmp_path / "out")


def test_our_ops_against_their_naive_functions() -> None:
    """A third party's code on the CPU, to 1e-5."""
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.retention.naive import naive_retention

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 70, 3, 16), torch.randn(2, 70, 3, 16), torch.randn(2, 70, 3, 24)
    head = torch.log1p(-torch.exp2(-5 - torch.arange(3.0)))
    channel = torch.nn.functional.logsigmoid(torch.randn(2, 70, 3, 16)) / 16
    token, beta = -torch.rand(2, 70, 3), torch.rand(2, 70, 3)
    unit = torch.nn.functional.normalize(k, dim=-1)
    for backend in ("reference", "chunkwise"):
        theirs = naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        assert distance(linear_attention(q, k, v, head, backend=backend)[0], theirs) <= 1e-5
        assert distance(gla(q, k, v, channel, backend=backend)[0], naive_recurrent_gla(q, k, v, channel)[0]) <= 1e-5
        theirs = naive_recurrent_gated_delta_rule(q, unit, v, beta, token)[0]
        assert distance(gated_delta_rule(q, unit, v, token, beta, backend=backend)[0], theirs) <= 1e-5


@pytest.mark.gpu
@pytest.mark.usefixtures("plain_fla")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "settings"), [*KINDS.items()])
@torch.no_grad()
def test_their_model_and_ours_have_the_same_logits_on_a_gpu(kind: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Prefill of 150 tokens and eight steps from the cache, theirs on their kernels, ours on ours."""
    settings = settings | {"hidden_size": 256, "feature_map": None} if kind == "RetNet" else settings | {"hidden_size": 256}
    theirs = their_model(kind, **settings).cuda().to(dtype).eval()
    config = config_from_fla(theirs.config.to_dict())
    ours = HeadmaxForCausalLM(config).cuda().to(dtype).eval()
    ours.load_state_dict(weights_from_fla(theirs.state_dict(), config))
    ids = torch.randint(0, 100, (2, 158), device="cuda")
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    assert distance(ours(ids).logits, theirs(ids).logits) <= bound
    ours_out, theirs_out = ours(ids[:, :150], use_cache=True), theirs(ids[:, :150], use_cache=True)
    for n in range(150, 158):
        ours_out = ours(ids[:, n : n + 1], past_key_values=ours_out.past_key_values, use_cache=True)
        theirs_out = theirs(ids[:, n : n + 1], past_key_values=theirs_out.past_key_values, use_cache=True)
        assert distance(ours_out.logits, theirs_out.logits) <= bound, n
