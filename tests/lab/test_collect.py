"""From texts to the page: requests and needles prepared, models trained and examined, scores turned into records."""

from pathlib import Path

import pytest

from headmax import records
from lab.pages import report
from lab.study import collect as collecting
from lab.study import needles, prepare, run, runs
from lab.study.collect import collect
from lab.study.runs import Run
from lab.study.statistics import Results


@pytest.mark.usefixtures("small")
def test_the_whole_way(data: Path, eval_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, outs = tmp_path / "results", [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr(prepare, "TASKS", {"wikitext": None, "piqa": 4, "niah_single_1_1k": 2})
    monkeypatch.setattr(needles, "LENGTHS", (700,))
    monkeypatch.setattr(runs, "LENGTH", 768)
    monkeypatch.setattr(collecting, "EVALUATIONS", results / "eval.jsonl")
    asked = [Run("gla", "softmax", "1x32", seed=seed, steps=2) for seed in (0, 1)]
    monkeypatch.setitem(runs.PARTS, "language", lambda seed: [asked[seed]])
    monkeypatch.setattr(run, "chosen", lambda *_: 1e-2)

    prepare.prepare(data, eval_data, eval_data / "prose.txt", lambda text: None)
    rows = needles.NeedleRows(data / "needles.npz")
    assert rows.tokens.shape == (2 * 2, 768)
    assert rows.answers.any(1).all()
    batch = rows.batch(range(4))
    assert (batch.labels != -100).sum() == rows.answers.sum() < 0.1 * rows.answers.size

    options = {"data": data, "budget": 1e9, "device": "cpu", "say": lambda text: None}
    assert run.execute(["language"], out=outs[0], share=(0, 2), **options) == 0
    assert run.execute(["language"], out=outs[1], share=(1, 2), **options) == 0
    assert collect(outs, data, eval_data, eval_data / "prose.txt", lambda text: None) > 0
    found = [record for record in records.read(results / "eval.jsonl") if record.metric != "perplexity"]
    cells = {(r.case, r.metric, r.extra["tuned"], r.extra["run"]["seed"]): r for r in found}
    needle = {("niah_single_1_1k", metric, tuned) for metric in ("acc", "answer_logprob") for tuned in (False, True)}
    assert {key[:3] for key in cells} == {("wikitext", "word_perplexity", False), ("piqa", "acc", False)} | needle
    assert len(cells) == 2 * 6
    assert cells["piqa", "acc", False, 0].extra["n"] == 4
    assert cells["piqa", "acc", False, 0].extra["model"] == "softmax-gla-1x32"
    assert cells["niah_single_1_1k", "acc", True, 1].extra["model"] == "softmax-gla-1x32-needles"

    assert collect(outs, data, eval_data, eval_data / "prose.txt", lambda text: None) == 0, "nothing is added twice"
    assert Results(results).seeds("wikitext word_perplexity", asked[1]).keys() == {0, 1}
    text = report.render(Results(results))
    assert "### Needles in a haystack" in text
    assert "2 of 2 runs are recorded" in text
