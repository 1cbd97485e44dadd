"""A list of runs, done in goes: stopped by time, gone on with, and never twice."""

import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headmax import HeadmaxForCausalLM, records
from headmax.data.shards import Index
from headmax.eval import requests
from headmax.eval.requests import Request
from headmax.records import Recorder
from headmax.train.faults import TrainingError
from lab.study import run as module
from lab.study import runs
from lab.study.needles import NeedleRows
from lab.study.run import Clock, OutOfTime, chosen, execute
from lab.study.runs import KINDS, LINEAR, PARTS, RATES, SEEDS, Run
from lab.study.score import READ, Scorer, read_scores
from tests.command_line import Called


def test_the_list_of_runs() -> None:
    language = runs.runs(["language"])
    assert len(language) == 3 * 5 * 3 + 1
    assert [run.seed for run in language] == sorted(run.seed for run in language), "all of one seed before the next"
    assert {(run.backbone, run.variant) for run in language} >= {(b, v) for b in LINEAR for v in (*KINDS, "uniform-read-after")}
    assert all(run.examined == "whole" for run in language)
    assert set(language) & set(runs.runs(["placement"])) == {Run("gla", variant, seed=seed) for variant in KINDS for seed in SEEDS}
    short = set(runs.runs(["heads", "scaling", "after"]))
    assert {run.steps for run in short} == {runs.SHORT}
    assert short >= {run.twin for run in short}, "plain models of their own"
    assert {run.examined for run in short} == {"not"}
    names = [(run.name, run.seed, run.steps) for run in runs.runs(list(PARTS))]
    assert len(set(names)) == len(names), "a name tells a run"


def test_controls_have_the_softmax_gates_mean_and_place() -> None:
    for name, gate in runs.VARIANTS.items():
        if gate is not None:
            assert gate.scale == 1.0
            assert (gate.read_position == "after_norm") == name.endswith("after")
            assert name.startswith(gate.kind)
            assert gate.write == ("read" not in name)


def test_sizes_are_what_the_page_says() -> None:
    for backbone in LINEAR:
        model = Run(backbone).model(32_000)
        assert model.num_heads == 4
        with torch.device("meta"):
            assert model.build_mixer(model.mixers[0]).output_norm.norm.eps == 1e-6
    with torch.device("meta"):
        counts = {b: sum(p.numel() for p in HeadmaxForCausalLM(Run(b).model(32_000)).model.layers.parameters()) for b in LINEAR}
        heads = {n: sum(p.numel() for p in HeadmaxForCausalLM(Run("gla", heads=n).model(32_000)).parameters()) for n in runs.HEADS}
    assert all(19e6 < count < 31e6 for count in counts.values()), counts
    assert max(heads.values()) / min(heads.values()) < 1.001, "fixed parameters whatever the number of heads"


@pytest.fixture
def prepared(data: Path) -> Path:
    """The folder with a few requests and needles, made by hand."""
    vocab = Index.read(data).vocab_size
    asked = {
        "wikitext": [Request("loglikelihood", (0,), tuple(range(5, 90)))],
        "niah_single_1_1k": [Request("loglikelihood", tuple(range(30)), (7, 8)), Request("generate", tuple(range(30)), (), (), 4)],
    }
    requests.write(data / "requests.jsonl", asked)
    rows = np.random.default_rng(0).integers(0, vocab, (4, runs.LENGTH))
    np.savez_compressed(data / "needles.npz", tokens=rows.astype(np.uint16), answers=rows % 7 == 0)
    return data


def go(part: str, data: Path | None, out: Path, budget: float = float("inf"), share: tuple[int, int] = (0, 1)) -> tuple[int, list[str]]:
    said: list[str] = []
    left = execute([part], data=data, out=out, budget=budget, share=share, device="cpu", say=said.append)
    return left, said


@pytest.mark.usefixtures("small")
def test_learning_rates_come_first(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="0 of 2 learning rates were tried with gla; run rates first"):
        go("language", prepared, tmp_path)
    monkeypatch.setitem(runs.PARTS, "rates", lambda seed: Run("gla", size="1x32").rates() if seed == 0 else [])
    assert go("rates", prepared, tmp_path)[0] == 0
    found = list(records.read(tmp_path / "records.jsonl"))
    losses = {r.extra["run"]["lr"]: r.value for r in found if r.metric == "validation loss"}
    assert len(losses) == 2
    assert chosen(Run("gla", size="1x32"), found) == min(losses, key=lambda lr: losses[lr])


@pytest.mark.usefixtures("small")
def test_a_part_in_goes(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    make = Recorder("reproduction", "cpu")
    for lr, loss in ((1e-3, 3.0), (1e-2, 2.0)):
        rate = replace(Run("gla", size="1x32").rates()[0], lr=lr)
        made = [make(rate.name, "headmax", metric, loss, "", 0, run=asdict(rate)) for metric in ("validation loss", "seconds")]
        records.append(out / "records.jsonl", made)
    assert go("language", prepared, out, budget=0)[0] == 4, "no time, no run"
    with monkeypatch.context() as patch:  # the second run would take too long
        patch.setattr(Clock, "expects", lambda self, run, *_: 0.0 if run == Run("gla", size="1x32", steps=12) else 1e9)
        assert go("language", prepared, out, budget=600)[0] == 3
    assert go("language", prepared, out, share=(1, 2))[0] == 0
    assert go("language", prepared, out)[0] == 0
    found = [r for r in records.read(out / "records.jsonl") if r.extra["run"]["lr"] is None]
    by_run: dict[tuple[str, Any], dict[str, records.Record]] = {}
    for record in found:
        assert record.metric not in by_run.setdefault((record.case, record.seed), {}), "each run once"
        by_run[record.case, record.seed][record.metric] = record
    assert set(by_run) == {(case, seed) for case in ("gla-1x32", "softmax-gla-1x32") for seed in (0, 1)}
    for (case, _), metrics in by_run.items():
        expected = {"validation loss", "training loss", "loss spikes", "gradient peaks", "largest gradient norm", "skipped steps"}
        expected |= {"seconds", "requests answered", "needle training loss", "needles answered"}
        assert set(metrics) == expected | ({"gate entropy", "dead heads", "kind of token tells winner"} if "softmax" in case else set())
        assert metrics["validation loss"].extra["lr"] == 1e-2
        assert metrics["training loss"].extra["curve"][-1][0] == 12 * 128 == metrics["validation loss"].extra["tokens"]
    assert set(by_run["softmax-gla-1x32", 0]["gate entropy"].extra["gates"]) == {"0/read", "0/write"}
    won = by_run["softmax-gla-1x32", 0]["kind of token tells winner"]
    assert set(won.extra["gates"]) == {"0/read", "0/write"}
    assert sum(map(sum, won.extra["gates"]["0/read"]["kinds"])) == pytest.approx(READ * runs.LENGTH, rel=0.01), "few ties"
    assert won.value >= 0.0
    assert set(won.extra["untrained"]) == {"0/read", "0/write"}

    asked = requests.read(prepared / "requests.jsonl")
    scores = {(s.run.name, s.run.seed, s.tuned): s.by_id for s in read_scores(out / "scores.jsonl.gz", asked)}
    assert len(scores) == 8
    assert all(len(by_id) == (2 if tuned else 3) for (_, _, tuned), by_id in scores.items())
    before, after = (scores["gla-1x32", 0, tuned] for tuned in (False, True))
    assert any(before[id].logprob != after[id].logprob for id in after), "needles teach something"
    torn = tmp_path / "torn.gz"
    torn.write_bytes((out / "scores.jsonl.gz").read_bytes()[:-20])
    assert len(list(read_scores(torn, asked))) == 7, "what a killed process left unfinished is no answer"
    with pytest.raises(ValueError, match="answers to other requests of wikitext"):
        list(read_scores(out / "scores.jsonl.gz", asked | {"wikitext": asked["niah_single_1_1k"]}))

    _, said = go("language", prepared, out)
    assert said == ["4 of 4 runs are recorded already"]


@pytest.mark.usefixtures("small")
def test_recall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Run("gla", kind, "1x32", 2, 0, 3, lr=1e-2, pairs=4) for kind in KINDS]
    monkeypatch.setitem(runs.PARTS, "recall", lambda seed: asked if seed == 0 else [])
    assert go("recall", None, tmp_path)[0] == 0
    found = {(r.extra["run"]["variant"], r.metric): r.value for r in records.read(tmp_path / "records.jsonl")}
    assert all(0 <= found[kind, "mean accuracy over training"] <= 1 for kind in KINDS)


@pytest.mark.usefixtures("small")
def test_a_run_that_fails_is_a_result(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: Any) -> None:
        raise TrainingError("stopped at step 3")

    monkeypatch.setattr(module, "train", diverge)
    monkeypatch.setitem(runs.PARTS, "rates", lambda seed: Run("gla", size="1x32").rates() if seed == 0 else [])
    assert go("rates", prepared, tmp_path)[0] == 0
    found = list(records.read(tmp_path / "records.jsonl"))
    assert [(r.metric, r.extra.get("error")) for r in found] == [("failed", "stopped at step 3"), ("seconds", None)] * 2
    assert chosen(Run("gla", size="1x32"), found) == 1e-3


@pytest.mark.usefixtures("small")
def test_what_breaks_off_is_left_for_another_time(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runs.PARTS, "language", lambda seed: [Run("gla", "softmax", "1x32", seed=seed, steps=2, lr=1e-3)])
    monkeypatch.setattr(Run, "examined", "whole")
    train = module.train

    def first_breaks(run: Run, *others: Any) -> HeadmaxForCausalLM:
        if run.seed == 0:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return train(run, *others)

    def no_needles(self: Scorer, asked: Any) -> Any:
        if next(iter(asked)).context[1:]:
            raise RuntimeError("CUDA out of memory")
        return answers(self, asked)

    answers = Scorer.__call__
    with monkeypatch.context() as patch:
        patch.setattr(module, "train", first_breaks)
        patch.setattr(Scorer, "__call__", no_needles)
        left, said = go("language", prepared, tmp_path)
    assert left == 1
    assert "softmax-gla-1x32-lr0.001 seed 0 broke off" in said[1]
    assert "unspecified launch failure" in said[1]
    assert "task niah_single_1_1k: CUDA out of memory" in said[2]
    asked = requests.read(prepared / "requests.jsonl")
    assert [(s.run.seed, s.tuned, len(s.by_id)) for s in read_scores(tmp_path / "scores.jsonl.gz", asked)] == [(1, False, 1), (1, True, 0)]
    assert go("language", prepared, tmp_path)[0] == 0
    assert {r.seed for r in records.read(tmp_path / "records.jsonl") if r.metric == "seconds"} == {0, 1}


KILLED = """
import sys
from pathlib import Path
import torch
from lab.study import run, runs
from lab.study.runs import Run
torch.set_num_threads(1)
runs.PARTS["recall"] = lambda seed: [Run("gla", "softmax", "1x32", 2, seed, 60, lr=1e-2, pairs=4)]
run.execute(["recall"], data=None, out=Path(sys.argv[1]), budget=1e9, share=(0, 1), device="cpu", say=print)
"""


@pytest.mark.usefixtures("small")
def test_a_killed_process_keeps_what_it_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "records.jsonl"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.DEVNULL)
    while not file.exists() or not file.read_text().endswith("\n"):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = list(records.read(file))
    assert {r.seed for r in before if r.metric == "seconds"} == {0}
    monkeypatch.setitem(runs.PARTS, "recall", lambda seed: [Run("gla", "softmax", "1x32", 2, seed, 60, lr=1e-2, pairs=4)])
    left, said = go("recall", None, tmp_path)
    assert (left, said[0]) == (0, "1 of 2 runs are recorded already")
    after = list(records.read(file))
    assert after[: len(before)] == before
    assert {r.seed for r in after[len(before) :]} == {1}


def test_shares_take_every_run_once_and_a_model_with_all_its_seeds() -> None:
    wanted = runs.runs(["language", "heads"])
    shares = [module.shared(wanted, n, 3) for n in range(3)]
    assert sorted(map(repr, wanted)) == sorted(repr(run) for share in shares for run in share)
    assert max(map(len, shares)) - min(map(len, shares)) <= 3
    models = [{run.name for run in share} for share in shares]
    assert not (models[0] & models[1] | models[1] & models[2] | models[0] & models[2])
    rates = [module.shared(runs.runs(["rates"]), n, 4) for n in range(4)]
    tried = [{(run.backbone, run.variant) for run in share} for share in rates]
    assert [len(share) for share in rates] == [len(RATES["text"]) * len(models) for models in tried], (
        "one process tries all rates of a model"
    )
    for share in shares:
        assert [run.seed for run in share] == sorted(run.seed for run in share), "all of one seed before the next"


def test_bad_arguments_give_one_clear_line(tmp_path: Path, lab: Called) -> None:
    for arguments, said in (
        (("recall", "--out", str(tmp_path), "--share", "2/2"), "--share must be i/n with i below n, such as 0/4, got 2/2"),
        (("rates", "--out", str(tmp_path)), "--data must name a folder that `python -m lab prepare` completed"),
    ):
        done = lab("run", *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert said in done.stderr


def test_a_run_whose_end_is_out_of_reach_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    show = Clock(budget=100.0, begun=0.0).watch(steps=1000)
    for step in range(1, 7):  # slow as it compiles
        now[0] += 5.0
        show({"step": step})
    now[0] += 0.2
    with pytest.raises(OutOfTime):
        show({"step": 7})


def test_expected_time_is_that_of_another_seed() -> None:
    make = Recorder("reproduction", "cpu")
    done = [
        make("", "headmax", "seconds", value, "s", run=asdict(run))
        for run, value in ((Run("gla"), 20.0), (Run("retnet", steps=runs.STEPS // 8), 8.0))
    ]
    assert Clock(1).expects(Run("gla", seed=2), done, make.device) == pytest.approx(22.0)
    assert Clock(1).expects(Run("gdn"), done, make.device) == pytest.approx(1.1 * (20 + 64) / 2)
    assert Clock(1).expects(Run("gla", seed=2), done, "another") == 0.0


def test_needle_rows_label_answers_alone(data: Path, tmp_path: Path) -> None:
    tokens = np.arange(12, dtype=np.uint16).reshape(2, 6)
    np.savez_compressed(tmp_path / "needles.npz", tokens=tokens, answers=tokens % 3 == 0)
    batch = NeedleRows(tmp_path / "needles.npz").batch(range(1, 3))
    assert batch.input_ids.tolist() == tokens[[1, 0]].tolist()
    assert batch.labels.tolist() == [[6, -100, -100, 9, -100, -100], [0, -100, -100, 3, -100, -100]]


def test_runs_of_other_tokens_are_not_compared() -> None:
    assert runs.comparable(Run("gla", "softmax", seed=1), Run("gla", seed=1)) == (Run("gla", "softmax", seed=1), Run("gla", seed=1))
    short = [Run("gdn", variant, steps=runs.SHORT) for variant in ("softmax-after", "plain")]
    assert list(runs.comparable(*(replace(run, steps=runs.STEPS) for run in short))) == short
    never = Run("gdn", "softmax-after", norm_eps=1e-5), Run("gdn")
    assert runs.comparable(*never) == never
