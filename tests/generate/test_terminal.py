"""`headmax generate`, called as the command line calls it."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headmax.cli.generate import generate
from headmax.generate import GREEDY, Engine, Request, Sampling
from headmax.train.loading import load_model, load_tokenizer

from .checkpoint import save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    save(made)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(load_model(folder, "cpu"), tokenizer=load_tokenizer(folder))


def expected(engine: Engine, prompt: str, sampling: Sampling, count: int) -> str | None:
    return engine.generate(Request(prompt, None, count, sampling, [1]))[0].text


def test_a_prompt_is_continued_as_it_comes(folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    generate(str(folder), prompt="Hello", max_new_tokens=20, greedy=True, device="cpu")
    out, err = capsys.readouterr()
    assert out == f"{expected(engine, 'Hello', GREEDY, 20)}\n"
    count = len(engine.generate(Request("Hello", None, 20, GREEDY, [1]))[0].tokens)
    assert re.search(
        rf"headmax: read 5 tokens, first new token after [\d.]+ s, generated {count} tokens at [\d.,]+ tokens/s; finish reason: ", err
    )


def test_a_file_with_every_flag(folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Once")
    rules = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 4}
    generate(str(folder), file=tmp_path / "text", max_new_tokens=30, stop=("zzzz",), state_dtype="float32", dtype="float32", **rules)  # type: ignore[arg-type]
    assert capsys.readouterr().out == f"{expected(engine, 'Once', Sampling(**rules), 30)}\n"  # type: ignore[arg-type]


def test_lines_continue_one_text(folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\ncd\n\nnever read\n"))
    generate(str(folder), max_new_tokens=6, greedy=True, device="cpu")
    first = engine.generate(Request("ab", None, 6, GREEDY, [1]))[0]
    history = [*engine.encode("ab").tolist(), *first.tokens]
    second = engine.generate(Request([*history, *engine.encode("cd").tolist()], None, 6, GREEDY, [1]))[0]
    assert capsys.readouterr().out == f"{first.text}\n{second.text}\n"


def test_a_prefix_is_read_once(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    generate(str(folder), prompt="Hello ", save_prefix=tmp_path / "p", device="cpu")
    assert "6 tokens" in capsys.readouterr().err
    generate(str(folder), prompt="you", prefix=tmp_path / "p", max_new_tokens=9, device="cpu")
    forked = capsys.readouterr().out
    generate(str(folder), prompt="Hello you", max_new_tokens=9, device="cpu")
    assert capsys.readouterr().out == forked


def test_what_cannot_be_loaded_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json there; give a folder that save_pretrained wrote"):
        load_model(tmp_path, "cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type is 'llama', not a headmax model"):
        load_model(tmp_path, "cpu")
    with pytest.raises(ValueError, match="no tokenizer there that transformers can load"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="give --prompt or --file, not both"):
        generate(str(folder), prompt="a", file=tmp_path / "x")
    with pytest.raises(ValueError, match="--save-prefix needs --prompt or --file"):
        generate(str(folder), save_prefix=tmp_path / "x")


def test_without_a_tokenizer_the_command_ends_with_code_2_and_one_line(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    command = [sys.executable, "-m", "headmax", "generate", str(tmp_path), "--prompt", "x", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no tokenizer there" in done.stderr
    assert "Traceback" not in done.stderr
