"""`headmax train RECIPE --from CHECKPOINT`: continued pretraining, gates for a model without, mixtures, and conversations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headmax import HeadmaxForCausalLM
from headmax.cli.train import build_train, shares
from headmax.data.prepare import PrepareConfig, prepare
from headmax.layers.head_gate import HeadGate
from headmax.train.loading import load_model, load_tokenizer
from tests.data.corpus import byte_level, documents, write
from tests.data.test_mixture import TEMPLATE, chats
from tests.generate.checkpoint import make_model, make_tokenizer
from tests.train.small import losses

TINY = (
    "--length",
    "64",
    "--batch-tokens",
    "512",
    "--tokens",
    "4096",
    "--schedule.warmup-tokens",
    "0",
    "--eval.every",
    "0",
    "--device",
    "cpu",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two prepared folders."""
    folder = tmp_path_factory.mktemp("text")
    tokenizer = str(byte_level(folder / "tokenizer.json"))
    made = []
    for name, texts in (("news", documents(20, lines=3)), ("books", documents(40, lines=3)[20:])):
        config = PrepareConfig((str(write(folder / f"{name}.txt", texts)),), tokenizer=tokenizer, document_token="<|endoftext|>")
        prepare(config, folder / name, workers=1)
        made.append(folder / name)
    return made


@pytest.fixture
def run() -> Callable[..., None]:
    """`headmax train` in this process, on one thread."""
    import tyro

    def call(*arguments: str) -> None:
        torch.set_num_threads(1)
        tyro.cli(build_train(list(arguments)), args=[*arguments, *TINY])

    return call


def model_in(folder: Path, **changes: Any) -> HeadmaxForCausalLM:
    model = make_model("gla", vocab_size=512, head_gate=None, **changes)
    model.save_pretrained(folder)
    return model


def test_a_run_goes_on_from_a_model_with_gates_that_start_as_one(data: list[Path], run: Callable[..., None], tmp_path: Path) -> None:
    before = model_in(tmp_path / "base")
    options = ("--data", str(data[0]), "--from", str(tmp_path / "base"))
    run("gla-tiny", "--out", str(tmp_path / "plain"), *options)
    run("softmax-gla-tiny", "--out", str(tmp_path / "gated"), *options)
    plain, gated = (losses(tmp_path / name) for name in ("plain", "gated"))
    assert gated[0][1] == pytest.approx(plain[0][1], rel=1e-3)
    assert gated[-1][1] < gated[0][1]
    after = load_model(tmp_path / "gated")
    assert after.config.hidden_size == before.config.hidden_size
    assert any(isinstance(module, HeadGate) for module in after.modules())
    assert not torch.equal(after.model.layers[0].mixer.q_proj.weight, before.model.layers[0].mixer.q_proj.weight)
    with pytest.raises(ValueError, match=r"--from: .*base has layers of gla, recipe retnet-tiny of retnet"):
        run("retnet-tiny", "--out", str(tmp_path / "other"), *options)


def test_a_run_on_a_mixture_resumes_where_it_was(data: list[Path], run: Callable[..., None], tmp_path: Path) -> None:
    model_in(tmp_path / "base")
    options = ("--data", str(data[0]), "--mix", f"{data[1]}=0.25", "--from", str(tmp_path / "base"))
    run("gla-tiny", "--out", str(tmp_path / "whole"), *options)
    run("gla-tiny", "--out", str(tmp_path / "half"), *options, "--max-steps", "3")
    run("gla-tiny", "--out", str(tmp_path / "half"), *options)
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    with pytest.raises(ValueError, match="holds a run with other settings: the data's mixture"):
        run("gla-tiny", "--out", str(tmp_path / "half"), *options[:2], "--mix", f"{data[1]}=0.5", *options[4:])


@pytest.mark.parametrize("wrong", [("books",), ("books=many",), ("a=0.5", "b=0.5"), ("a=0.2", "a=0.3"), ("a=0",)])
def test_shares_are_refused_by_name(wrong: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--mix"):
        shares(wrong)


def test_a_model_learns_to_answer_and_keeps_the_template(run: Callable[..., None], tmp_path: Path) -> None:
    words = make_tokenizer()
    words.chat_template = TEMPLATE
    make_model("gla").save_pretrained(tmp_path / "base")
    words.save_pretrained(tmp_path / "base")
    file = chats(tmp_path / "chats.jsonl", 60)
    run("gla-tiny", "--out", str(tmp_path / "run"), "--data", str(file), "--from", str(tmp_path / "base"), "--optim.lr", "0.01")
    found = losses(tmp_path / "run")
    assert found[-1][1] < 0.8 * found[0][1]
    assert load_tokenizer(tmp_path / "run").chat_template == TEMPLATE
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["chats"]
    with pytest.raises(ValueError, match="conversations need --from or --tokenizer"):
        run("gla-tiny", "--out", str(tmp_path / "other"), "--data", str(file))
