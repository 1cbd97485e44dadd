"""From text to a model: prepared shards, the trainer, and a folder that speaks with the same tokenizer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headmax import HeadmaxConfig, recipes
from headmax.data.prepare import PrepareConfig, prepare
from headmax.recipes import Recipe
from headmax.train.export import to_hf
from headmax.train.trainer import fit
from tests.data.corpus import byte_level, documents, write
from tests.train.small import losses, train_config


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    tokenizer = str(byte_level(folder / "tokenizer.json"))
    texts, held_out = documents(30, lines=3), documents(40, lines=3)[30:]
    inputs, valid = (str(write(folder / f"{name}.txt", found)) for name, found in (("train", texts), ("valid", held_out)))
    config = PrepareConfig((inputs,), (valid,), tokenizer=tokenizer, document_token="<|endoftext|>")
    prepare(config, folder / "out", workers=1)
    return folder / "out"


def recipe(data: Path, **changes: object) -> Recipe:
    small = HeadmaxConfig(mixer="gla", hidden_size=32, num_hidden_layers=1, num_heads=2, vocab_size=400, intermediate_size=32)
    train = train_config(sequence_length=64, batch_tokens=512, token_budget=512 * 20, schedule_warmup_tokens=0, eval_every=4, **changes)
    return replace(recipes.get("gla-tiny"), model=small, train=train).speaking(data)


@pytest.mark.parametrize("kept", ["concatenate", "separate"])
def test_text_trains_resumes_and_speaks(kept: str, data: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for folder, steps in (("whole", 8), ("half", 3), ("half", 8)):
        chosen = recipe(data, documents=kept, max_steps=steps)
        source, validation = chosen.sources(data)
        model = fit(chosen.model, chosen.train, source, tmp_path / folder, validation=validation, tokenizer=data)
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1][1] < losses(tmp_path / "whole")[0][1]
    to_hf(tmp_path / "half", tmp_path / "hf")
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id, tokenizer.eos_token) == (0, 0, "<|endoftext|>")
    ids = tokenizer("the naïve дом", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "the naïve дом"
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def test_without_enough_held_out_text_there_is_no_validation(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen = recipe(data)
    train = replace(chosen.train, sequence_length=2048, batch_tokens=2048)
    source, validation = replace(chosen, train=train).sources(data)
    assert (source.length, validation) == (2048, None)
    assert "no validation" in caplog.text


def test_runs_of_all_seeds_are_validated_on_the_same_text(data: Path) -> None:
    (train, valid), (other_train, other_valid) = (recipe(data, seed=seed).sources(data) for seed in (0, 3))
    assert not torch.equal(train.batch(range(8)).input_ids, other_train.batch(range(8)).input_ids)
    assert torch.equal(valid.batch(range(8)).input_ids, other_valid.batch(range(8)).input_ids)
