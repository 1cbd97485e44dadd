"""A run becomes a Hugging Face folder."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headmax.cli.convert import convert
from headmax.train.export import to_hf
from headmax.train.trainer import fit
from tests.command_line import Called
from tests.train.small import Walks, model_config, train_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("export")
    vocabulary = {token: n for n, token in enumerate(["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(45))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "data").mkdir()
    tokenizer.save(str(folder / "data" / "tokenizer.json"))
    torch.set_num_threads(1)
    model = fit(model_config(), train_config(max_steps=3), Walks(), folder / "run", tokenizer=folder / "data")
    return folder / "run", model


def test_convert_writes_what_the_auto_classes_load(run: tuple[Path, torch.nn.Module], capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = run
    convert(folder)
    assert f"headmax: wrote {folder / 'hf'}" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(folder / "hf", trust_remote_code=False)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    assert loaded.generation_config.eos_token_id == [1, 2], "the next document's first token, and the end of a text"
    assert sorted(path.suffix for path in (folder / "hf").iterdir()) == [".json"] * 4 + [".md", ".py", ".safetensors"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    assert tokenizer("w3 w4 what").input_ids == [6, 7, 0]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.decode([5, 6])) == ("<s>", "</s>", "w2 w3")
    with pytest.raises(ValueError, match="is not empty: give a new folder"):
        convert(folder)


def test_what_is_no_run_is_refused(run: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a run of headmax train; give its --out folder"):
        to_hf(tmp_path, tmp_path / "hf")
    with pytest.raises(ValueError, match="name the folder to write, as in `headmax convert"):
        convert(tmp_path, to="fla")


def test_every_field_is_an_option_and_the_recipe_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: Called) -> None:
    training = mock.MagicMock()
    monkeypatch.setattr("headmax.train.trainer.training", training)
    arguments = [
        "mqar-softmax-gla",
        "--out",
        str(tmp_path),
        "--max-steps",
        "7",
        "--checkpoint-every",
        "3",
        "--seed",
        "5",
        "--device",
        "cpu",
    ]
    arguments += ["--optim.lr", "5e-4", "--compute.micro-batch", "4", "--model.num-heads", "2", "--model.head-gate.kind", "sigmoid"]
    assert called("train", *arguments, "--task.num-pairs", "4").returncode == 0
    model, config, source, _ = training.call_args.args
    assert (config.max_steps, config.checkpoint_every, config.seed, config.device) == (7, 3, 5, "cpu")
    assert (config.optim.lr, config.compute.micro_batch, config.optim.weight_decay) == (5e-4, 4, 0.0)
    assert (config.sequence_length, config.batch_size, config.token_budget) == (13, 64, 2000 * 64 * 13)
    assert (model.mixer, model.num_heads, model.head_gate.kind, model.head_gate.read) == ("gla", 2, "sigmoid", True)
    assert source.identity == {"task": "mqar", "generator": "philox", "seed": 5, "num_pairs": 4, "vocab_size": 64}
    assert json.dumps(source.identity)


def test_a_task_sets_the_length_that_is_split(called: Called, tmp_path: Path) -> None:
    """16 tokens with five pairs; the recipe's 49 could not be split in two."""
    done = called("train", "mqar-softmax-linear", "--out", str(tmp_path), "--task.num-pairs", "5", "--parallel.context", "2")
    assert done.stderr == "headmax: parallel.context 2 must divide the number of processes, got 1: start them with torchrun\n"
