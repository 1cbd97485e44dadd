"""Context parallelism of whole models: logits, gates, loss and all gradients are those of one process, in float64."""

import pytest

from tests.parallel.processes import run

pytestmark = pytest.mark.distributed


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4, 8))])
def test_a_model_over_pieces_is_the_model(ranks: int) -> None:
    names = ["linear", "retnet", "gla", "gated_deltanet", "kda", "mamba2", "attention", "hybrid", "window"]
    found = run("models", ranks, names, False, seconds=1100)["errors"]
    check(found)
    assert {case.split("-")[0] for case in found} == {*names, "fused"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_blocks_work_on_pieces() -> None:
    check(run("models", 2, ["gla", "kda", "hybrid", "window"], True, seconds=1700)["errors"])


def check(found: dict) -> None:
    for case, errors in found.items():
        over = {key: x for key, x in errors.items() if not x <= (1e-6 if key == "float32_loss" else 1e-8)}
        assert not over, case


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_tokens_on_eight_processes_are_one_sequence() -> None:
    """In float32: a piece of 131,072 tokens each; the longest sums have a million terms."""
    found = run("million", 8, 2**20, seconds=1700)
    assert found["errors"].pop("loss") < 1e-5
    assert max(found["errors"].values()) < 1e-3
    assert 4 < found["loss"] < 7
