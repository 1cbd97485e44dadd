"""The one loader: folders, runs and hub names; what is damaged, hostile or something else is refused in one line."""

import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headmax import HeadmaxForCausalLM
from headmax.train import loading
from headmax.train.checkpoint import MANIFEST, fingerprints, state_keys
from headmax.train.trainer import fit
from tests.train.small import Walks, model_config, train, train_config

STEP = "step-00000003"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeadmaxForCausalLM]:
    """A run of three steps whose data had a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("loading")
    names = ["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(45))]
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "data").mkdir()
    tokenizer.save(str(folder / "data" / "tokenizer.json"))
    torch.set_num_threads(1)
    return folder / "run", fit(model_config(), train_config(max_steps=3), Walks(), folder / "run", tokenizer=folder / "data")


@pytest.fixture
def folder(run: tuple[Path, HeadmaxForCausalLM], tmp_path: Path) -> Path:
    """The run's model as save_pretrained writes it."""
    path, model = run
    model.save_pretrained(tmp_path / "model")
    loading.load_tokenizer(path).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_run_is_a_checkpoint(run: tuple[Path, HeadmaxForCausalLM], caplog: pytest.LogCaptureFixture) -> None:
    path, model = run
    with caplog.at_level(logging.INFO, "headmax"):
        loaded = loading.load_model(path, "cpu")
    assert f"{path}: loaded the model of step 3" in caplog.text
    assert same(loaded, model)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.generation_config.eos_token_id == [1, 2]
    assert loading.load_model(path, "cpu", torch.bfloat16).dtype == torch.bfloat16
    tokenizer = loading.load_tokenizer(path)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer("w3 w4").input_ids) == ("<s>", "</s>", [6, 7])


def test_every_command_takes_a_run(run: tuple[Path, HeadmaxForCausalLM], headmax: Any, tmp_path: Path) -> None:
    path, model = run
    code, _, said = headmax("generate", path, "--prompt", "w3 w4", "--greedy", "--max-new-tokens", 3, "--device", "cpu")
    assert (code, "read 2 tokens" in said) == (0, True), said
    code, out, said = headmax("inspect", path, "--text", "w3 w4 w5", "--out", tmp_path / "r.html")
    assert (code, "3 tokens" in out) == (0, True), said
    code, out, said = headmax("convert", path, tmp_path / "hf")
    assert code == 0, said
    assert same(loading.load_model(tmp_path / "hf"), model)


def test_eval_takes_a_run(run: tuple[Path, HeadmaxForCausalLM], headmax: Any, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    code, out, said = headmax("eval", run[0], "--tasks", "mqar_4", "--limit", 2, "--work", tmp_path, "--device", "cpu")
    assert code == 0, said
    assert "mqar_4" in out


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    train(tmp_path, max_steps=1, checkpoint_final=False)
    with pytest.raises(ValueError, match="no complete checkpoint yet; wait for the first one"):
        loading.load_model(tmp_path)


def test_a_hub_name_is_fetched_without_code_and_pickles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def snapshot_download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(folder.parent)
    assert loading.find_source("owner/name@v1.0") == folder
    assert loading.load_config("owner/name").vocab_size == 48
    assert [name[:2] for name in asked] == [("owner/name", "v1.0"), ("owner/name", None)]
    assert not [pattern for pattern in asked[0][2] if pattern in ("*", "*.py") or "bin" in pattern or "pt" in pattern.split(".")]
    assert loading.find_source("model") == Path("model")
    (folder.parent / "owner").mkdir()
    shutil.copytree(folder, folder.parent / "owner" / "name")
    assert loading.find_source("owner/name") == Path("owner/name"), "a folder of that name comes first"
    assert len(asked) == 2


def test_a_hub_out_of_reach_is_one_line(headmax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    code, _, said = headmax("generate", "owner/nothing", "--prompt", "x", "--device", "cpu")
    line = "headmax: owner/nothing: no such folder, and not found on the hub (ConnectionError: no route to the hub)\n"
    assert (code, said) == (2, line)


def weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Changes model.safetensors; None takes a tensor out."""
    held = load_file(folder / "model.safetensors") | changes
    save_file({name: x.contiguous() for name, x in held.items() if x is not None}, folder / "model.safetensors", metadata={"format": "pt"})


def config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))


def bytes_of(name: str, content: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content((folder / name).read_bytes()))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: weights(folder, **{"model.norm.weight": None}), "model.norm.weight: not in the checkpoint"),
    "unexpected": (lambda folder: weights(folder, extra=torch.zeros(2)), "extra: nothing in headmax takes it"),
    "misshapen": (lambda folder: weights(folder, **{"model.norm.weight": torch.zeros(3)}), "model.norm.weight: is [3], must be [32]"),
    "truncated": (bytes_of("model.safetensors", lambda x: x[:-100]), "not a whole safetensors file"),
    "empty": (bytes_of("model.safetensors", lambda _: b""), "not a whole safetensors file"),
    "garbage": (bytes_of("model.safetensors", lambda x: b"\xff" * len(x)), "not a whole safetensors file"),
    "none": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors there"),
    "pickled": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "no model.safetensors there"),
    "layers": (lambda folder: config(folder, num_hidden_layers=9000), "they are of 2 layers, num_hidden_layers is 9000"),
    "millions": (lambda folder: config(folder, num_hidden_layers=10**7), "num_hidden_layers must be at most 10,000"),
    "huge": (lambda folder: config(folder, vocab_size=2**24), "must be [16777216, 32]"),
    "types": (lambda folder: config(folder, hidden_size="32"), "hidden_size must be a positive integer, got '32'"),
    "feature map": (lambda folder: config(folder, feature_map={}), "config.json: "),
    "alias": (lambda folder: config(folder, num_attention_heads="x"), "num_heads must be a positive integer, got 'x'"),
    "dtype": (lambda folder: weights(folder, **{"model.norm.weight": torch.ones(32, dtype=torch.int32)}), "norm.weight is torch.int32"),
    "end": (
        bytes_of("generation_config.json", lambda _: b'{"eos_token_id": [1, "x"]}'),
        "eos_token_id must be one or more ids below",
    ),
    "longest": (bytes_of("tokenizer_config.json", lambda _: b'{"model_max_length": "x"}'), "no tokenizer there that transformers can load"),
    "no object": (bytes_of("config.json", lambda _: b"[1]"), "config.json: not a JSON object but a list"),
    "no JSON": (bytes_of("config.json", lambda x: x[:-9]), "config.json: not a JSON object"),
    "no text": (bytes_of("config.json", lambda _: b"\xff\xfe\x00"), "config.json: not UTF-8"),
    "generation": (bytes_of("generation_config.json", lambda _: b"7"), "generation_config.json: not a JSON object but a int"),
    "tokenizer": (bytes_of("tokenizer.json", lambda _: b"{}"), "no tokenizer there that transformers can load ("),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(damage: str, folder: Path, headmax: Any) -> None:
    change, said = DAMAGE[damage]
    change(folder)
    code, out, errors = headmax("generate", folder, "--prompt", "w1", "--device", "cpu", "--max-new-tokens", 1)
    assert (code, out) == (2, "")
    assert len(errors.splitlines()) == 1, errors
    assert str(folder) in errors
    assert said in errors


def test_a_model_stays_as_it_was_loaded_whatever_becomes_of_its_file(folder: Path) -> None:
    """Copied over, as `cp` does, cut off, deleted: what serves it goes on with what it has read."""
    model, file = loading.load_model(folder), folder / "model.safetensors"
    before, content = {name: x.clone() for name, x in model.state_dict().items()}, file.read_bytes()
    with file.open("r+b") as written:
        written.seek(len(content) // 3)
        written.write(bytes(len(content) - len(content) // 3))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    file.write_bytes(b"")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    file.unlink()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_what_is_transformers_own_in_a_config_is_left_out(folder: Path, headmax: Any) -> None:
    config(folder, num_labels=10**9, text_config=3, _attn_implementation=3, mixer_arguments="x", base_model_tp_plan=3)
    assert headmax("generate", folder, "--prompt", "w1", "--device", "cpu", "--max-new-tokens", 1)[0] == 0


def test_inspect_and_eval_refuse_missing_weights_too(folder: Path, headmax: Any, tmp_path: Path) -> None:
    weights(folder, **{"model.norm.weight": None})
    for command in (
        ["inspect", folder, "--text", "w1", "--out", tmp_path / "r.html"],
        ["eval", folder, "--tasks", "mqar_4", "--work", tmp_path / "work"],
    ):
        code, _, errors = headmax(*command)
        assert code == 2
        assert "model.norm.weight: not in the checkpoint" in errors
    assert not (tmp_path / "r.html").exists()
    assert not (tmp_path / "records.jsonl").exists()


def test_code_beside_a_tokenizer_is_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "own.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\nclass Own: pass\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    changes = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ValueError, match="no tokenizer there that transformers can load"):
        loading.load_tokenizer(folder)
    assert not (tmp_path / "marker").exists()


class Hostile:
    """Writes a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def seal(checkpoint: Path) -> None:
    """A manifest that fits what is there, as who changes the files can write it."""
    (checkpoint / MANIFEST).write_text(json.dumps({"files": fingerprints(checkpoint)}))


@pytest.fixture
def copied(run: tuple[Path, HeadmaxForCausalLM], tmp_path: Path) -> Path:
    return Path(shutil.copytree(run[0], tmp_path / "run"))


def test_a_hostile_index_is_not_executed(copied: Path, tmp_path: Path, headmax: Any) -> None:
    checkpoint, marker = copied / "checkpoints" / STEP, tmp_path / "marker"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Hostile(marker)))
    seal(checkpoint)
    code, _, errors = headmax("convert", copied, tmp_path / "hf", "--to", "hf")
    assert code == 2
    assert f"{checkpoint / '.metadata'}: not the index of a checkpoint: it names posix.mkdir" in errors
    for read in (lambda: train(copied, max_steps=4), lambda: state_keys(checkpoint), lambda: loading.load_model(copied)):
        with pytest.raises(ValueError, match=r"it names posix\.mkdir, which is not allowed"):
            read()
    assert not marker.exists()
    assert not (tmp_path / "hf").exists()


class EarlyPickler(pickle.Pickler):
    """Pickles members of an enum as Python 3.11.0 to 3.11.3 do, Debian 12's among them."""

    def reducer_override(self, x: Any) -> Any:
        return (getattr, (type(x), x.name)) if isinstance(x, Enum) else NotImplemented


def test_an_index_of_an_early_python_3_11_is_read(copied: Path) -> None:
    checkpoint = copied / "checkpoints" / STEP
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    with (checkpoint / ".metadata").open("wb") as file:
        EarlyPickler(file).dump(index)
    seal(checkpoint)
    assert b"getattr" in (checkpoint / ".metadata").read_bytes()
    assert loading.load_model(copied).model.embed_tokens.weight.isfinite().all()


@pytest.mark.parametrize("attribute", [(Path, "mkdir"), (Enum, "__members__"), (torch.Size, "numel")], ids=str)
def test_no_other_attribute_is_read(attribute: tuple[Any, str], copied: Path) -> None:
    checkpoint = copied / "checkpoints" / STEP
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Attribute(*attribute)))
    seal(checkpoint)
    with pytest.raises(ValueError, match="which is not allowed"):
        state_keys(checkpoint)


class Attribute:
    """Pickled as a call of getattr."""

    def __init__(self, owner: Any, name: str) -> None:
        self.call = owner, name

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        return getattr, self.call


def test_hostile_values_are_not_executed(copied: Path, tmp_path: Path) -> None:
    """Plain values of the optimizer lie in the tensors' file, as pickles of their own."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    checkpoint, marker = copied / "checkpoints" / STEP, tmp_path / "marker"
    with (checkpoint / ".metadata").open("rb") as file:
        index = pickle.load(file)
    (data,) = checkpoint.glob("*.distcp")
    place = index.storage_data[MetadataIndex("optimizer.param_groups.0.betas")]
    place.offset, before = data.stat().st_size, data.read_bytes()
    with data.open("ab") as file:
        torch.save(Hostile(marker), file)
    place.length = data.stat().st_size - len(before)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    seal(checkpoint)
    with pytest.raises(ValueError, match=rf"{STEP}: cannot be read: "):
        train(copied, max_steps=4)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps(7), pickle.dumps({"a": [1]})[:-3]], ids=range(4))
def test_an_index_that_is_none_is_refused(content: bytes, copied: Path) -> None:
    checkpoint = copied / "checkpoints" / STEP
    (checkpoint / ".metadata").write_bytes(content)
    seal(checkpoint)
    with pytest.raises(ValueError, match=r"\.metadata: not the index of a checkpoint"):
        loading.load_model(copied)


def test_an_index_does_not_lead_out_of_its_folder(copied: Path) -> None:
    checkpoint = copied / "checkpoints" / STEP
    content = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").write_bytes(content.replace(b"__0_0.distcp", b"../../x.json"))
    seal(checkpoint)
    with pytest.raises(ValueError, match=r"it points to \.\./\.\./x\.json, which is not in the folder"):
        loading.load_model(copied)


def test_a_run_whose_settings_are_not_its_checkpoints_is_refused(copied: Path) -> None:
    fields = json.loads((copied / "config.json").read_text())
    fields["model"]["num_heads"] = 2
    (copied / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"{STEP}: weights do not map: "):
        loading.load_model(copied)
