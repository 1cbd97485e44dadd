"""The page says what records say, and of what has none that it is missing."""

import math
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import torch

from headmax import HeadmaxForCausalLM, records
from headmax.records import Recorder
from lab import RESULTS, ROOT
from lab.pages import report
from lab.study.earlier import MISSING, SEEDS, Results, Run, recall_run, show
from tests.command_line import Called

MAKE = Recorder("reproduction", "cpu")


def record(run: Run, metric: str, value: float, **data: str) -> records.Record:
    return MAKE("", "headmax", metric, value, "", run.seed, run=asdict(run), data=data)


def row(page: str, start: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_page_says_what_records_say(tmp_path: Path) -> None:
    made = [record(Run("gla", seed=seed), "validation loss", 4.0 + seed) for seed in SEEDS]
    made += [record(Run("gla", "softmax", seed=seed), "validation loss", 4.1 + seed) for seed in SEEDS]
    made += [record(replace(recall_run("gdn", "softmax", 32, 8), seed=seed), "accuracy", 0.5) for seed in SEEDS[:2]]
    records.append(tmp_path / "reproduction.jsonl", made)
    page, appendix = report.render(Results(tmp_path)), report.tables(Results(tmp_path))
    assert row(page, "GLA")[-1] == f"+{100 * math.expm1(0.1):.1f} ± 0.0"
    assert row(appendix, "4")[-1] == MISSING
    assert row(appendix, "GDN, 32 pairs, 8 heads")[1:3] == [MISSING, "0.50 ± 0.00 (n=2)"]
    assert "![Where softmax gates change perplexity by more than two standard deviations: against no gates, GLA](" in page
    assert f"Figure, Decoding one text: {MISSING}. What makes its records: headmax bench decode." in page


def test_only_runs_of_the_same_seed_and_texts_are_compared(tmp_path: Path) -> None:
    made = [record(Run("gla"), "validation loss", 4.0), record(Run("gla", "softmax", seed=1), "validation loss", 4.0)]
    made += [record(Run("gla", "uniform"), "validation loss", 3.0, index="of other texts")]
    records.append(tmp_path / "reproduction.jsonl", made)
    results = Results(tmp_path)
    assert results.paired(Run("gla", "softmax"), Run("gla")) == {}
    assert results.paired(Run("gla", "uniform"), Run("gla")) == {}
    assert show({0: 1.0, 1: 2.0}) == "1.50 ± 0.71 (n=2)"
    assert show({}) == MISSING


def test_every_record_of_the_repository_names_its_data() -> None:
    found = [r for r in records.read(RESULTS / "reproduction.jsonl") if r.metric == "validation loss"]
    assert found
    assert all(r.extra["data"] for r in found)


def test_the_committed_page_is_what_the_records_give() -> None:
    page = ROOT / "docs" / "reproduction.md"
    assert page.read_text() == report.render(Results(RESULTS)), "run python -m lab report"
    assert page.with_name(report.APPENDIX).read_text() == report.tables(Results(RESULTS)), "run python -m lab report"


def test_letters_in_the_committed_pictures_are_paths() -> None:
    """They look the same with any fonts; `python -m lab report` and `make pictures` draw them."""
    pictures = list((ROOT / "docs" / "images").rglob("*.svg"))
    assert len(pictures) >= 9
    assert not [picture.name for picture in pictures if "<text" in picture.read_text()]


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
