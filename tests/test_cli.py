"""The command line, as a user runs it."""

import inspect
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from headmax import records
from headmax.cli.run import load
from headmax.train import ParallelConfig
from headmax_cli.commands import COMMANDS, FAMILIES, GROUPS
from tests.command_line import Called, help_texts

SNAPSHOT = Path(__file__).parent / "help.txt"


def headmax(*arguments: str, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "headmax_cli", *arguments], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_does_what_its_line_says(name: str) -> None:
    """The line of `headmax --help` is the first of the function's docstring, and every option is explained."""
    command = COMMANDS[name]
    function = load(command, [])
    documentation = inspect.getdoc(function) or ""
    assert documentation.splitlines()[0] == command.about
    assert command.about.endswith(".")
    described = set(re.findall(r"^    (\w+): ", documentation, flags=re.MULTILINE))
    assert described >= set(inspect.signature(function).parameters) - {"config", "model"}


def test_help_texts_are_as_reviewed() -> None:
    """After a deliberate change: python -m tests.command_line > tests/help.txt"""
    assert help_texts() == SNAPSHOT.read_text()


def test_help_and_version_start_in_a_blink() -> None:
    for arguments in (["--help"], ["--version"], ["bench"], ["trian"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for _ in range(5):
            done = headmax(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 5 < 0.3
        assert done.returncode == (2 if arguments == ["trian"] else 0)


def test_only_running_a_command_imports_torch() -> None:
    code = "import sys; sys.argv = ['headmax', '--help']\ntry:\n    import headmax_cli; headmax_cli.main()\nfinally:\n"
    done = subprocess.run([sys.executable, "-c", code + "    print('torch' in sys.modules)"], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False"
    for title in GROUPS:
        assert f"\n{title}\n" in done.stdout


def test_a_family_lists_its_members(called: Called) -> None:
    for family in FAMILIES:
        if family not in COMMANDS:
            done = called(family)
            assert done.returncode == 0
            assert all(name in done.stdout for name in COMMANDS if name.split()[0] == family)


def test_help_of_a_recipe_has_its_defaults(called: Called) -> None:
    done = called("train", "mqar-gla", "--out", "gla-tiny", "--help")
    assert done.returncode == 0
    assert "--task.num-pairs" in done.stdout


def test_help_can_come_first(called: Called) -> None:
    assert called("help", "curves").stdout == called("curves", "--help").stdout


def test_options_of_training_shared_and_nested_are_written_alike(called: Called) -> None:
    """Counts with a unit, the names of other commands and those of version 0.1; no option says "default: None"."""
    import yaml

    given = ["--out", "run", "--length", "128", "--batch-tokens", "1024", "--schedule.warmup-tokens", "0", "--optim.lr", "0.1"]
    done = called("train", "softmax-gla-tiny", *given, "--tokens", "2M", "--dump-config")
    assert done.returncode == 0, done.stderr
    options = yaml.safe_load(done.stdout)
    assert (options["token_budget"], options["sequence_length"], options["schedule"]["warmup_tokens"]) == (2_000_000, 128, 0)
    older = ["--sequence-length", "128", *given[:2], *given[4:], "--token-budget", "2000000", "--parallel", "ddp"]
    assert called("train", "softmax-gla-tiny", *older, "--dump-config").stdout == done.stdout
    assert "None" not in called("train", "--help").stdout


def test_version_is_the_packages(called: Called) -> None:
    import headmax

    assert called("--version").stdout == f"headmax {headmax.__version__}\n"


def test_env_says_which_backend_auto_takes_and_why(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = called("env")
    assert done.returncode == 0
    assert f"{torch.__version__} (CUDA" in done.stdout
    if not torch.cuda.is_available():
        assert "auto takes chunkwise on cpu; not triton: needs a CUDA device, got cpu" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_options(shell: str, called: Called) -> None:
    done = called("--completion", shell)
    assert done.returncode == 0
    for word in ("inspect", "kernels", "max-new-tokens"):
        assert word in done.stdout
    assert called("--completion", "ksh").stderr == "headmax: --completion needs a shell: bash, zsh, fish\n"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m headmax_cli recipes | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "recipe" in done.stdout


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks the system what has been imported")
@pytest.mark.parametrize("module", ["headmax", "headmax_cli"])
def test_an_interruption_while_it_imports_is_no_traceback(module: str) -> None:
    # a shell's background jobs ignore SIGINT, and so would their children
    start = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", start, sys.executable, "-m", module, "env"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (errors, process.returncode in (130, -signal.SIGINT)) == ("", True)


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from headmax_cli import main; main(['data', 'prepare', 'a.txt', '--out', 'd'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "headmax: this command needs pyarrow: pip install '.[train]' in a checkout of headmax\n")


@pytest.mark.parametrize(
    ("where", "status", "said"), [(">&-", 0, ""), ("<&-", 0, ""), (">/dev/full", 2, "headmax: standard output cannot")]
)
def test_output_that_has_no_place(where: str, status: int, said: str) -> None:
    shell = ["sh", "-c", f'"{sys.executable}" -m headmax_cli --help {where}']
    done = subprocess.run(shell, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert (done.returncode, len(done.stderr.splitlines())) == (status, bool(said)), done.stderr
    assert done.stderr.startswith(said)


@pytest.mark.parametrize("debug", [False, True])
def test_an_internal_error_is_one_line_unless_asked(debug: bool, called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headmax.cli.recipes.recipes", lambda: [][1])
    done = called("recipes", *(["--debug"] if debug else []))
    assert done.returncode == 1
    assert "internal error, IndexError: list index out of range; --debug shows where" in done.stderr
    assert ("Traceback" in done.stderr) == debug


def test_options_come_from_a_file_and_the_command_line_wins(tmp_path: Path, called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    training = mock.MagicMock()
    monkeypatch.setattr("headmax.train.trainer.training", training)
    options = ["--out", "run", "--tokens", "2M", "--optim.betas", "0.8", "0.9", "--model.num-heads", "2", "--checkpoint.no-final"]
    dumped = called("train", "mqar-softmax-gla", *options, "--dump-config")
    assert dumped.returncode == 0, dumped.stderr
    training.assert_not_called()
    (tmp_path / "run.yaml").write_text(dumped.stdout)
    done = called("train", "--config", str(tmp_path / "run.yaml"), "--seed", "7", "--dump-config")
    assert done.stdout == dumped.stdout.replace("seed: 0", "seed: 7")
    assert called("train", "--config", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "other")).returncode == 0
    model, train, _, out = training.call_args.args
    assert (train.token_budget, train.optim.betas, train.checkpoint.final) == (2_000_000, (0.8, 0.9), False)
    assert (model.num_heads, out) == (2, tmp_path / "other")
    (tmp_path / "run.yaml").write_text("- a\n- b\n")
    assert "must be a mapping of options to values, got list" in called("train", "--config", str(tmp_path / "run.yaml")).stderr


@pytest.mark.parametrize("option", ["--parallel", "--parallel.strategy", "parallel: fsdp", "parallel.strategy: fsdp"])
def test_the_strategy_has_its_old_option_too(option: str, tmp_path: Path, called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line and in a file of 0.1."""
    training = mock.MagicMock()
    monkeypatch.setattr("headmax.train.trainer.training", training)
    (tmp_path / "run.yaml").write_text(option)
    given = [option, "fsdp"] if option.startswith("--") else ["--config", str(tmp_path / "run.yaml")]
    done = called("train", "mqar-gla", "--out", str(tmp_path / "run"), *given)
    assert done.returncode == 0, done.stderr
    assert training.call_args.args[1].parallel == ParallelConfig("fsdp")


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["bench", "decode", "--batches", "1,8", "--decoded", "5"], {"batches": [1, 8], "decoded": [5]}),
        (["eval", "m", "--tasks", "piqa,niah"], {"checkpoint": "m", "tasks": ["piqa", "niah"]}),
        (["generate", "m", "--stop", "a,b", "--stop", "c"], {"stop": ["a,b", "c"]}),
        (["plan", "gla-340m", "--tokens", "15B", "--batch-tokens", "0.5M"], {"tokens": 15 * 10**9, "batch_tokens": 500_000}),
        (["data", "prepare", "a.txt", "b.txt", "--out", "d"], {"inputs": ["a.txt", "b.txt"], "out": "d"}),
    ],
)
def test_lists_and_counts_are_written_alike(arguments: list[str], values: dict, called: Called, tmp_path: Path) -> None:
    import yaml

    dumped = called(*arguments, "--dump-config").stdout
    assert yaml.safe_load(dumped).items() >= values.items()
    (tmp_path / "options.yaml").write_text(dumped)
    words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    assert called(*arguments[:words], "--config", str(tmp_path / "options.yaml"), "--dump-config").stdout == dumped


def test_recipes_lists_counts_and_states(called: Called) -> None:
    done = called("recipes")
    line = next(line for line in done.stdout.splitlines() if "softmax-gla-340m" in line)
    for figure in ("24 x 1024", "341,732,352", "308,964,352", "24,576", "12,288 KiB"):
        assert figure in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "recall", "--pairs", "99", "--steps", "1"], "num_pairs must be between 1 and vocab_size / 2 = 32, got 99"),
        (["demo", "recall", "--heads", "-4", "--steps", "1"], "num_heads must be a positive integer, got -4"),
        (["demo", "recall", "--steps", "0"], "steps must be at least 1, got 0"),
        (["bench", "kernels", "--length", "0"], "--length must be at least 1, got 0"),
        (["bench", "kernels", "--length", "8", "--packed", "4,5"], "--packed lengths must sum to --length 8 in a batch of 1, got 9"),
        (["bench", "kernels", "--device", "tpu"], "--device tpu: this machine has cpu"),
        (["recipe"], "unknown command 'recipe'; did you mean 'recipes'?"),
        (["-V"], "unknown option '-V'; see `headmax --help`"),
        (["plan", "--gpus", "8"], "plan: missing RECIPE (see `headmax plan --help`)"),
        (["generate", "m", "--top-k", "x"], "generate: --top-k must be INT, got 'x' (see `headmax generate --help`)"),
        (["serve", "m", "--port", "http"], "serve: --port must be INT, got 'http' (see `headmax serve --help`)"),
        (["bench", "decode", "--limit", "soon"], "bench decode: --limit must be FLOAT, got 'soon'"),
        (["generate", "m", "--prompt"], "generate: --prompt needs a value (see `headmax generate --help`)"),
        (["generate", "m", "--promt", "x"], "generate: unknown option --promt; did you mean --prompt?"),
        (["train", "mqar-softmax-gla", "--out", "o", "--steps", "3"], "train: unknown option --steps; did you mean --max-steps?"),
        (["train", "mqar-softmax-gla", "--out", "o", "--lr", "3"], "train: unknown option --lr; did you mean --optim.lr?"),
        (["generate"], "generate: missing CHECKPOINT"),
        (["train", "gla-tiny", "--data", "d"], "train: missing --out FOLDER"),
        (["bench", "kernels", "--ops", "retnet"], "--ops: unknown 'retnet'; known: 'linear_attention', 'gla', 'gated_delta_rule', 'kda'"),
        (["train", "--out", "gla-tiny", "softmax-retnet-tiny"], "the recipe comes first, as in `headmax train softmax-gla-340m --out ...`"),
        (["train", "gla-tini", "--out", "gla-tiny"], "unknown recipe 'gla-tini'; did you mean 'gla-tiny'?"),
        (["plan", "softmax-gla-340m", "--tokens", "many"], "--tokens: must be a number such as 500000, 15e9, 0.5M or 15B, got 'many'"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_clear_line(arguments: list[str], message: str, called: Called, tmp_path: Path) -> None:
    done = called(*arguments, *(["--out", str(tmp_path)] if arguments[0] == "demo" else []))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


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
    for op in ("linear_attention", "gla", "gated_delta_rule", "kda"):
        assert {("headmax", f"{op}/{metric}") for metric in ("error", "forward+backward", "time per token")} <= metrics


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "train", "--recipe", "softmax-gla-340n"], "unknown recipe 'softmax-gla-340n'; did you mean"),
        (["bench", "train"], "headmax bench train needs a CUDA GPU: this machine has cpu"),
        (["bench", "tune"], "headmax bench tune needs a CUDA GPU: this machine has cpu"),
        (["bench", "decode", "--device", "cuda"], "--device cuda: this machine has cpu"),
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
    asked = ["plan", "softmax-gla-340m", "--gpu", "h20", "--gpus", "24", "--batch-tokens", "688128"]
    done = called(*asked, "--parallel.strategy", "fsdp", "--parallel.tensor", "1")
    assert done.returncode == 0, done.stderr
    assert called(*asked, "--parallel", "fsdp", "--parallel.tensor", "1").stdout == done.stdout  # as in 0.1
    best, sent = done.stdout.split("The best mesh")[1].split("Communication per GPU")
    for shown in (best, sent):
        rows = [line.split() for line in shown.splitlines()[2:] if line.strip()]
        assert [row[0].rstrip("*") for row in rows if row[0] != "*"] == [str(n) for n in sorted({24, *(2**n for n in range(11))})]
        assert {row[1] for row in rows if row[0] != "*"} == {"fsdp"}


def test_data_is_prepared_checked_and_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document\n<|doc|>\nand another\n")
    out = str(tmp_path / "out")
    done = headmax("data", "prepare", str(tmp_path / "a.txt"), "--out", out, "--shard-tokens", "1k")
    assert done.returncode == 0, done.stderr
    assert "train 6 tokens, 2 documents, 1 shard" in done.stdout
    assert "intact, 6 training tokens, 0 validation tokens" in headmax("data", "check", out).stdout
    done = headmax("data", "prepare", str(tmp_path / "a.txt"), "--out", out, "--separator", "---")
    assert done.returncode == 2
    assert "made with another separator, shard tokens" in done.stderr
    assert len(done.stderr.splitlines()) == 1
