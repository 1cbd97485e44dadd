"""On a GPU: the same list, and compiled kernels that serve every seed."""

from pathlib import Path

import pytest
import torch

from headmax import records
from lab.study import run, runs
from lab.study.runs import Run
from tests.lab.test_run import prepared

pytestmark = pytest.mark.gpu
__all__ = ["prepared"]


@pytest.mark.usefixtures("small")
def test_a_second_seed_compiles_nothing(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    graphs = []
    monkeypatch.setitem(runs.PARTS, "language", lambda seed: [Run("gla", "softmax", "2x128", seed=seed, steps=12)])
    monkeypatch.setattr(run, "chosen", lambda *_: 1e-3)
    torch._dynamo.reset()
    for seed in (0, 1):
        monkeypatch.setattr(runs, "SEEDS", (seed,))
        left = run.execute(["language"], data=prepared, out=tmp_path, budget=1e9, share=(0, 1), device="cuda", say=lambda text: None)
        graphs.append(counters["stats"]["unique_graphs"])
        assert left == 0
    assert graphs[0] == graphs[1] > 0
    found = {(r.metric, r.seed): r.value for r in records.read(tmp_path / "records.jsonl")}
    assert all(4.0 < found["validation loss", seed] < 7.0 for seed in (0, 1))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("backbone", ["gla", "retnet", "gdn"])
def test_recall(backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Run(backbone, "softmax", "2x128", heads, 0, 3, lr=1e-3, pairs=4) for heads in (2, 8)]
    monkeypatch.setitem(runs.PARTS, "recall", lambda seed: asked if seed == 0 else [])
    assert run.execute(["recall"], data=None, out=tmp_path, budget=1e9, share=(0, 1), device="cuda", say=lambda text: None) == 0
    assert all(r.value < 10 for r in records.read(tmp_path / "records.jsonl") if r.metric == "validation loss")
