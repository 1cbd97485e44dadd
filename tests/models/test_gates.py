"""Gates for models of other libraries: they start as 1, learn, travel as a small file and come back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM, accelerate, durable, load_gates, save_gates, softmaxify
from headmax.models.softmaxify import gates_of
from tests.models.released import COMMON, MODELS, VOCAB, build
from tests.models.test_released import logits, tokens

ROOT = Path(__file__).parents[2]


def loss(model: Any, ids: Tensor) -> Tensor:
    """Cross-entropy of the next token; a model without a head gets its embedding as one."""
    scores = logits(model, ids)
    scores = scores if scores.shape[-1] == VOCAB else F.linear(scores, model.get_input_embeddings().weight)
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model: Any, steps: int = 20) -> list[float]:
    ids, losses = tokens(4, 40), []
    learning = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.Adam(learning, lr=0.03)
    for _ in range(steps):
        value = loss(model, ids)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


OTHER_PROCESS = """
import sys, torch
from pathlib import Path
from headmax import load_gates
from tests.models.released import build
from tests.models.test_released import logits, tokens
for folder in sorted(Path(sys.argv[1]).iterdir()):
    model, expected = load_gates(build(folder.name), folder), torch.load(folder / "logits.pt")
    with torch.no_grad():
        assert torch.equal(logits(model, tokens()), expected), folder.name
    print(folder.name)
"""


@pytest.mark.timeout(300)
def test_gates_start_as_1_learn_and_travel_to_another_process(tmp_path: Path) -> None:
    for kind in MODELS:
        model = accelerate(build(kind))
        with torch.no_grad():
            before = logits(model, tokens())
            assert torch.equal(logits(softmaxify(model, train="gates"), tokens()), before), kind
        losses = train(model)
        assert losses[-1] < losses[0] - 5e-4, (kind, losses)
        save_gates(model, tmp_path / kind)
        with torch.no_grad():
            torch.save(logits(model, tokens()), tmp_path / kind / "logits.pt")
        assert not torch.equal(torch.load(tmp_path / kind / "logits.pt"), before)
    command = [sys.executable, "-W", "ignore", "-c", OTHER_PROCESS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == sorted(MODELS), done.stderr[-2000:]


def test_only_the_gates_train() -> None:
    model = build("qwen3_5_moe_text")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    train(softmaxify(model, train="gates"), steps=2)
    changed = {name for name, x in model.state_dict().items() if name not in before or not torch.equal(x, before[name])}
    assert changed == {f"{name}.{kind}_weight" for name in gates_of(model) for kind in ("read", "write")}
    assert len(changed) == 4


def test_what_is_written(tmp_path: Path) -> None:
    model = softmaxify(build("mamba2"))
    save_gates(model, tmp_path / "new" / "folder")
    known = json.loads((tmp_path / "new" / "folder" / "gates.json").read_text())
    assert known["model_type"] == "mamba2"
    assert known["head_gate"] == model.config.head_gate
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {"gates.json", "gates.safetensors"}


@torch.no_grad()
def test_gates_of_another_model_are_refused_and_it_stays_as_it_was(tmp_path: Path) -> None:
    save_gates(softmaxify(build("qwen3_5_text")), tmp_path)
    many = {"linear_num_value_heads": 8}
    more = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 4}
    ours = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", hidden_size=32, num_heads=4, vocab_size=VOCAB, num_hidden_layers=2))
    kind = "load_gates: .* has gates of a qwen3_5_text model, this is a "
    shape = (
        r"not of this model: model\.layers\.0\.linear_attn\.head_gate\.read_weight is \[4, 12\], this model's is \[8, 12\] \(and 3 more\)"
    )
    for model, message in (
        (build("qwen3_next"), kind + "qwen3_next"),
        (ours, kind + "headmax"),
        (torch.nn.Linear(2, 2), kind + "Linear"),
        (build("qwen3_5_text", **many), shape),
        (build("qwen3_5_text", **more), r"it has no model\.layers\.1\.linear_attn\.head_gate\.read_weight"),
        (softmaxify(build("qwen3_5_text"), HeadGateConfig()), "load_gates: the model has gates of other settings"),
    ):
        before = {name: x.clone() for name, x in model.state_dict().items()}
        with pytest.raises(ValueError, match=message) as caught:
            load_gates(model, tmp_path)
        assert "\n" not in str(caught.value)
        assert before.keys() == model.state_dict().keys()
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_folder_without_gates_is_refused(tmp_path: Path) -> None:
    model = build("bamba")
    with pytest.raises(ValueError, match="save_gates: this BambaForCausalLM has no gates; softmaxify gives it some"):
        save_gates(model, tmp_path)
    with pytest.raises(FileNotFoundError):
        load_gates(model, tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: no head_gate there"):
        load_gates(model, tmp_path)
    (tmp_path / "gates.json").write_text('{"model_type": "bamba", "head_gate": {"reed": true}}')
    with pytest.raises(ValueError, match=r"gates\.json: head_gate: unknown field 'reed'"):
        load_gates(model, tmp_path)


def rewritten(file: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(file)), file)


HEADS = {"read": True, "write": True}
BAD_SETTINGS: list[Any] = [b"", b"\xff", b"[]", b"3", b"[" * 99_999, b"{", b'{"model_type": "headmax"}', b'{"head_gate": null}']
BAD_SETTINGS += [{"model_type": x} for x in (None, 3, [], "gla", "../headmax")]
BAD_SETTINGS += [{"head_gate": x} for x in (3, "", [], {"reed": True}, {"read": 3}, {"kind": "tanh"}, {"kind": []}, {"scale": "x"})]
BAD_SETTINGS += [{"head_gate": HEADS | {"temperature": x}} for x in (0, -1, float("nan"), float("inf"), "1", None, 10**400)]
BAD_SETTINGS += [{"head_gate": HEADS | {"init_std": x}} for x in (-1.0, float("nan"), "x")]
BAD_WEIGHTS: list[Callable[[Path], object]] = [
    *(
        lambda file, share=share: file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
        for share in (0, 0.01, 0.3, 0.9, 0.99)
    ),
    *(
        lambda file, content=content: file.write_bytes(content)
        for content in (b"garbage", b"\xff" * 100, (2**60).to_bytes(8, "little") + b"{}")
    ),
    lambda file: file.unlink(),
    lambda file: (file.unlink(), file.mkdir()),
    lambda file: torch.save({"x": torch.ones(2)}, file),
    *(lambda file, x=x: rewritten(file, lambda held: held | {next(iter(held)): torch.full((2, 16), x)}) for x in (torch.nan, torch.inf)),
    *(
        lambda file, kind=kind: rewritten(file, lambda held: {name: x.to(kind) for name, x in held.items()})
        for kind in (torch.int64, torch.complex64)
    ),
    lambda file: rewritten(file, lambda held: dict(list(held.items())[1:])),
    lambda file: rewritten(file, lambda held: {f"../{name}": x for name, x in held.items()}),
    lambda file: rewritten(file, lambda held: held | {"lm_head.weight": torch.zeros(2, 2)}),
    lambda file: rewritten(file, lambda held: {name: x[:1] for name, x in held.items()}),
    lambda file: rewritten(file, lambda held: {}),
]


def test_damaged_gates_are_refused_in_one_line_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"mixer": "gla", "hidden_size": 32, "num_heads": 2, "vocab_size": VOCAB, "num_hidden_layers": 2}
    save_gates(softmaxify(HeadmaxForCausalLM(HeadmaxConfig(**sizes))), tmp_path / "whole")
    model = HeadmaxForCausalLM(HeadmaxConfig(**sizes))
    before = {name: x.clone() for name, x in model.state_dict().items()}

    def settings(bad: Any) -> Callable[[Path], object]:
        def damage(folder: Path) -> None:
            rewritten(folder / "gates.safetensors", lambda held: held)  # without what tells that settings were changed
            file = folder / "gates.json"
            file.write_bytes(bad if isinstance(bad, bytes) else json.dumps(json.loads(file.read_text()) | bad).encode())

        return damage

    damages = [settings(bad) for bad in BAD_SETTINGS]
    damages += [lambda folder, damage=damage: damage(folder / "gates.safetensors") for damage in BAD_WEIGHTS]
    for number, damage in enumerate(damages):
        folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / str(number)))
        damage(folder)
        with pytest.raises((ValueError, OSError)) as caught:
            load_gates(model, folder)
        assert str(folder) in str(caught.value), (number, caught.value)
        assert "\n" not in str(caught.value)
        assert before.keys() == model.state_dict().keys(), number
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_gates_whose_settings_are_those_of_earlier_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who dies between the two files leaves new weights beside old settings, with which they would say something else."""
    sizes: dict[str, Any] = {"mixer": "gla", "hidden_size": 32, "num_heads": 2, "vocab_size": VOCAB, "num_hidden_layers": 1}
    save_gates(softmaxify(HeadmaxForCausalLM(HeadmaxConfig(**sizes))), tmp_path)
    write = durable.write
    monkeypatch.setattr(durable, "write", lambda path, x: write(path, x) if path.suffix != ".json" else _die())
    with pytest.raises(KeyboardInterrupt):
        save_gates(softmaxify(HeadmaxForCausalLM(HeadmaxConfig(**sizes)), HeadGateConfig(temperature=2.0)), tmp_path)
    with pytest.raises(ValueError, match=r"gates\.safetensors and gates\.json are not of one save_gates"):
        load_gates(HeadmaxForCausalLM(HeadmaxConfig(**sizes)), tmp_path)


def _die() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", sorted({"qwen3_5_text", "nemotron_h", "bailing_hybrid", "falcon_h1", "minimax"} & MODELS.keys()))
@torch.no_grad()
def test_a_saved_model_comes_back_with_its_gates(kind: str, tmp_path: Path) -> None:
    """From save_pretrained alone, as a checkpoint of Trainer is: some models have other names of layers in files."""
    model = softmaxify(build(kind))
    for gate in gates_of(model).values():
        for weight in gate.parameters():
            weight.normal_()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert not gates_of(again)
    assert torch.equal(logits(load_gates(again, tmp_path), tokens()), logits(model, tokens()))
    assert again.config.head_gate == model.config.head_gate


@torch.no_grad()
def test_gates_of_a_model_with_eyes(tmp_path: Path) -> None:
    """As Qwen3.5 is released: the language model is a part of it, and so is its configuration."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    eyes = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32, "num_position_embeddings": 16}
    marks = {"image_token_id": 80, "video_token_id": 81, "vision_start_token_id": 82, "vision_end_token_id": 83}
    config = Qwen3_5Config(text_config=COMMON | MODELS["qwen3_5_text"] | {"rope_parameters": rope}, vision_config=eyes, **marks)
    model, ids = softmaxify(Qwen3_5ForConditionalGeneration(config).eval()), tokens() % 70 + 3
    for gate in gates_of(model).values():
        gate.read_weight.normal_()
    model.save_pretrained(tmp_path / "model")
    save_gates(model, tmp_path / "gates")
    for folder in ("model", "gates"):
        again = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "model").eval()
        assert torch.equal(load_gates(again, tmp_path / folder)(ids).logits, model(ids).logits)


@torch.no_grad()
def test_gates_of_a_headmax_model_travel_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB, "num_hidden_layers": 2}
    plain = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **sizes)).eval()
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **sizes, head_gate=HeadGateConfig())).eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    save_gates(model, tmp_path)
    assert torch.equal(logits(load_gates(plain, tmp_path), tokens()), logits(model, tokens()))


def test_lora_beside_gates(tmp_path: Path) -> None:
    """PEFT adapts a softmaxified model, trains the gates whole, merges, and the gates go on as a file."""
    peft = pytest.importorskip("peft")
    ids, model = tokens(), softmaxify(build("qwen3_5_text"))
    settings = peft.LoraConfig(r=4, target_modules=["in_proj_qkv", "out_proj", "q_proj"], modules_to_save=["head_gate"])
    adapted = peft.get_peft_model(model, settings)
    losses = train(adapted)
    assert losses[-1] < losses[0] - 1e-3
    with pytest.raises(ValueError, match="is PEFT's copy of a gate: call merge_and_unload"):
        save_gates(adapted, tmp_path)
    with torch.no_grad():
        expected = logits(adapted.eval(), ids)
        merged = adapted.merge_and_unload()
        assert (logits(merged, ids) - expected).abs().max() <= 1e-5
        save_gates(merged, tmp_path)
        assert sorted(gates_of(merged)) == [f"model.layers.{n}.linear_attn.head_gate" for n in (0, 2)]
    gates = load_gates(build("qwen3_5_text"), tmp_path)
    assert all(x.abs().max() > 0 for gate in gates_of(gates).values() for x in gate.parameters())
