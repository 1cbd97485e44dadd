"""Damaged models leave no record, and two evaluations do not share a folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

pytest.importorskip("lm_eval")
from headmax import durable
from headmax.eval.harness import TokenLM
from headmax.eval.scores import ScoreFile
from tests.eval.conftest import make_model


def test_a_nan_in_the_weights_ends_every_task_and_records_nothing(
    headmax: Any, tokenizer: PreTrainedTokenizerFast, data_dir: Path, tmp_path: Path
) -> None:
    model = make_model("gla")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = [
        "--tasks",
        "piqa,squad_completion,mqar_4",
        "--data-dir",
        data_dir,
        "--limit",
        3,
        "--work",
        tmp_path / "work",
        "--device",
        "cpu",
    ]
    code, out, errors = headmax("eval", tmp_path / "model", *asked)
    lines = [line for line in errors.splitlines() if line.startswith("headmax: ")]
    assert (code, out, len(lines)) == (2, "", 3), errors
    assert all("not finite" in line for line in lines)
    assert not ScoreFile(tmp_path / "work" / "scores.jsonl").scores
    records = tmp_path / "work" / "records.jsonl"
    assert not records.exists() or not records.read_text()


def test_a_score_that_is_not_finite_is_no_score(tmp_path: Path) -> None:
    first = '{"format": "headmax scores 1", "checkpoint": "a", "dtype": "float32", "device": "cpu", "commit": "v0", "state_bytes": 1}\n'
    (tmp_path / "s.jsonl").write_text(first + '{"id": "1", "logprob": NaN, "hits": 0}\n')
    with pytest.raises(ValueError, match=r"s\.jsonl:2: not a score: logprob is nan"):
        ScoreFile(tmp_path / "s.jsonl")


def test_a_work_folder_in_use_is_refused(headmax: Any, checkpoint: Path, tmp_path: Path) -> None:
    asked = ["eval", checkpoint, "--tasks", "mqar_4", "--limit", 2, "--work", tmp_path / "w", "--device", "cpu"]
    with durable.sole_user(tmp_path / "w"):
        code, _, errors = headmax(*asked)
    assert code == 2
    assert "another process is writing to it" in errors
    assert not list((tmp_path / "w").iterdir())
    assert headmax(*asked)[0] == 0
    assert headmax(*asked, "--seed", 2**64)[0] == 2


def test_control_tokens_in_a_task_s_text_are_spelled_out(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = TokenLM(tokenizer, lambda asked: {})
    assert tokenizer("a</s>")["input_ids"][-1] == tokenizer.eos_token_id
    ids = lm.tok_encode("<s>a</s>")
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(ids)
    assert tokenizer.decode(ids) == "<s>a</s>"
