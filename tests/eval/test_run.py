"""The three stages as a user runs them: alone, together, interrupted, on bad input, and through the harness's own command line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from headmax import records
from headmax.cli.run import explain
from headmax.eval import requests
from headmax.eval.names import COMMONSENSE, MQAR, NIAH, expand
from headmax.eval.requests import Request
from headmax.eval.run import Evaluation, Settings, model_name
from headmax.eval.score import score
from headmax.eval.scores import Score, ScoreFile, Source
from headmax.eval.scoring import Scorer
from headmax.eval.terminal import Place, run
from headmax.recipes import get
from headmax.train.faults import DeviceLost
from tests.eval.conftest import FILES, make_model, rows
from tests.process import state

datasets = pytest.importorskip("datasets")
pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")
SOURCE = Source("abc", "float32", "cpu", "v0", 10)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}


def process(*command: object, **environment: str) -> subprocess.CompletedProcess:
    command = (sys.executable, *map(str, command))
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT | environment)


def test_stages_run_apart_and_give_what_they_give_together(headmax: Any, checkpoint: Path, data_dir: Path, tmp_path: Path) -> None:
    """The middle one with neither the harness nor the command line's packages."""
    asked = ["--tasks", "commonsense,squad_completion,niah_single_1_1k,mqar_8", "--data-dir", data_dir, "--limit", 4]
    code, _, errors = headmax("eval", checkpoint, *asked, "--work", tmp_path / "a", "--out", tmp_path / "a.jsonl", "--device", "cpu")
    assert code == 0, errors
    apart = ["eval", checkpoint, *asked, "--work", tmp_path / "b", "--out", tmp_path / "b.jsonl", "--stage"]
    assert headmax(*apart, "requests")[0] == 0
    extras = dict.fromkeys(["lm_eval", "datasets", "evaluate", "wonderwords", "rich", "tyro"])
    arguments = ["x", str(checkpoint), str(tmp_path / "b"), "--device", "cpu", "--batch-tokens", "300"]
    run_score = "runpy.run_module('headmax.eval.score', run_name='__main__')"
    done = process("-c", f"import sys, runpy; sys.modules.update({extras}); sys.argv = {arguments}; {run_score}")
    assert done.returncode == 0, done.stderr
    code, output, errors = headmax(*apart, "metrics")
    assert code == 0, errors
    one, two = (list(records.read(tmp_path / f"{name}.jsonl")) for name in "ab")
    assert {record.case for record in one} == {*COMMONSENSE, "squad_completion", "niah_single_1_1k", "mqar_8"}
    for a, b in zip(one, two, strict=True):
        assert (a.case, a.metric, a.unit) == (b.case, b.metric, b.unit)
        assert a.value == pytest.approx(b.value, rel=1e-4)
        assert {"stderr", "n", "checkpoint", "cut", "limit", "max_length"} <= set(a.extra)
        assert a.extra["n"] == 4
        assert a.case in output
    needles = {record.metric: record for record in one if record.case == "niah_single_1_1k"}
    assert set(needles) == {"acc", "answer_logprob"}
    assert needles["answer_logprob"].value < 0
    (recall,) = (record for record in one if record.case == "mqar_8")
    assert recall.extra["pairs"] == 8
    assert recall.extra["state_bytes"] > 0


def test_a_killed_run_goes_on_where_it_was(headmax: Any, checkpoint: Path, data_dir: Path, tmp_path: Path) -> None:
    asked = ["eval", checkpoint, "--tasks", "lambada_openai,hellaswag", "--data-dir", data_dir, "--work", tmp_path, "--device", "cpu"]
    assert headmax(*asked, "--stage", "requests")[0] == 0
    command = [sys.executable, "-m", "headmax.eval.score", str(checkpoint), str(tmp_path), "--device", "cpu", "--batch-tokens", "30"]
    scores = tmp_path / "scores.jsonl"
    running = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)  # tiny batches: there is time to kill it
    while not scores.exists() or scores.read_bytes().count(b"\n") < 30:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    before = ScoreFile(scores)
    kept = scores.read_bytes()[: before.complete_bytes]
    total = {request.id for task in requests.read(tmp_path / "requests.jsonl").values() for request in task}
    assert 20 < len(before.scores) < len(total)
    with scores.open("ab") as file:
        file.write(b'{"id": "0123", "logp')  # and a line torn in the middle
    assert headmax(*asked)[0] == 0
    assert scores.read_bytes().startswith(kept)
    assert set(ScoreFile(scores).scores) == total
    assert scores.read_bytes().count(b"\n") == len(total) + 1  # nothing was scored twice
    size = scores.stat().st_size
    assert headmax(*asked)[0] == 0
    assert scores.stat().st_size == size


def test_scores_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    file = ScoreFile(tmp_path / "s.jsonl")
    file.begin(SOURCE)
    file.add([Score("1", -1.0, 2), Score("2", text="so", tokens=[3])])
    again = ScoreFile(tmp_path / "s.jsonl")
    assert again.scores == file.scores
    assert again.source == SOURCE
    with pytest.raises(ValueError, match=r"scores of another checkpoint or dtype \(abc\); this one is xyz"):
        again.begin(Source("xyz", "float32", "cpu", "v0", 10))
    (tmp_path / "s.jsonl").write_text('{"id": "1"}\n')
    with pytest.raises(ValueError, match=r"s\.jsonl:1: not a score: the first line must name the source"):
        ScoreFile(tmp_path / "s.jsonl")


def test_requests_survive_a_file_and_changes_are_noticed(tmp_path: Path) -> None:
    asked = {"a": [Request("loglikelihood", (1, 2), (3,), cut=4)], "b": [Request("generate", (1, 2), (), ("\n",), 9)]}
    path = tmp_path / "r.jsonl"
    requests.write(path, asked)
    assert requests.read(path) == asked
    assert requests.cut(asked["a"]) == {"requests": 1, "tokens": 4}
    path.write_text(path.read_text().replace('"targets": [3]', '"targets": [5]'))
    with pytest.raises(ValueError, match=r"r\.jsonl:1: not a request: .* does not match its id"):
        requests.read(path)
    with pytest.raises(FileNotFoundError, match="make it with --stage requests"):
        requests.read(tmp_path / "none.jsonl")


BROKEN = {
    "piqa": ('{"goal": "a", "sol1": "b", "label": 0}\n', r"piqa\.valid\.jsonl:1: no column 'sol2', only 'goal', 'sol1', 'label'"),
    "hellaswag": ('{"query": "a", "choices": ["b"], "gold": 0}\n{"que', r"hellaswag\.val\.jsonl:2: Unterminated string"),
    "winogrande": ("", r"winogrande_xl\.dev\.jsonl: no rows"),
    "arc_easy": (
        '{"question": "a", "choices": ["b", "c"], "gold": 2}',
        r"arc_easy\.test\.jsonl:1: column 'gold' must name one of the 2 choices",
    ),
    "arc_challenge": (
        '{"question": "a", "choices": "b", "gold": 0}',
        r"arc_challenge\.test\.jsonl:1: column 'choices' must be list, got 'b'",
    ),
    "lambada_openai": ("[1]", r"lambada_openai\.test\.jsonl:1: a row must be a JSON object, got list"),
}


def test_broken_tasks_are_named_and_the_others_saved(headmax: Any, checkpoint: Path, tmp_path: Path) -> None:
    for task, (text, _) in BROKEN.items():
        (tmp_path / FILES[task]).write_text(text)
    (tmp_path / FILES["swde"]).write_text("".join(json.dumps(row) + "\n" for row in rows("swde", 3)))
    out = tmp_path / "r.jsonl"
    tasks = ",".join(["pica", *BROKEN, "fda", "mqar_4", "swde", "mqar_999"])
    asked = ["eval", checkpoint, "--tasks", tasks, "--data-dir", tmp_path, "--work", tmp_path / "w", "--out", out, "--device", "cpu"]
    code, _, errors = headmax(*asked)
    assert code == 2
    lines = [line for line in errors.splitlines() if line.startswith("headmax: ")]
    assert lines[0] == "headmax: unknown task 'pica'; did you mean 'piqa'?"
    assert lines[1].startswith("headmax: unknown task 'mqar_999'; did you mean 'mqar_")
    for task, (_, said) in BROKEN.items():
        (line,) = (line for line in lines if line.startswith(f"headmax: task {task}: "))
        assert re.search(said, line)
    assert any("task fda: " in line and "no fda.jsonl or based-fda.jsonl, plain or as .xz" in line for line in lines)
    assert len(lines) == len(BROKEN) + 3
    assert {record.case for record in records.read(out)} == {"mqar_4", "swde"}


def test_without_a_network_the_hub_is_one_clear_line(
    headmax: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    code, _, errors = headmax("eval", checkpoint, "--tasks", "piqa,niah_single_2_1k,mqar_4", "--work", tmp_path, "--limit", 2)
    assert code == 2
    piqa, needles = (line for line in errors.splitlines() if line.startswith("headmax: "))
    assert piqa.startswith("headmax: task piqa: cannot be loaded from the hub (ConnectionError: no route to the hub); give its files with")
    assert needles.startswith("headmax: task niah_single_2_1k: haystack baber/paul_graham_essays cannot be loaded from the hub")
    assert (tmp_path / "records.jsonl").read_text().count("\n") == 1


def hub_row(task: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the task's file as the hub has it."""
    if task == "hellaswag":
        label, _, context = row["query"].partition(": ")
        whole, _, fragment = context.rpartition(". ")
        return {"activity_label": label, "ctx_a": f"{whole}.", "ctx_b": fragment, "endings": row["choices"], "label": str(row["gold"])}
    if task.startswith("arc"):
        names = [str(n + 1) for n in range(len(row["choices"]))]
        return {"question": row["question"], "choices": {"text": row["choices"], "label": names}, "answerKey": names[row["gold"]]}
    return row


def test_the_hub_s_rows_ask_the_same(tokenizer: PreTrainedTokenizerFast, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_model("gla").config
    tasks = [task for task in FILES if task != "squad_subset"]
    here = Evaluation(config, tokenizer, Settings(data_dir, limit=3))
    there = Evaluation(config, tokenizer, Settings(None, limit=3))
    for task in tasks:
        lines = [json.loads(line) for line in (data_dir / FILES[task]).read_text().splitlines()]
        data = datasets.Dataset.from_list([hub_row(task, line) for line in lines])
        whole = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), data))
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, whole=whole, **__: whole)
        asked = there.requests([task], lambda _: None)
        assert not there.failures
        assert asked == here.requests([task], lambda _: None)
        scores = {request.id: Score(request.id, -1.0 / (1 + n), 0, "text") for n, request in enumerate(asked[task])}
        assert there.metrics([task], scores, lambda _: None) == here.metrics([task], scores, lambda _: None)
    assert not here.failures


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--tasks", ","], "--tasks names no task"),
        (["--stage", "metrics"], "requests.jsonl: no such file; make it with --stage requests"),
        (["--device", "tpu"], "--device tpu: this machine has cpu"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, headmax: Any, checkpoint: Path, data_dir: Path, tmp_path: Path) -> None:
    code, _, errors = headmax("eval", checkpoint, "--tasks", "piqa", "--data-dir", data_dir, "--work", tmp_path, *arguments)
    assert code == 2
    (line,) = errors.splitlines()
    assert said in line


def test_a_task_that_cannot_be_scored_is_named_and_the_others_scored(tmp_path: Path) -> None:
    asked = {"foreign": [Request("loglikelihood", (1, 400), (2,))], "texts": [Request("generate", (1,), (), (), 3)]}
    asked["known"] = [Request("loglikelihood", (1,), (2,))]
    file = ScoreFile(tmp_path / "s.jsonl")
    failures = score(Scorer(make_model("gla")), asked, file, lambda *_: None)
    assert len(failures) == 2
    assert failures[0].startswith("task foreign: token 400 exceeds the model's vocabulary of 400")
    assert failures[1].startswith("task texts: generating text needs a tokenizer")
    assert set(file.scores) == {request.id for request in asked["known"]}


class FailingScorer:
    """On a GPU, as it were: its second batch fails, and with it every later call, unless it was only memory that lacked."""

    def __init__(self, scorer: Scorer, error: str, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scorer, self.source, self.error, self.lost, self.calls = scorer, scorer.source, error, lost, 0
        self.model, self.ranks = SimpleNamespace(device=torch.device("cuda")), 1
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def synchronize(self, device: torch.device) -> None:
        if self.lost:
            raise RuntimeError(self.error)

    def __call__(self, asked: Iterable[Request]) -> Iterator[list[Score]]:
        self.calls += 1
        if self.calls == 2 or (self.lost and self.calls > 2):
            raise RuntimeError(self.error)
        yield from self.scorer(asked)


def test_a_gpu_that_fails_for_good_ends_the_run_and_keeps_its_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, path = Scorer(make_model("gla")), tmp_path / "s.jsonl"
    asked = {name: [Request("loglikelihood", (1, n), (2,))] for n, name in enumerate(("first", "second", "third"))}
    error = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
    failing = FailingScorer(scorer, error, True, monkeypatch)
    with pytest.raises(DeviceLost) as lost:
        score(failing, asked, ScoreFile(path), lambda *_: None)
    line = "task second: CUDA error: an illegal memory access was encountered; completed work is saved, rerun to resume"
    assert explain(lost.value) == (1, line)
    assert failing.calls == 2
    kept = ScoreFile(path)
    assert set(kept.scores) == {asked["first"][0].id}
    assert score(scorer, asked, kept, lambda *_: None) == []
    assert len(ScoreFile(path).scores) == 3


def test_a_lack_of_memory_costs_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {name: [Request("loglikelihood", (1, n), (2,))] for n, name in enumerate(("first", "second", "third"))}
    failing, file = FailingScorer(Scorer(make_model("gla")), "CUDA out of memory.", False, monkeypatch), ScoreFile(tmp_path / "s.jsonl")
    assert score(failing, asked, file, lambda *_: None) == ["task second: CUDA out of memory."]
    assert set(file.scores) == {asked[name][0].id for name in ("first", "third")}


def test_the_process_stays_as_it_was(tokenizer: PreTrainedTokenizerFast, data_dir: Path) -> None:
    """The harness's log levels, its templates, and a variable that keeps it from forking."""
    from lm_eval.utils import env

    evaluation = Evaluation(make_model("gla").config, tokenizer, Settings(data_dir, limit=2))
    before, from_string = state(), env.from_string
    asked = evaluation.requests(["piqa"], lambda _: None)
    scores = {request.id: Score(request.id, -1.0, 1) for request in asked["piqa"]}
    assert evaluation.metrics(["piqa"], scores, lambda _: None)["piqa"], evaluation.failures
    assert state() == before
    assert env.from_string == from_string


def test_lengths_too_short_to_read_are_refused(tokenizer: PreTrainedTokenizerFast, data_dir: Path) -> None:
    evaluation = Evaluation(make_model("gla").config, tokenizer, Settings(data_dir, limit=3, max_length=40))
    assert set(evaluation.requests(["piqa", "swde"], lambda _: None)) == {"piqa"}
    assert evaluation.failures == ["task swde: max_length 40 leaves no room for a context besides 48 generated tokens"]


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json there"):
        run(Place(tmp_path, tmp_path, tmp_path), "piqa", Settings(), "all", None, None, None, 100)


def copying(tokenizer: PreTrainedTokenizerFast, request: Request, silent: bool) -> Score:
    if request.kind == "loglikelihood":
        return Score(request.id, -1.0, 0)
    needle = re.search(r"One of the special magic \w+s for .+? is: (\S+)\.", tokenizer.decode(request.context))
    assert needle
    return Score(request.id, text="" if silent else f" {needle.group(1)}.", tokens=[])


@pytest.mark.parametrize("silent", [False, True])
def test_copying_the_needle_scores_all_and_silence_nothing(silent: bool, tokenizer: PreTrainedTokenizerFast, data_dir: Path) -> None:
    evaluation = Evaluation(make_model("gla").config, tokenizer, Settings(data_dir, limit=4, haystack=str(data_dir / "prose.txt")))
    tasks = [name for name, (_, length) in NIAH.items() if length <= 2048]
    asked = evaluation.requests(tasks, lambda _: None)
    assert not evaluation.failures
    scores = {request.id: copying(tokenizer, request, silent) for task in asked.values() for request in task}
    for task, metrics in evaluation.metrics(tasks, scores, lambda _: None).items():
        assert metrics[0].value == (0.0 if silent else 1.0)
        assert all(len(request.context) + request.max_new_tokens <= NIAH[task][1] for request in asked[task])
    assert not evaluation.failures


def test_recall_metrics() -> None:
    evaluation = Evaluation(make_model("gla", 64).config, None, Settings(limit=10))
    asked = evaluation.requests(["mqar_8"], lambda _: None)["mqar_8"]
    scores = {request.id: Score(request.id, -1.0, 8 if n % 2 else 4) for n, request in enumerate(asked)}
    (metric,) = evaluation.metrics(["mqar_8"], scores, lambda _: None)["mqar_8"]
    assert metric.value == 0.75
    assert metric.stderr == pytest.approx(0.25 / 9**0.5)
    assert evaluation.requests(["piqa"], lambda _: None) == {}
    assert "tasks with texts need a tokenizer" in evaluation.failures[-1]


def test_names() -> None:
    assert expand("commonsense", 64)[0] == list(COMMONSENSE)
    assert expand("mqar", 64)[0] == ["mqar_4", "mqar_8", "mqar_16", "mqar_32"]
    assert expand("niah,niah_single_1_1k", 64)[0] == list(NIAH)
    assert expand("mqar_256,hellaswg", 64) == (["mqar_256"], ["unknown task 'hellaswg'; did you mean 'hellaswag'?"])
    assert len(MQAR) == 7
    assert model_name(get("softmax-gla-340m").model, "x") == "softmax-gla-340m"
    assert model_name(make_model("gla").config, "x") == "x"


@pytest.mark.parametrize(("module", "model"), [("headmax.eval.lm_eval", "headmax"), pytest.param("lm_eval", "hf", marks=pytest.mark.slow)])
def test_the_harness_s_own_command_line(
    module: str, model: str, checkpoint: Path, data_dir: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A task of its own on a file: the accuracy and the standard error that our stages give, with our adapter and with the harness's, in a
    process where nobody has imported headmax."""
    task = f"""
task: local_piqa
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data_dir / FILES["piqa"]}}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "Question: {{{{goal}}}}\\nAnswer:"
doc_to_target: label
doc_to_choice: "{{{{[sol1, sol2]}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    (tmp_path / "local_piqa.yaml").write_text(task)
    settings = f"pretrained={checkpoint},dtype=float32" + (",trust_remote_code=True" if model == "hf" else "")
    options = ["--model", model, "--model_args", settings, "--tasks", "local_piqa"]  # on whichever device there is
    options += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    done = process("-m", module, *options, HF_DATASETS_CACHE=str(tmp_path), HF_HOME=str(tmp_path / "hub"))
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "out").rglob("results*.json")
    theirs = json.loads(file.read_text())["results"]["local_piqa"]
    evaluation = Evaluation(make_model("gla").config, tokenizer, Settings(data_dir))
    asked = evaluation.requests(["piqa"], lambda _: None)["piqa"]
    scores = Scorer(make_model("gla")).answers(asked)
    ours = evaluation.metrics(["piqa"], scores, lambda _: None)["piqa"][0]
    assert (ours.name, ours.value, ours.stderr) == ("acc", theirs["acc,none"], theirs["acc_stderr,none"])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["gla", "hybrid"])
def test_processes_share_the_requests(name: str, tokenizer: PreTrainedTokenizerFast, data_dir: Path, tmp_path: Path) -> None:
    """The same scores as one process, each once; what a process that died had done is kept."""
    make_model(name).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = [tmp_path / "model", "--tasks", "piqa,squad_completion,mqar_8,nonsense", "--data-dir", data_dir, "--limit", 40]
    asked += ["--batch-tokens", 400, "--device", "cpu"]
    one, three = ([*asked, "--work", tmp_path / work, "--out", tmp_path / f"{work}.jsonl"] for work in ("one", "three"))
    assert process("-m", "headmax", "eval", *one).returncode == 2
    expected = ScoreFile(tmp_path / "one" / "scores.jsonl")
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "records.jsonl").touch()
    left = ScoreFile(tmp_path / "three" / "scores-7.jsonl")  # of eight processes that were killed
    left.begin(expected.source)
    left.add(list(expected.scores.values())[:9])
    done = process("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3, "-m", "headmax", "eval", *three)
    assert done.stderr.count("headmax: unknown task 'nonsense'") == 1, done.stderr
    found = (tmp_path / "three" / "scores.jsonl").read_bytes()
    assert found.count(b"\n") == len(expected.scores) + 1
    assert not list((tmp_path / "three").glob("scores-*"))
    assert ScoreFile(tmp_path / "three" / "scores.jsonl").scores.keys() == expected.scores.keys()
    alone, shared = ([(r.case, r.metric, r.value) for r in records.read(tmp_path / f"{work}.jsonl")] for work in ("one", "three"))
    assert [row[:2] for row in alone] == [row[:2] for row in shared]
    assert [row[2] for row in shared] == pytest.approx([row[2] for row in alone], rel=1e-5)
