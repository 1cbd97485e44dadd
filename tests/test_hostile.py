"""Inputs and outputs that no command can use: one line that names them, exit code 2, and nothing written."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headmax import durable, fields, records
from headmax.analysis.curves import digest
from headmax.data.dataset import TokenShards
from headmax.data.documents import Options, find
from headmax.data.prepare import PrepareConfig, prepare
from headmax.eval import requests
from headmax.eval.scores import Score, ScoreFile
from headmax.models.convert import config_from_fla, from_fla, to_fla
from headmax.train import checkpoint
from tests.data.corpus import byte_level, documents, write
from tests.generate.checkpoint import make_model, save
from tests.train.small import train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(folder, max_steps=2)
    return folder


def refused(said: str, result: tuple[int, str, str]) -> None:
    code, out, errors = result
    assert (code, out, len(errors.splitlines())) == (2, "", 1), errors
    assert said in errors


NOT_UTF8 = os.fsdecode(b"ab\xffc")


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_a_prompt_that_is_not_utf8_is_refused(command: str, model: Path, headmax: Any) -> None:
    refused("--prompt: must be UTF-8, got byte 0xff at character 2", headmax(command, model, "--prompt", NOT_UTF8))


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_scored(model: Path, headmax: Any, tmp_path: Path) -> None:
    refused("--name: must be UTF-8", headmax("eval", model, "--name", NOT_UTF8, "--work", tmp_path / "work"))
    assert not list(tmp_path.iterdir())


def test_only_regular_files_are_replaced(model: Path, headmax: Any, tmp_path: Path) -> None:
    """A rename over /dev/null would take it from every process of the machine."""
    os.mkfifo(tmp_path / "pipe")
    for write_it in (lambda path: durable.write(path, "x"), lambda path: durable.append(path, b"x"), records.check):
        with pytest.raises(ValueError, match="pipe: not a regular file; choose another file to write"):
            write_it(tmp_path / "pipe")
    for command, option in (("generate", "--save-prefix"), ("inspect", "--out"), ("eval", "--out")):
        refused("pipe: not a regular file", headmax(command, model, *(["--prompt", "x"] * (command != "eval")), option, tmp_path / "pipe"))
    assert (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    durable.write(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "x"


def test_outputs_below_a_file_are_refused_before_the_work_begins(model: Path, run: Path, headmax: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused("file is not a folder", headmax("eval", model, "--out", tmp_path / "file/x", "--work", tmp_path / "work"))
    refused("file is not a folder", headmax("bench", "kernels", "--device", "cpu", "--out", tmp_path / "file/x"))
    for command in (["convert", run], ["curves", run, "--out"]):
        refused("file: a file, where a folder is to be written", headmax(*command, tmp_path / "file"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_name_with_a_line_end_or_a_terminal_s_command_is_one_line(headmax: Any) -> None:
    refused(r"a\nb\x1b[31m: no such file", headmax("eval", "tables", "a\nb\x1b[31m"))


def test_no_task_that_is_known_leaves_nothing(model: Path, headmax: Any, tmp_path: Path) -> None:
    assert headmax("eval", model, "--tasks", "nothing", "--work", tmp_path / "work")[0] == 2
    assert not list(tmp_path.iterdir())


NINE = ((before, name, ", ".join([f"*{before}"] * 9)) for before, name in itertools.pairwise("abcdefghijkl"))
BOMB = "a: &a [x]\n" + "".join(f"{name}: &{name} [{several}]\n" for _, name, several in NINE)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: &a {b: *a}", "not YAML: the alias *a is not read: write its value out"),
        (BOMB, "not YAML: the alias *a is not read: write its value out"),
        ("x: " + "[" * 2000, "nested too deep"),
        ("gpus: 1\ngpus: 2\n", "not YAML: gpus is there twice"),
        ("gpus: !!python/object/apply:os.system [x]", "not YAML: could not determine a constructor"),
    ],
    ids=["loop", "bomb", "deep", "twice", "python"],
)
def test_options_that_are_none_are_refused(content: str, said: str, headmax: Any, tmp_path: Path) -> None:
    (tmp_path / "o.yaml").write_text(content)
    refused(f"o.yaml: {said}", headmax("generate", "--config", tmp_path / "o.yaml"))


@pytest.mark.parametrize(
    ("written", "said"), [("1:30", "--gpus must be INT, got '1:30'"), ("2020-01-01", "--gpus must be INT, got '2020-01-01'")]
)
def test_options_in_a_file_are_read_as_on_the_command_line(written: str, said: str, headmax: Any, tmp_path: Path) -> None:
    (tmp_path / "o.yaml").write_text(f"gpus: {written}\n")
    refused(said, headmax("plan", "softmax-gla-340m", "--config", tmp_path / "o.yaml"))
    (tmp_path / "o.yaml").write_text("gpus: 016\n")
    expected = headmax("plan", "softmax-gla-340m", "--gpus", "16")
    assert headmax("plan", "softmax-gla-340m", "--config", tmp_path / "o.yaml") == expected
    assert expected[0] == 0


def test_a_file_without_an_end_is_not_read(model: Path, run: Path, headmax: Any, tmp_path: Path) -> None:
    refused("/dev/zero: not a regular file; give one to read", headmax("generate", model, "--file", "/dev/zero", "--device", "cpu"))
    os.mkfifo(tmp_path / "pipe")
    refused("pipe: not a regular file; give one to read", headmax("generate", "--config", tmp_path / "pipe"))
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "run/metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: not a regular file; give one to read"):
        train(tmp_path / "run", max_steps=3)


@pytest.mark.parametrize("columns", ["1", "5", "0", "-3", "x"])
def test_help_is_printed_whatever_the_terminal_says_its_width_is(columns: str, headmax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, errors = headmax("plan", "--help")
    assert (code, errors) == (0, "")
    assert "usage: headmax plan" in out
    assert os.environ["COLUMNS"] == columns


@pytest.mark.parametrize("value", ["x", "-1", "", "1.5"])
def test_what_torchrun_says_is_a_number(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ValueError, match=f"WORLD_SIZE in the environment must be a number, as torchrun sets it, got '{value}'"):
        train(tmp_path / "run", max_steps=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "kernels", "--lengths", "-5"], "--lengths must be at least 1, got -5"),
        (["bench", "kernels", "--heads", "9" * 30], "--heads must be below 2^40"),
        (["bench", "kernels", "--limit", "nan"], "--limit must be at least 1, got nan"),
        (["bench", "kernels", "--ops", ""], "--ops: give at least one of linear_attention"),
        (["bench", "decode", "--device", "cpu", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["bench", "decode", "--device", "cpu", "--peer-tokens", "1"], "--peer-tokens must be at least 2, got 1"),
        (["eval", "MODEL", "--max-length", "0"], "--max-length must be at least 1, got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: list[str], said: str, model: Path, headmax: Any) -> None:
    refused(said, headmax(*(str(model) if word == "MODEL" else word for word in arguments)))


def test_a_nan_in_the_gates_is_no_report(headmax: Any, tmp_path: Path) -> None:
    save(tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["model.layers.0.mixer.head_gate.read_weight"][:] = torch.nan
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "r.html"
    refused("the gates of layer 0 are not finite", headmax("inspect", tmp_path / "model", "--prompt", "x", "--out", out))
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]\n", "metrics.jsonl:1: not a line of metrics: must be a JSON object"),
        ("{}\n", "metrics.jsonl:1: not a line of metrics: .* is missing"),
        ("[" * 100_000 + "\n", "metrics.jsonl:1: not a line of metrics: nested too deep"),
        ("", "all steps were skipped, so there is nothing to plot"),
    ],
)
def test_metrics_that_are_none(content: str, said: str, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match=said):
        list(digest(tmp_path / "run"))
    if content:
        with pytest.raises(ValueError, match=said):
            train(tmp_path / "run", max_steps=3)


EVENTS = {"count": 0, "steps": [], "definition": "d"}
BAD_EVENTS = [EVENTS | {"count": []}, EVENTS | {"count": None}, EVENTS | {"count": "x"}, {}, None]
BAD_SUMMARIES = [{"stability": {"loss_spikes": events, "gradient_peaks": EVENTS}} for events in BAD_EVENTS]
BAD_SUMMARIES += [{"stability": {}}, {"stability": 3}, {"validation": 3}, {"validation": {}}, {"skipped_steps": 3}, {"date": None}]


@pytest.mark.parametrize("change", BAD_SUMMARIES, ids=str)
def test_a_summary_that_is_none(change: dict[str, Any], run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    summary = tmp_path / "run/summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | change))
    with pytest.raises(ValueError, match=r"summary\.json: not the summary of a run: "):
        list(digest(tmp_path / "run"))


def sealed(run: Path, name: str, content: Callable[[bytes], bytes]) -> Path:
    """The newest checkpoint with other content in some files and a manifest that knows of it."""
    folder = checkpoint.list_checkpoints(run / "checkpoints")[-1]
    for path in folder.glob(name):
        path.write_bytes(content(path.read_bytes()))
    (folder / checkpoint.MANIFEST).write_text(json.dumps({"files": checkpoint.fingerprints(folder)}))
    return folder


@pytest.mark.parametrize("change", [{"step": 10**40}, {"step": 1}, {"step": "x"}, {"skipped": -1}, {"settings": 3}, {"settings": {}}])
def test_a_position_that_is_none(change: dict[str, Any], run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    sealed(tmp_path / "run", checkpoint.PROGRESS, lambda text: json.dumps(json.loads(text) | change).encode())
    with pytest.raises(ValueError, match=r"train\.json: not the progress of a run: "):
        train(tmp_path / "run", max_steps=3)


def test_tensors_that_are_gone_from_a_checkpoint(run: Path, headmax: Any, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    folder = sealed(tmp_path / "run", "*.distcp", lambda _: b"")
    with pytest.raises(ValueError, match=f"{folder}: cannot be read: "):
        train(tmp_path / "run", max_steps=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[PrepareConfig, Path]:
    folder = tmp_path_factory.mktemp("data")
    config = PrepareConfig(
        (str(write(folder / "a.txt", documents(9))),), tokenizer=str(byte_level(folder / "t.json")), document_token="<|endoftext|>"
    )
    prepare(config, folder / "data", workers=1)
    return config, folder / "data"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("index.json", {"made_from": {"contents": 3}}),
        ("index.json", {"made_from": {"contents": [{"bytes": "x"}]}}),
        ("index.json", {"document_token": 10**6}),
        *(("progress.json", {"cursor": cursor}) for cursor in ("x", 3, ["a", None, 0], [0, "x", 0], [0, None, 7], [1, 2, 3, 4])),
        *(("progress.json", {"cursor": cursor}) for cursor in (None, [10**9, None, 0])),
    ],
)
def test_an_index_that_leads_nowhere(name: str, change: dict[str, Any], data: tuple[PrepareConfig, Path], tmp_path: Path) -> None:
    config, folder = data
    shutil.copytree(folder, tmp_path / "d")
    index = json.loads((tmp_path / "d/index.json").read_text())
    (tmp_path / "d/index.json").unlink()
    (tmp_path / "d" / name).write_text(json.dumps(index | change))
    with pytest.raises(ValueError, match=rf"{name}: (not an index of prepared data|cursor .* is not a position)"):
        prepare(config, tmp_path / "d", workers=1)


def test_documents_in_no_order_are_not_trained_on(data: tuple[PrepareConfig, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(data[1], tmp_path / "d")
    starts = np.fromfile(folder / "train-00000.documents", "<i8")
    starts[1:] = starts[1] - 1
    starts.tofile(folder / "train-00000.documents")
    source = TokenShards(folder, length=256, seed=0, documents="separate")
    with pytest.raises(ValueError, match="documents do not begin in increasing order"):
        source.batch(range(source.num_samples))


@pytest.mark.parametrize("name", ["hf:", "hf:a b", "hf:/x"])
def test_a_dataset_without_a_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"not a dataset of the hub; give hf:owner/name\[:configuration\]\[@split\]"):
        find([name], Options())


def test_lines_of_other_types_are_named(tmp_path: Path) -> None:
    request = requests.Request("recall", (1, 2), (3,))
    requests.write(tmp_path / "r.jsonl", {"task": [request]})
    line = json.loads((tmp_path / "r.jsonl").read_text())
    for change in ({"cut": None}, {"cut": "x"}, {"context": 3}, {"context": [10**30]}, {"kind": "other"}, {"task": [1]}):
        (tmp_path / "r.jsonl").write_text(json.dumps(line | change) + "\n")
        with pytest.raises(ValueError, match=r"r\.jsonl:1: not a request: "):
            requests.read(tmp_path / "r.jsonl")
    first = '{"format": "headmax scores 1", "checkpoint": "a", "dtype": "float32", "device": "cpu", "commit": "v0", "state_bytes": 1}\n'
    for line in ('{"id": "1", "hits": "x"}', '{"id": 3}', '{"id": "1", "hits": 1e3}', "[" * 100_000, "3"):
        (tmp_path / "s.jsonl").write_text(first + line + "\n")
        with pytest.raises(ValueError, match=r"s\.jsonl:2: not a score: "):
            ScoreFile(tmp_path / "s.jsonl")


def test_fields_are_compared_with_their_types() -> None:
    assert fields.build(Score, {"id": "a", "logprob": -1, "tokens": [1]}) == Score("a", -1, tokens=[1])
    for wrong, said in (
        ([], "must be a JSON object"),
        ({}, "id is missing"),
        ({"id": "a", "x": 1}, "unknown field 'x'"),
        ({"id": "a", "hits": True}, "hits must be"),
        ({"id": "a", "tokens": [2**63]}, "tokens must be"),
    ):
        with pytest.raises(ValueError, match=said):
            fields.build(Score, wrong)


FLA = {"model_type": "gla", "hidden_size": 32, "num_heads": 2}


@pytest.mark.parametrize(
    "change",
    [
        *({"hidden_size": x} for x in ("x", [1], {}, True, float("nan"), 10**30)),
        *({"num_heads": x} for x in (0, "2")),
        *({"feature_map": []}, {"model_type": []}, {"expand_k": "x"}, {"hidden_ratio": -1}, {"conv_size": "x"}),
    ],
    ids=str,
)
def test_settings_that_no_size_can_be_computed_from(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"cannot map|is not a model of flash-linear-attention|must be"):
        config_from_fla(FLA | change)


@pytest.mark.parametrize("dtype", ["nope", 3, {"a": 1}, "nn"])
def test_a_dtype_that_is_none_is_not_converted(dtype: object, tmp_path: Path) -> None:
    make_model(head_gate=None).save_pretrained(tmp_path / "model")
    to_fla(tmp_path / "model", tmp_path / "fla")
    path = tmp_path / "fla/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": dtype, "torch_dtype": dtype}))
    with pytest.raises(ValueError, match=r"in config\.json is no dtype of torch"):
        from_fla(tmp_path / "fla", tmp_path / "out")
