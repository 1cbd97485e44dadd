"""What the demo says of its figures: three cases, in both directions."""

import pytest

from headmax.demo.code import METRIC, case
from headmax.demo.recall import METRIC as ACCURACY
from headmax.demo.verdict import compare, recorded_seeds, verdict


def seeds(*gains: float) -> list[dict[str, float]]:
    """Bits per byte where softmax is better than both rivals by the given numbers."""
    return [{"plain": 2.0, "uniform": 2.0, "softmax": 2.0 - gain} for gain in gains]


@pytest.mark.parametrize(
    ("gain", "recorded", "expected"),
    [
        (0.05, (), "0.050 better than plain in bits per byte; fewer than 3 seeds are recorded for these settings, so this may be chance."),
        (0.05, (0.01, 0.02), "fewer than 3 seeds are recorded for these settings, so this may be chance."),
        (0.05, (-0.03, 0.0, 0.05), "0.050 better than plain in bits per byte, within noise: this difference has a range of 0.080 over 3"),
        (-0.05, (-0.03, 0.0, 0.05), "0.050 worse than plain in bits per byte, within noise"),
        (0.25, (-0.03, 0.01, 0.05), "0.250 better than plain in bits per byte, beyond noise: this difference has a range of 0.080 over 3"),
        (0.25, (-0.03, 0.01, 0.05), "recorded seeds, 2 of the same sign."),
        (-0.25, (-0.03, 0.01, 0.05), "0.250 worse than plain in bits per byte, beyond noise"),
        (-0.25, (-0.03, 0.01, 0.05), "recorded seeds, 1 of the same sign."),
    ],
)
def test_one_sentence(gain: float, recorded: tuple[float, ...], expected: str) -> None:
    (scores,) = seeds(gain)
    sentence = compare(METRIC, scores, seeds(*recorded), "plain")
    assert sentence.startswith("Softmax is 0.")
    assert expected in sentence


def test_recorded_seeds_are_summed_up() -> None:
    (scores,) = seeds(0.25)
    *_, summary = verdict(METRIC, scores, seeds(-0.03, 0.01, 0.05))
    assert summary == (
        "Recorded bits per byte over 3 seeds: plain 2.000 (2.000 to 2.000), uniform 2.000 (2.000 to 2.000), "
        "softmax 1.990 (1.950 to 2.030). "
        "Softmax is better than plain in 2 and than uniform in 2 of 3."
    )
    assert len(list(verdict(METRIC, scores, []))) == 2


def test_more_accuracy_is_better() -> None:
    scores = {"plain": 0.5, "uniform": 0.4, "softmax": 0.45}
    assert ACCURACY.gain(scores, "plain") == pytest.approx(-0.05)
    assert ACCURACY.wins([scores], "uniform") == 1


def test_five_seeds_are_in_the_package() -> None:
    assert len(recorded_seeds(METRIC, case(steps=190))) == 5
    assert recorded_seeds(METRIC, case(steps=191)) == []
    assert recorded_seeds(ACCURACY, case(steps=190)) == []
