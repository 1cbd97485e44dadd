"""The page says what records say, and of what has none that it is missing."""

import math
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from headmax import HeadmaxForCausalLM, records
from headmax.records import Recorder
from lab import RESULTS, ROOT
from lab.pages import report
from lab.study.runs import PARTS, RATES, Run, runs
from lab.study.statistics import MISSING, Results, judge, recall_run, show
from tests.command_line import Called

EFFECT = {"plain": 0.0, "softmax": -0.10, "uniform": -0.10, "sigmoid": -0.05}
"""On the loss, whatever the backbone."""


def loss(run: Run) -> float:
    """Seeds and sizes differ; what variants do is the same for all seeds but for a little, and uniform does as much as softmax.

    Of learning rates the plain model is best at the smallest, others are best at 0.001.
    """
    wobble = 0.001 * ((run.seed * 7 + len(run.variant)) % 3)
    effect = EFFECT[run.variant.split("-")[0]] * (2 if run.heads == 16 else 1) + (
        0.02 if run.backbone == "gdn" and run.variant == "softmax" else 0
    )
    rate = 0.0 if run.lr is None else abs(run.lr - (0.0 if run.variant == "plain" else 1e-3))
    return 4.0 + 0.1 * run.seed - 0.01 * len(run.size) + effect + wobble + rate


MAKE = Recorder("reproduction", "cpu")


def made(run: Run) -> list[records.Record]:
    def record(metric: str, value: float, **extra: Any) -> records.Record:
        return MAKE(run.name, "headmax", metric, value, "", run.seed, run=asdict(run), **extra)

    gates = {f"{n}/{gate}": {"entropy": 0.9, "share": [0.4, 0.2, 0.2, 0.2], "dead": []} for n in range(6) for gate in ("read", "write")}
    accuracy = {"softmax": 0.8, "plain": 0.3}.get(run.variant, 0.8 - 0.1 * run.seed)
    found = [record("validation loss", loss(run), parameters=36_000_000), record("seconds", 30.0)]
    found += [record("accuracy", accuracy), record("mean accuracy over training", accuracy / 2)] if run.pairs else []
    found += [record("training loss", 4.0, curve=[[100, 5.0], [200, 4.0]]), record("loss spikes", run.seed), record("gradient peaks", 0)]
    found += [record("skipped steps", 0), record("largest gradient norm", 1.5), record("gate entropy", 0.9, gates=gates)]
    won = {"kinds": [[90, 0, 0, 10, 0], [0, 0, 0, 90, 0], [10, 0, 0, 0, 0], [0] * 5], "tokens": [["▁the"], ["|", "`"], [], []]}
    found += (
        [record("kind of token tells winner", 0.5, gates=dict.fromkeys(gates, won), untrained=dict.fromkeys(gates, 0.1))]
        if run.learns_gates
        else []
    )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of every run but the scaling part's largest models and one seed of RetNet."""
    folder = tmp_path_factory.mktemp("results")
    done = [
        run
        for run in runs(list(PARTS))
        if run.size != "10x768" and (run.backbone, run.variant, run.seed, run.pairs) != ("retnet", "softmax", 2, None)
    ]
    records.append(folder / "reproduction.jsonl", [record for run in done for record in made(run)])
    make = Recorder("eval", "cpu")
    for model, value in (("gla-6x512", 90.0), ("softmax-gla-6x512", 80.0), ("softmax-gla-6x512-needles", 70.0)):
        tuned, run = model.endswith("needles"), Run("gla", "softmax" if "softmax" in model else "plain")
        about = {"model": model, "stderr": 0.1, "n": 40, "limit": 40, "data": "noise sentence", "tuned": tuned, "run": asdict(run)}
        for task in (f"niah_single_{n}_{size}" for n in (1, 2, 3) for size in ("1k", "2k", "4k")):
            records.append(folder / "eval.jsonl", [make(task, "headmax", "answer_logprob", -value, "nats", **about)])
        records.append(folder / "eval.jsonl", [make("niah_single_1_1k", "headmax", "acc", value / 100, "fraction", **about)])
        if not tuned:
            records.append(
                folder / "eval.jsonl", [make("wikitext", "headmax", "word_perplexity", value, "perplexity", **about | {"limit": None})]
            )
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return report.render(Results(folder))


def row(page: str, start: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_verdicts(page: str) -> None:
    assert row(page, "The softmax over heads lowers the perplexity of GLA")[1:] == [
        "−9.5 ± 0.2 (−9.9 to −9.1) % of perplexity",
        "**held**, but not seen to be better than frozen gates",
    ]
    assert row(page, "GLA: it is the competition (softmax below uniform)")[2] == "no significant difference (0 of 3 seeds as claimed)"
    assert row(page, "GLA: it is the competition (softmax below sigmoid)")[2] == "**held**"
    assert row(page, "GDN: it is the competition (softmax below uniform)")[2] == "**the opposite**"
    assert row(page, "The softmax over heads lowers the perplexity of RetNet")[1].endswith("(n=2) % of perplexity")
    assert row(page, "The gain of Softmax GLA grows from 4 to 16 heads")[2] == "**held**"
    assert row(page, "Softmax GLA is better at 10x768")[1:] == [MISSING, MISSING]
    assert row(page, "Softmax GLA recalls more (MQAR, all settings)")[1:] == [
        "+0.500 ± 0.000 (+0.500 to +0.500) accuracy",
        "**held**, but not seen to be better than frozen gates",
    ]
    assert "2 of 3 seeds as claimed" in row(page, "GLA: more than uniform gates let it recall")[2]


def test_in_short(page: str) -> None:
    said = page[page.index("## In short") : page.index("## Setup")]
    assert "**Do gates help a language model?** Softmax less no gates: GLA −9.5 ± 0.2 (better); RetNet " in said
    assert "better than gates frozen at 1/H in\n0 of 3 backbones and worse in 1." in said
    assert "Softmax less uniform: GLA +0.0 ± 0.0 (no significant difference)" in said
    assert "GDN +2.0 ± 0.0 (worse)" in said
    assert "at the learning rate that is best without gates: GLA +0.500 ± 0.000 (better)" in said
    assert (
        "**And at the rate that is best for each?** Softmax less no gates, accuracy, 32 pairs, 4 heads: GLA +0.500 ± 0.000 (better)" in said
    )


def test_tables(page: str) -> None:
    expected = [math.exp(loss(Run("gla", seed=seed))) for seed in range(3)]
    shown = row(page[page.index("## Language modelling") :], "GLA")
    assert shown[1].startswith(f"{sum(expected) / 3:.2f} ± ")
    assert row(page[page.index("| per cent of perplexity") :], "GLA")[1] == "−9.0", "the paper's own difference"
    heads = {n: row(page[page.index("## Heads") :], str(n)) for n in (4, 8, 16)}
    assert [cells[-1] for cells in heads.values()] == ["2.37", "not given", "6.71"]
    assert row(page, "10x768") == ["10x768", *[MISSING] * 4]
    assert row(page, "Transformer++")[-1] == f"{RATES['text'][0]:g}, the edge of those tried", "the smallest rate has the smallest loss"
    assert [row(page[page.index(part) :], "GLA, uniform")[-1] for part in ("## Setup", "## Recall")] == ["0.001"] * 2
    recall = page[page.index("| accuracy at the best rate") :]
    assert row(recall, "GDN")[1:3] == ["0.300 ± 0.000 at 0.0003", "0.800 ± 0.000 at 0.001"], "each where its own loss is lowest"
    assert row(recall[recall.index("| accuracy, each at its best rate") :], "GDN")[1] == "+0.500 ± 0.000"
    assert "- scaling: 12 of 18 runs are recorded." in page
    needles = page[page.index("### Needles in a haystack") :]
    assert row(needles, "GLA, softmax")[1:] == [MISSING, MISSING, "−80.00 (n=1)", "−70.00 (n=1)"]
    assert "ours, 6x512-needles | 70.0" in needles[needles.index("<summary>After needles") :]
    places = page[page.index("## Where the read gate is") :]
    assert row(places, "softmax, read gate after the norm")[3:] == ["−9.5 ± 0.2", "−9.5 ± 0.2"]
    assert row(places[places.index("| GDN |") :], "softmax, read gate after the norm")[2:] == ["−9.5 ± 0.2"], "at one eps alone"
    assert "![Validation perplexity over the number of heads](images/reproduction/small_heads.svg)" in page
    assert f"Figure, Decoding one text: {MISSING}. What makes its records: headmax bench decode." in page
    assert row(page[page.index("## Stability") :], "GLA, softmax")[1] == "3 in 3 runs"
    assert row(page, "GLA, softmax, read")[1:] == [*["0.90 (0.40)"] * 6, "0 in 3 runs"]
    models = page[page.index("### Language modelling") :]
    assert row(models[models.index("| Softmax GLA | paper") :], "")[2] == "−2.61"


def test_without_records_nothing_is_claimed(tmp_path: Path) -> None:
    text = report.render(Results(tmp_path))
    verdicts = text[text.index("| claim, the paper") : text.index("Could not be tested here")].splitlines()[2:]
    assert all(line.split("|")[2:4] == [f" {MISSING} "] * 2 for line in verdicts if line.startswith("|"))
    assert "**held**" not in text
    assert "0 of 46 runs are recorded" in text


def test_the_page_is_written_with_its_pictures(folder: Path, tmp_path: Path) -> None:
    report.write(tmp_path / "page.md", folder)
    text = (tmp_path / "page.md").read_text()
    for name in ("small_heads", "small_scaling", "recall_gla", "training_loss"):
        assert f"({report.IMAGES}/{name}.svg)" in text
        assert (tmp_path / report.IMAGES / f"{name}.svg").is_file()


def test_the_committed_page_is_what_the_records_give() -> None:
    page = ROOT / "docs" / "reproduction.md"
    assert page.read_text() == report.render(Results(RESULTS)), "run python -m lab report"


def test_judgement() -> None:
    assert judge({}, -1) == MISSING
    assert judge({0: -1.0}, -1) == "too few seeds (1 of 1 seeds as claimed)"
    assert judge({0: -1.0, 1: -1.1, 2: -0.9}, -1) == "**held**"
    assert judge({0: -1.0, 1: -1.1, 2: -0.9}, 1) == "**the opposite**"
    assert judge({0: -1.0, 1: -0.01, 2: 0.2}, -1) == "no significant difference (2 of 3 seeds as claimed)"
    assert show({0: 1.0, 1: 2.0}) == "1.50 ± 0.71 (n=2)"
    assert show({}) == MISSING


def test_only_runs_of_the_same_seed_are_compared(tmp_path: Path) -> None:
    for run in (Run("gla"), Run("gla", "softmax", seed=1), Run("gla", "softmax", seed=0, norm_eps=1e-5)):
        records.append(tmp_path / "reproduction.jsonl", made(run))
    results = Results(tmp_path)
    assert results.paired("validation loss", Run("gla", "softmax"), Run("gla")) == {}
    records.append(tmp_path / "reproduction.jsonl", made(Run("gla", "softmax")))
    found = Results(tmp_path).paired("validation loss", Run("gla", "softmax", seed=2), Run("gla"))
    assert found == {0: loss(Run("gla", "softmax")) - loss(Run("gla"))}
    run = Run("gla", "uniform")
    about = {"run": asdict(run), "data": {"index": "of other texts"}}
    records.append(tmp_path / "reproduction.jsonl", [MAKE(run.name, "headmax", "validation loss", 3.0, "", 0, **about)])
    assert Results(tmp_path).paired("validation loss", run, Run("gla")) == {}, "other texts"


def entropy(*parts: float) -> float:
    return -sum(p * math.log2(p) for p in parts)


def test_which_heads_win_what(page: str) -> None:
    section = page[page.index("### Which heads win what") :]
    bits = entropy(0.5, 0.45, 0.05) + entropy(0.5, 0.5) - entropy(0.45, 0.05, 0.45, 0.05)
    assert row(section, "GLA, softmax")[1:] == [f"{bits:.3f} ± 0.000", "0.100 ± 0.000"] * 2
    layers = section[section.index("| Softmax RetNet, seed 0, layer") :]
    telling = "head 1 wins 90% of punctuation, 45% of all: `\\|` `` ` ``"
    assert f"| 5 | {telling} | {telling} |" in layers


def test_accuracy_at_chance_is_marked(tmp_path: Path) -> None:
    for seed, variant, value in ((0, "plain", 1 / 128), (0, "softmax", 0.02)):
        run = Run("gla", variant, "2x128", 4, seed, 2000, pairs=16)
        records.append(tmp_path / "reproduction.jsonl", [MAKE(run.name, "headmax", "accuracy", value, "", seed, run=asdict(run))])
    text = report.render(Results(tmp_path))
    line = next(line for line in text.splitlines() if line.startswith("| 16 | 4 |"))
    assert line == "| 16 | 4 | 0.008 (n=1), chance | 0.020 (n=1)" + f" | {MISSING}" * 5 + " |"


def test_commands_for_the_papers_scale_are_understood(data: Path, tmp_path: Path, called: Called) -> None:
    """Every recipe of every command, up to where training would begin on 8 GPUs."""
    counts = {}
    for line in report.commands():
        if line.startswith("for r in "):
            names, _, body = line.removeprefix("for r in ").partition("; do ")
            train, convert, evaluate = (shlex.split(part) for part in body.removesuffix("; done").split(" && "))
            assert train[:6] == ["torchrun", "--nproc-per-node", "8", "-m", "headmax", "train"]
            with (
                mock.patch("headmax.train.export.to_hf") as to_hf,
                mock.patch("headmax.eval.terminal.run", return_value=[]) as run,
                mock.patch("headmax.train.loading.is_run", return_value=True),
            ):
                for words in (convert, evaluate):
                    assert called(*words[1:]).returncode == 0
            assert to_hf.call_args.args == (Path("runs/$r"), Path("runs/$r/hf"))
            place, tasks = run.call_args.args[:2]
            assert (place.checkpoint, place.work, place.name) == ("runs/$r/hf", Path("runs/$r/eval"), "$r"), "a folder for each"
            assert tasks == "commonsense,retrieval,niah,mqar"
            for name in names.split():
                words = [word.replace("$r", name).replace("data/slimpajama", str(data)) for word in train[6:]]
                with mock.patch("headmax.train.trainer.training") as training:
                    assert called("train", *words).returncode == 0
                model, config, source, out = training.call_args.args
                assert (out, source.length, config.batch_size % 8) == (Path("runs") / name, 4096, 0)
                with torch.device("meta"):
                    counts[name] = sum(p.numel() for p in HeadmaxForCausalLM(model).parameters())
                assert config.token_budget == 15_000_000_000
                assert model.num_heads == int(name.partition("-h")[2] or 4)
    assert len(counts) == 7 + 6 + 6
    paper = {"transformer": 341_099_520, "retnet": 347_403_264, "gla": 341_707_776, "gdn": 341_499_072}
    assert {name: counts[f"{name}-340m"] for name in paper} == paper
    assert {name: counts[f"softmax-{name}-340m"] - paper[name] for name in ("retnet", "gla", "gdn")} == {
        "retnet": 49_152, "gla": 24_576, "gdn": 24_576}  # fmt: skip
    assert max(n for name, n in counts.items() if "110m" in name) < 1.01 * counts["gla-110m"]


def test_models_trained_twice_are_found(tmp_path: Path) -> None:
    for run, value in ((recall_run("gla", "softmax", 32, 4), 0.5), (replace(recall_run("gla", "softmax", 32, 4), lr=1e-3), 0.7)):
        about = {"run": asdict(run), "lr": 1e-3}
        records.append(tmp_path / "reproduction.jsonl", [MAKE(run.name, "headmax", "validation loss", 1.0, "nats", 0, **about)])
        records.append(tmp_path / "reproduction.jsonl", [MAKE(run.name, "headmax", "accuracy", value, "", 0, **about)])
    assert Results(tmp_path).repeats() == [pytest.approx(0.2)]
    assert "1 models were trained twice with the same seed and rate, and their accuracies lie\n0.20 apart" in report.render(
        Results(tmp_path)
    )
