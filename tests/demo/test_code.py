"""The whole demo on a small corpus: its outputs, reruns, interruptions, and folders that it must not touch."""

import io
import json
import logging
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from headmax import records
from headmax.demo import code, figure, training
from headmax.demo.corpus import Document
from headmax.demo.display import Display
from headmax.demo.tokens import tokenize
from headmax.demo.variants import VARIANTS
from headmax.train.faults import Interrupted
from headmax.train.loading import load_model
from headmax.train.metrics import Line, read_lines
from tests.demo.small import STEPS, make_corpus, run, small_batches


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished demo: its folder and what it printed. Tests change copies only."""
    out = tmp_path_factory.mktemp("demo") / "out"
    return out, run(out)


@pytest.fixture
def copy(finished: tuple[Path, str], tmp_path: Path) -> Path:
    return shutil.copytree(finished[0], tmp_path / "copy")


def bits(out: Path) -> dict[str, float]:
    return {r.extra["variant"]: r.value for r in records.read(out / "records.jsonl") if r.metric == code.METRIC.record}


def losses(out: Path) -> dict[str, list[tuple[int, float]]]:
    return {variant: [(line["step"], line["loss"]) for line in read_lines(out / variant / "metrics.jsonl")] for variant in VARIANTS}


def continuations(printed: str) -> str:
    return printed[printed.index("plain continues:") : printed.index("Picture:")]


def test_outputs(finished: tuple[Path, str]) -> None:
    out, printed = finished
    measured = list(records.read(out / "records.jsonl"))
    assert [(r.extra["variant"], r.metric) for r in measured if r.metric != "gate entropy"] == [
        (variant, metric) for variant in VARIANTS for metric in ("held-out bits per byte", "tokens per second")
    ]
    entropy = {r.extra["variant"]: r.value for r in measured if r.metric == "gate entropy"}
    assert entropy == {"uniform": pytest.approx(1), "softmax": pytest.approx(1, abs=0.1)}
    for r in measured:
        assert (r.seed, r.extra["steps"], r.extra["python"]) == (0, STEPS, "Python 0")
        assert r.extra["corpus_sha256"] == make_corpus().sha256
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert f"{make_corpus().valid[0].name}, held out" in page
    for variant, value in bits(out).items():
        assert f"{variant} continues:\n{code.PROMPT}" in printed
        assert any(words[:2] == [variant, f"{value:.3f}"] for words in map(str.split, printed.splitlines()))
        assert f"{variant:8} step {STEPS}/{STEPS}" in printed
    assert "Held-out files, seed 0" in printed
    assert "fewer than 3 seeds are recorded" in printed
    assert f"open {out / 'report.html'}" in printed


def test_bits_per_byte_of_all_held_out_windows(finished: tuple[Path, str]) -> None:
    out, _ = finished
    text = tokenize(make_corpus(), out, lambda line: None)
    source, model = text.held_out(32), load_model(out / "plain")
    ids = source.batch(range(source.num_samples)).input_ids
    with torch.no_grad():
        nats = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    text_bytes = sum(text.token_bytes[token] for token in ids[:, 1:].flatten().tolist())
    assert bits(out)["plain"] == pytest.approx(float(nats) / text_bytes / torch.log(torch.tensor(2.0)).item(), rel=1e-5)


def test_a_rerun_reuses_what_is_finished(copy: Path, finished: tuple[Path, str], tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in copy.glob("*/metrics.jsonl")}
    printed = run(copy, record=tmp_path / "all.jsonl")
    assert {path: path.read_bytes() for path in before} == before
    assert printed.count("reused") == 3
    assert continuations(printed) == continuations(finished[1])
    assert list(records.read(copy / "records.jsonl")) == list(records.read(finished[0] / "records.jsonl"))
    assert list(records.read(tmp_path / "all.jsonl")) == list(records.read(copy / "records.jsonl"))


def test_a_rerun_with_other_settings_starts_over(copy: Path) -> None:
    before = losses(copy)
    printed = run(copy, seed=1, steps=2)
    assert "reused" not in printed
    assert {(r.seed, r.extra["steps"]) for r in records.read(copy / "records.jsonl")} == {(1, 2)}
    for variant, taken in losses(copy).items():
        assert [step for step, _ in taken] == [1, 2]
        assert not set(taken) & set(before[variant])


def test_any_other_setting_discards_a_run(tmp_path: Path) -> None:
    folder, wanted = tmp_path / "plain", {"train": {"seed": 0}, "commit": "a"}
    for other in (wanted | {"train": {"seed": 1}}, wanted | {"commit": "b"}, wanted | {"more": 1}):
        training.discard_other_run(folder, other)
        folder.mkdir()
        training.discard_other_run(folder, other)
        assert folder.exists()
        training.discard_other_run(folder, wanted)
        assert not folder.exists()
        assert json.loads((tmp_path / "plain.json").read_text()) == wanted


def test_an_interrupted_run_resumes(finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Display.step

    def interrupt(display: Display, variant: str, line: Line) -> None:
        step(display, variant, line)
        if (variant, line["step"]) == ("uniform", 1):
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Display, "step", interrupt)
        with pytest.raises(Interrupted, match="SIGINT: saved at step 3"):
            run(tmp_path / "out")
    assert not (tmp_path / "out/records.jsonl").exists()
    printed = run(tmp_path / "out")
    assert printed.count("reused") == 1
    assert "uniform  step 1/" not in printed, "it resumes after step 3"
    assert losses(tmp_path / "out") == losses(finished[0])
    assert bits(tmp_path / "out") == bits(finished[0])


def test_a_run_removed_only_in_part_starts_over(copy: Path, finished: tuple[Path, str]) -> None:
    (copy / "plain.json").unlink()  # goes first
    shutil.rmtree(copy / "plain/checkpoints")
    run(copy)
    assert losses(copy) == losses(finished[0])


def test_folders_of_others_stay_as_they_are(tmp_path: Path) -> None:
    for name in ("corpus", "data", "plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files; choose a new or empty folder, or one with an earlier demo"):
        run(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == [
        f"{name}/thesis.txt" for name in ("corpus", "data", "plain")
    ]


def test_wrong_arguments_are_named_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}\n")
    for changes, message in (
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"record": tmp_path / "config.json"}, "not a file of records"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "out", **changes)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_threads_and_log_level_are_restored(copy: Path) -> None:
    logger, threads = logging.getLogger("headmax"), torch.get_num_threads()
    torch.set_num_threads(2)
    level = logger.level
    try:
        run(copy)
        assert (torch.get_num_threads(), logger.level) == (2, level)
    finally:
        torch.set_num_threads(threads)


def test_the_display_fits_eighty_columns() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None, legacy_windows=False)
    line = {"step": 190, "loss": 3.7, "tokens_per_s": 123456.0}
    with Display(console, 190, lambda metrics: code.describe(metrics, 0.385)) as display:
        display.step("plain", line)
        display.reused("uniform", line)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for variant, text in (("plain", "123,456 tokens/s         0:00:00"), ("uniform", "123,456 tokens/s, reused 0:00:00")):
        assert any(variant in row and f"190/190 2.06 bits/byte, {text}" in row for row in shown.splitlines())
    assert "…" not in shown


def test_the_report_shows_the_file_with_the_most_functions() -> None:
    few = Document("few.py", "import os\n\n\ndef one():\n    pass\n")
    many = Document("many.py", '"""Many."""\n\nX = 1\n\n\nclass A:\n    pass\n\n\ndef one():\n    pass\n\n\ndef two():\n    pass\n')
    excerpt = figure.choose_excerpt([few, many])
    assert excerpt.name == "many.py"
    assert excerpt.text.startswith("class A:")
    assert figure.choose_excerpt([Document("none.py", "x = 1\n")]).text == "x = 1\n"


def test_variants_start_from_the_same_parameters(finished: tuple[Path, str]) -> None:
    out, _ = finished
    settings = {variant: json.loads((out / f"{variant}.json").read_text()) for variant in VARIANTS}
    for variant in ("uniform", "softmax"):
        assert settings[variant]["train"] == settings["plain"]["train"]
        assert settings[variant]["data"] == settings["plain"]["data"]
    first = {variant: steps[0][1] for variant, steps in losses(out).items()}
    assert first["softmax"] == pytest.approx(first["uniform"], abs=1e-3), "gates start nearly uniform"
    with small_batches():
        config = code.train_config(STEPS, 0)
    assert settings["plain"]["train"]["batch_tokens"] == config.batch_tokens == 64
