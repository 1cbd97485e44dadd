"""The command line, as a user runs it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headmax import records
from headmax.cli.app import commands, main
from headmax.demo import recall as demo


def headmax(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "headmax", *arguments], capture_output=True, text=True, check=False)


Called = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Called:
    """`headmax` in this process, which has imported everything."""

    def call(*arguments: str) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["headmax", *arguments])
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, int(str(code)), said.out, said.err)

    return call


COMMANDS = [[name] for name in commands([])]
COMMANDS += [[name, member] for name, command in commands([]).items() if isinstance(command, tuple) for member in command[1]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command: list[str], called: Called) -> None:
    done = called(*command, "--help")
    assert done.returncode == 0
    usage, about = done.stdout.split("\n\n")[:2]
    assert usage.startswith(f"usage: headmax {' '.join(command)} [-h]")
    assert about.endswith("."), about


def test_help_of_a_recipe_has_its_defaults(called: Called) -> None:
    done = called("train", "mqar-gla", "--out", "gla-tiny", "--help")
    assert done.returncode == 0
    assert "--task.num-pairs" in done.stdout


def test_help_names_every_command() -> None:
    done = headmax("--help")
    assert done.returncode == 0, done.stderr
    assert "{recipes,plan,demo,data,train,curves,convert,generate,eval,inspect,bench,reproduce}" in done.stdout


def test_recipes_lists_counts_and_states(called: Called) -> None:
    done = called("recipes")
    line = next(line for line in done.stdout.splitlines() if "softmax-gla-340m" in line)
    for figure in ("24 x 1024", "341,732,352", "308,964,352", "24,576", "12,288 KiB"):
        assert figure in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--pairs", "99", "--steps", "1"], "num_pairs must be between 1 and vocab_size / 2 = 32, got 99"),
        (["demo", "--heads", "-4", "--steps", "1"], "num_heads must be a positive integer, got -4"),
        (["demo", "--steps", "0"], "steps must be at least 1, got 0"),
        (["bench", "kernels", "--length", "0"], "--length must be at least 1, got 0"),
        (["bench", "kernels", "--device", "tpu"], "--device tpu: this machine has cpu"),
        (["recipe"], "recipe"),
        (["train", "--out", "gla-tiny", "softmax-retnet-tiny"], "the recipe comes first, as in `headmax train softmax-gla-340m --out ...`"),
        (["train", "gla-tini", "--out", "gla-tiny"], "unknown recipe 'gla-tini'; did you mean 'gla-tiny'?"),
        (["plan", "softmax-gla-340m", "--tokens", "many"], "--tokens must be a number such as 500000, 15e9, 0.5M or 15B, got 'many'"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_clear_line(arguments: list[str], message: str, called: Called, tmp_path: Path) -> None:
    done = called(*arguments, *(["--out", str(tmp_path)] if arguments[0] == "demo" else []))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_draws_records_and_says_who_won(tmp_path: Path) -> None:
    done = headmax("demo", "--pairs", "2", "--steps", "4", "--out", str(tmp_path), "--record", str(tmp_path / "all.jsonl"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert '" k' in (tmp_path / "report.html").read_text()
    made = list(records.read(tmp_path / "records.jsonl"))
    assert made == list(records.read(tmp_path / "all.jsonl"))
    assert {record.extra["variant"] for record in made} == set(demo.VARIANTS)
    for variant in demo.VARIANTS:
        assert variant in done.stdout
    assert "Here the softmax gates" in done.stdout


def test_demo_verdict_is_decided_by_the_figures() -> None:
    assert demo.verdict({"plain": 0.5, "uniform": 0.6, "softmax": 0.7}).startswith("Here the softmax gates learnt faster than both")
    assert "did not win: uniform learnt faster, by 0.100" in demo.verdict({"plain": 0.5, "uniform": 0.8, "softmax": 0.7})


def test_recorded_seeds_are_counted(tmp_path: Path) -> None:
    make = records.Recorder("demo", "cpu")
    made = [
        make(f"case {variant}", "headmax", "mean accuracy over training", value, "fraction", seed, variant=variant)
        for seed, scores in enumerate([(0.1, 0.2, 0.3), (0.4, 0.2, 0.3), (0.1, 0.5, 0.3)])
        for variant, value in zip(demo.VARIANTS, scores, strict=True)
    ]
    records.append(tmp_path / "r.jsonl", made)
    (line,) = demo.earlier_seeds(tmp_path / "r.jsonl")
    assert "softmax ahead of plain in 2 and of uniform in 2 of 3 seeds" in line
    assert list(demo.earlier_seeds(tmp_path / "missing.jsonl")) == []


def test_committed_demo_records_cover_five_seeds_of_every_variant() -> None:
    by_case: dict[str, set[int | None]] = {}
    for record in records.read(demo.RECORDS):
        by_case.setdefault(record.case, set()).add(record.seed)
    assert by_case
    assert all(len(seeds) >= 5 for seeds in by_case.values())


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"suite": "demo"}\n')
    with pytest.raises(ValueError, match=r"r\.jsonl:1: not a record"):
        list(records.read(tmp_path / "r.jsonl"))


def test_kernel_benchmark_checks_before_it_times(tmp_path: Path) -> None:
    small = ["--length", "100", "--heads", "1", "--key", "8", "--value", "8", "--rounds", "1", "--lengths", "200"]
    done = headmax("bench", "kernels", "--peer", "hf", *small, "--out", str(tmp_path / "k.jsonl"))
    assert done.returncode == 0, done.stderr
    metrics = {(record.impl, record.metric) for record in records.read(tmp_path / "k.jsonl")}
    assert ("hf", "gated_delta_rule/error") in metrics
    for op in ("linear_attention", "gla", "gated_delta_rule"):
        assert {("headmax", f"{op}/{metric}") for metric in ("error", "forward+backward", "time per token")} <= metrics


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "train", "--recipe", "softmax-gla-340n"], "unknown recipe 'softmax-gla-340n'; did you mean"),
        (["bench", "train"], "headmax bench train needs a CUDA GPU: this machine has cpu"),
        (["bench", "tune"], "headmax bench tune needs a CUDA GPU: this machine has cpu"),
        (["bench", "decode"], "--device cuda: this machine has cpu"),
        (["bench", "decode", "--device", "cpu", "--batches", "0"], "--batches must be at least 1, got 0"),
        (["bench", "kernels", "--batch", "0"], "--batch must be at least 1, got 0"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_benchmarks_refuse_bad_input_in_one_line(arguments: list[str], said: str, called: Called) -> None:
    done = called(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_plan_prints_a_row_for_every_number_of_gpus(called: Called) -> None:
    done = called("plan", "softmax-gla-340m", "--gpu", "h20", "--gpus", "24", "--batch-tokens", "688128", "--parallel", "fsdp")
    assert done.returncode == 0, done.stderr
    numbers = [line.split()[0].rstrip("*") for line in done.stdout.splitlines() if " fsdp " in line and line.split()[1] == "fsdp"]
    assert numbers == ["1", "2", "4", "8", "16", "24", "32", "64", "128", "256", "512", "1024"]


def test_data_is_prepared_checked_and_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document\n<|doc|>\nand another\n")
    out = str(tmp_path / "out")
    done = headmax("data", "prepare", str(tmp_path / "a.txt"), "--out", out, "--shard-tokens", "1k")
    assert done.returncode == 0, done.stderr
    assert "train 6 tokens, 2 documents, 1 shards" in done.stdout
    assert "whole, 6 tokens to train on, 0 to validate on" in headmax("data", "check", out).stdout
    done = headmax("data", "prepare", str(tmp_path / "a.txt"), "--out", out, "--separator", "---")
    assert done.returncode == 2
    assert "made with another separator, shard tokens" in done.stderr
    assert len(done.stderr.splitlines()) == 1
