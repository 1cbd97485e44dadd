"""`headmax plan` counts messages as they are: every byte of real steps, by direction."""

import pytest

from tests.parallel.processes import run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_sends_what_the_plan_says(ranks: int) -> None:
    found = run("costs", ranks, seconds=600)
    for case, (counted, foretold) in found.items():
        assert counted == pytest.approx(foretold, rel=1e-9), case
    assert {direction for counted, _ in found.values() for direction in counted} == {"data", "shard", "context", "tensor"}
