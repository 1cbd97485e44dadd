"""Context parallelism of the ops: outputs, states and all gradients are those of one process, in float64."""

import pytest

from headmax.ops import Packing
from tests.parallel.processes import run

pytestmark = pytest.mark.distributed


ROW = 8 * 16 * 2 * 8
"""Bytes of a state of two heads."""
MATRIX = 8 * 8 * 2 * 8


def check(found: dict, bound: float = 1e-10) -> None:
    over = {case: {key: x for key, x in errors.items() if not x <= bound} for case, errors in found["errors"].items()}
    assert not {case: errors for case, errors in over.items() if errors}
    assert {case.split("-")[0] for case in found["errors"]} == {"linear_attention", "gla", "gated_delta_rule", "kda"}
    assert any("packed" in case and "s0" in case and "gates-both" in case for case in found["errors"])


def test_pieces_on_two_processes_are_the_whole() -> None:
    """And what they send is a state and its transition forward, and the gradient of a state backward, whatever the length."""
    found = run("ops", 2, False)
    check(found)
    assert found["bytes"] == {
        "linear_attention": [2 * ROW + 2 * 8] * 2,
        "gla": [2 * ROW + 2 * 8 * 8] * 2,
        "gated_delta_rule": [2 * ROW + MATRIX] * 2,
        "kda": [2 * ROW + MATRIX] * 2,
    }


def test_pieces_on_three_processes_are_the_whole() -> None:
    check(run("ops", 3, False))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_pieces_however_cut_are_the_whole(ranks: int) -> None:
    check(run("ops", ranks, True, seconds=1700))


def test_a_piece_of_a_packing_knows_what_began_before() -> None:
    packing = Packing([0, 0, 3, 8, 8, 10])
    piece = packing.piece(2, 9)
    assert piece.cu_seqlens.tolist() == [0, 1, 6, 6, 7]
    assert piece.positions.tolist() == [2, 0, 1, 2, 3, 4, 0]
    assert piece.rows == slice(1, 5)
    assert packing.piece(0, 2).rows == slice(0, 2)
    assert packing.piece(9, 10).positions.tolist() == [1]
    with pytest.raises(ValueError, match="start and stop must lie in 0 to 10"):
        packing.piece(4, 4)
