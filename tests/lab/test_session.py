"""The study's own path, in small: texts to pieces, pieces to models, models to records; interrupted and resumed."""

import math
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from headmax import records
from headmax.data.prepare import PrepareConfig
from headmax.eval import names
from lab import ROOT
from lab.study import corpus, needles, trials
from lab.study.session import Clock, Options, Session, recorded
from lab.study.trials import RATES, ROWS, STARTS, TUNING_SEED, Trial
from tests.eval.conftest import sentence


def made_up(trial: Trial) -> float:
    """A loss for every trial: 2e-3 is best, and 4e-3 for the softmax of GLA with 16 heads; the start is "1/4-1"."""
    best = 4e-3 if (trial.gates, trial.heads, trial.backbone) == ("softmax", 16, "gla") else 2e-3
    return 3 + abs(math.log(trial.rate / best)) + (trial.start != "1/4-1") * 0.1 + trial.seed * 1e-3


def in_order() -> list[Trial]:
    """All language models as a session meets them, each recorded before the next is asked for."""
    done: dict[Trial, float] = {}
    while (trial := next((one for one in trials.language(done) if one not in done), None)) is not None:
        done[trial] = made_up(trial)
    return list(done)


def test_trials_come_in_the_plans_order() -> None:
    order = in_order()
    assert order[:2] == trials.noise_trials()
    assert order[2:7] == trials.start_trials()
    rates, rest = order[7:14], order[14:]
    assert {trial.seed for trial in rates} == {TUNING_SEED}
    assert [(trial.gates, trial.rate) for trial in rates] == [*(("uniform", r) for r in RATES), *(("softmax", r) for r in (*RATES, 8e-3))]
    primary = rest[:16]
    assert [(trial.seed, trial.gates) for trial in primary] == [(seed, gates) for seed in range(8) for gates in ("uniform", "softmax")]
    assert {(trial.start, trial.gates, trial.rate) for trial in primary} == {("1/4-1", "uniform", 2e-3), ("1/4-1", "softmax", 4e-3)}
    full = [trial for trial in order if trial.steps is None]
    counted = {(row.backbone, row.heads, row.start, gates): n for row in ROWS for gates, n in row.seeds.items()}
    for (backbone, heads, start, gates), number in counted.items():
        name = "1/4-1" if start == trials.SCALED else start
        same = [t for t in full if (t.backbone, t.heads, t.start, t.gates) == (backbone, heads, name, gates)]
        assert [trial.seed for trial in same] == list(range(number))
    assert all(trial.examined for trial in full)
    assert len({trial.name for trial in order}) == len(order)


def test_recall_is_compared_where_the_plain_model_can_be_told_from_0_and_1() -> None:
    done = dict.fromkeys(trials.recall({}), 0.95)
    assert trials.measurable("gla", done) == []
    middle = [t for t in done if (t.backbone, t.pairs, t.heads) == ("gla", 32, 8)]
    done[middle[0]], done[middle[1]], done[middle[2]] = 0.4, 0.2, math.nan
    assert trials.measurable("gla", done) == [(32, 8)]
    assert {t.rate for t in trials.recall(done) if t not in done and t.seed != TUNING_SEED} == {RATES[0]}


def test_shares_are_all_of_it() -> None:
    done: dict[Trial, float] = {}
    while fresh := [trial for trial in trials.recall(done) if trial not in done]:
        done |= dict.fromkeys(fresh, 0.5)
    order = list(done)
    shares = [[trial for trial in order if Options(share=(i, 4)).mine(trial)] for i in range(4)]
    assert sorted(trial.name for share in shares for trial in share) == sorted(trial.name for trial in order)
    assert max(map(len, shares)) < 1.3 * len(order) / 4


def test_runs_of_a_seed_share_their_start() -> None:
    for start in STARTS:
        trial = Trial("gla", 16, "softmax", 0, 1e-3, start)
        assert trial.model(256).output_init == replace(trial, gates="plain").model(256).output_init
    assert Trial("gla", 16, "softmax", 0, 1e-3).model(256).head_gate == trials.GATES["softmax"]


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    """The same plan of models small enough for a processor."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink(monkeypatch)
        yield


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"LENGTH": 512, "BATCH": 2, "SHORT_STEPS": 2, "NEEDLE_STEPS": 2, "WARMUP_TOKENS": 2048, "SIZE": "1x32", "RECALL_STEPS": 3}
    for name, value in sizes.items():
        monkeypatch.setattr(trials, name, value)
    monkeypatch.setattr(needles, "LENGTHS", (448,))
    monkeypatch.setattr(names, "NIAH", {"niah_single_1_1k": (1, 640), "niah_single_2_1k": (2, 640)})
    monkeypatch.setattr(corpus, "NEEDLE_QUESTIONS", 2)


@pytest.fixture(scope="module")
def carried(small: None, tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast, eval_data: Path) -> Path:
    """The pieces that `python -m lab study data` makes."""
    folder = tmp_path_factory.mktemp("study")
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = random.Random(0)
    for name, documents in (("train", 40), ("valid", 20)):
        (folder / f"{name}.txt").write_text("\n<|doc|>\n".join(" ".join(sentence(rng, 20) for _ in range(40)) for _ in range(documents)))
    inputs = (str(folder / "train.txt"),), (str(folder / "valid.txt"),)
    config = PrepareConfig(*inputs, tokenizer=str(folder / "tokenizer"), document_token="<s>", max_tokens=12_000)
    corpus.build(config, eval_data / "squad_subset.jsonl", eval_data / "prose.txt", folder, lambda text: None)
    whole = sum(path.stat().st_size for path in (folder / corpus.CORPUS).iterdir())
    assert len(corpus.pack(folder, whole // 6, lambda text: None)) > 1
    return folder / corpus.PIECES


@pytest.fixture
def study_data(carried: Path, tmp_path: Path) -> Path:
    """A folder in which the pieces alone arrived."""
    shutil.copytree(carried, tmp_path / "there" / corpus.PIECES)
    return tmp_path / "there"


def session(data: Path | None, folder: Path, seconds: float = math.inf) -> Session:
    return Session(data, folder / "work", folder / "study.jsonl", "cpu", seconds, options=Options(), say=lambda text: None)


def test_pieces_make_the_corpus(study_data: Path) -> None:
    first = study_data / corpus.PIECES / "1"
    first.rename(study_data / "aside")
    with pytest.raises(FileNotFoundError, match="piece 1 is not here"):
        corpus.unpack(study_data)
    (study_data / "aside").rename(first)
    damaged = next(path for path in first.iterdir() if path.name != corpus.MANIFEST)
    before = damaged.read_bytes()
    other = next(path for path in (study_data / corpus.PIECES / "2").glob("*.xz"))
    damaged.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match="its checksum differs"):
        corpus.unpack(study_data)
    damaged.write_bytes(before)
    folder = corpus.unpack(study_data)
    assert corpus.unpack(study_data) == folder


def test_a_session_goes_on_where_it_was_stopped(study_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert session(study_data, tmp_path / "whole").run("language", most=1) == 1
    with monkeypatch.context() as patch:
        calls = iter(range(100))
        patch.setattr(Clock, "left", property(lambda self: 1e6 if next(calls) < 5 else 0.0))
        assert session(study_data, tmp_path / "parts").run("language", most=1) == 0
    assert not recorded(tmp_path / "parts" / "study.jsonl")
    folder = next((tmp_path / "parts" / "work").iterdir()) / "training"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) < 11
    assert session(study_data, tmp_path / "parts").run("language", most=1) == 1
    whole, parts = (list(records.read(tmp_path / name / "study.jsonl")) for name in ("whole", "parts"))
    assert len(whole) == len(parts) == 1
    for name in ("trial", "data", "curve", "right", "needle_loss", "norms", "points", "rate", "tokens"):
        assert whole[0].extra[name] == parts[0].extra[name]
    assert whole[0].value == parts[0].value
    assert not list((tmp_path / "parts" / "work").iterdir())


def test_records_say_what_was_run(study_data: Path, tmp_path: Path) -> None:
    assert session(study_data, tmp_path).run("language", most=8) == 8
    found = recorded(tmp_path / "study.jsonl")
    assert list(found) == [*trials.noise_trials(), *trials.start_trials(), list(found)[-1]]
    assert list(found)[-1].gates == "uniform"
    for trial, record in found.items():
        assert (record.suite, record.metric, record.seed) == ("study", "validation loss", trial.seed)
        assert {"index", "seed"} <= set(record.extra["data"])
        assert record.extra["rate"] == trial.rate
        assert record.extra["seconds"] > 0
        assert record.commit
        assert ("right" in record.extra) == trial.examined
        assert [len(point["rms"]) for point in record.extra["norms"]] == [1] * len(record.extra["points"])
    assert all(sum(asked for _, asked in record.extra["right"].values()) == 59 for t, record in found.items() if t.examined)
    assert "entropy" in found[list(found)[-1]].extra["points"][0]
    assert session(study_data, tmp_path, seconds=0).run("language") == 0


def test_two_seeds_too_far_apart_stop_the_study(study_data: Path, tmp_path: Path) -> None:
    assert session(study_data, tmp_path).run("language", most=1) == 1
    record = next(records.read(tmp_path / "study.jsonl"))
    other = replace(record, value=record.value * 1.05, extra=record.extra | {"trial": record.extra["trial"] | {"seed": 1}})
    records.append(tmp_path / "study.jsonl", [other])
    with pytest.raises(ValueError, match="two seeds differ by"):
        session(study_data, tmp_path).run("language")


@pytest.mark.usefixtures("small")
def test_recall_needs_no_data(tmp_path: Path) -> None:
    assert session(None, tmp_path).run("recall", most=2) == 2
    found = recorded(tmp_path / "study.jsonl")
    assert [(trial.pairs, trial.rate) for trial in found] == [(16, 1e-3), (16, 3e-3)]
    assert all(record.metric == "accuracy" for record in found.values())
    with pytest.raises(ValueError, match="--data must name a folder"):
        session(None, tmp_path).run("language")


ABSENT = ("lm_eval", "datasets", "wonderwords", "mistral_common", "sentencepiece", "matplotlib", "scipy", "fla", "accelerate", "uvicorn")


def test_a_session_needs_what_a_bare_machine_has() -> None:
    """torch, numpy, transformers, triton, einops and safetensors, and what the command line itself takes."""
    code = f"import sys; sys.modules |= dict.fromkeys({ABSENT}); import lab.study.session, lab.cli.study"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
