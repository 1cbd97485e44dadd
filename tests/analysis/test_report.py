"""The report as a file; tests/analysis/test_report_in_browser.py opens it."""

import base64
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from headmax import HeadGateConfig
from headmax.analysis import gates, report
from headmax.cli.inspect import inspect
from tests.analysis.conftest import make_model


def content(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def test_the_file_holds_the_gates_to_four_digits_and_nothing_from_outside() -> None:
    model = make_model(head_gate=HeadGateConfig(init_std=1.0))
    found = gates.trace(model, torch.arange(5), ["</script>", "<b>", "&", "\n", "{{data.json}}"], "a <model>")
    html = report.page([found])
    assert not re.search(r"https?://|@import|url\(", html)
    data = content(html)
    assert data["tokens"] == list(found.tokens)
    for layer, exact in zip(data["models"][0]["layers"], found.layers, strict=True):
        high, low = np.frombuffer(unpacked(layer["write"]["shares"]), "u1").reshape(2, 5, 4).astype(int)
        shares = 256 * high + low
        assert [[f"{x / report.UNIT:.4f}" for x in row] for row in shares] == [
            [f"{x:.4f}" for x in row] for row in exact.write.shares.tolist()
        ]
        assert list(unpacked(layer["read"]["winners"])) == exact.read.winners.tolist()


def test_ties_have_a_number_of_their_own() -> None:
    found = gates.trace(make_model(head_gate=HeadGateConfig(kind="uniform")), torch.arange(3), list("abc"), "m")
    assert list(unpacked(content(report.page([found]))["models"][0]["layers"][0]["read"]["winners"])) == [report.TIE] * 3


def test_one_or_two_models() -> None:
    found = gates.trace(make_model(), torch.arange(3), list("abc"), "m")
    assert content(report.page([found]))["differences"] is None
    assert [d["agreement"] for d in content(report.page([found, found]))["differences"]] == [0.0] * 3
    with pytest.raises(ValueError, match="one or two models, got 3"):
        report.page([found] * 3)


def test_inspect_writes_it(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Heads compete. " * 20)
    options = ("--file", tmp_path / "text.txt", "--compare", checkpoints["even"], "--out", tmp_path / "r.html", "--max-tokens", 50)
    command = [sys.executable, "-m", "headmax", "inspect", checkpoints["decided"], *options]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "50 tokens, cut at --max-tokens 50" in done.stdout
    data = content((tmp_path / "r.html").read_text())
    assert [model["name"] for model in data["models"]] == ["decided", "even"]
    assert len(data["tokens"]) == 50


def test_inspect_says_what_is_missing(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="give the text with --prompt or --file, one of the two"):
        inspect(str(tmp_path / "model"))
    with pytest.raises(ValueError, match="no tokenizer there that transformers can load"):
        inspect(str(tmp_path / "model"), prompt="x")
    with pytest.raises(FileNotFoundError, match=r"no config\.json there"):
        inspect(str(tmp_path), prompt="x")
    with pytest.raises(ValueError, match="--max-tokens must be at least 1, got 0"):
        inspect(str(tmp_path / "model"), prompt="x", max_tokens=0)
