"""The tools a measurement is made with."""

import os
import time
from collections.abc import Iterator

import pytest

from headmax.bench.isolated import isolated
from headmax.bench.timing import paired
from headmax.records import Record, Recorder


def test_pairs_give_a_ratio_and_its_interval() -> None:
    """A median's interval is between ranks of binomial tails; one slow spell moves neither."""
    times = [1 + n / 1000 for n in range(24)]
    ratio, interval = paired([*times[:-1], 9.0], [1.0] * 24)
    assert ratio == pytest.approx(1.0115)
    assert interval == pytest.approx([1.006, 1.017])  # the 7th smallest and the 7th largest: 97.7% of fair coins
    assert paired([1.0] * 6, [1.0] * 6)[1] == [1.0, 1.0]
    assert paired([1.0] * 5, [1.0] * 5)[1] is None, "the least and the largest of five hold a median too rarely"


def steps(fate: str) -> Iterator[Record]:
    make = Recorder("test", "cpu")
    yield make("case", "impl", "first", float(os.environ.get("HEADMAX_TEST_VALUE", 0)), "s")
    if fate == "hangs":
        time.sleep(60)
    if fate == "dies":
        os._exit(3)
    yield make("case", "impl", "second", 2.0, "s")


@pytest.mark.parametrize(("fate", "count", "said"), [("ends", 2, ""), ("hangs", 1, "stopped after 25 s"), ("dies", 1, "failed")])
def test_what_was_measured_survives_a_process_that_does_not(fate: str, count: int, said: str) -> None:
    """A process may take seconds to start on a busy machine: only the one that hangs is waited for."""
    words: list[str] = []
    found = isolated(steps, fate, limit=25 if fate == "hangs" else 200, say=words.append, environment={"HEADMAX_TEST_VALUE": "7"})
    assert [record.metric for record in found] == ["first", "second"][:count]
    assert found[0].value == 7
    assert said in " ".join(words)


def test_the_fastest_tiles_are_those_of_all_ops_together() -> None:
    pytest.importorskip("triton")
    from headmax.bench.tune import fastest

    def time_of(op: str, tiles: list[int], us: float) -> dict[str, object]:
        return {"kernel": "scan", "width": "narrow", "op": op, "tiles": tiles, "us": us}

    a, b, alone = [64, 64, 4, 2, 0], [64, 128, 4, 2, 0], [128, 128, 8, 2, 0]
    times = [time_of("gla", a, 10), time_of("gla", b, 12), time_of("x", a, 30), time_of("x", b, 20), time_of("x", alone, 1)]
    assert fastest(times) == {("scan", "narrow"): b}


def test_every_kernel_has_tiles_for_every_class() -> None:
    pytest.importorskip("triton")
    from headmax.bench.tune import CANDIDATES
    from headmax.ops.kernels.tiles import TABLE

    untried = ("delta_carry", "prepare_exact")  # not run, or with nothing to do, on what is timed
    names = {*untried, *(name for kernels in CANDIDATES.values() for names in kernels.values() for name in names)}
    for entry in TABLE.values():
        assert set(entry["kernels"]) == names
        assert all(set(tiles) == {"narrow", "wide"} for tiles in entry["kernels"].values())
