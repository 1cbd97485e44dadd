"""Recipes: every name of the paper, and what they weigh."""

import pytest

from headmax import HeadGateConfig, recipes
from headmax.recipes.summary import summarize


def test_all_names_of_the_paper_are_there() -> None:
    scales = ("tiny", "80m", "110m", "170m", "340m")
    families = ("transformer", "retnet", "softmax-retnet", "gla", "softmax-gla", "gdn", "softmax-gdn")
    expected = {f"{family}-{scale}" for family in families for scale in scales}
    expected |= {f"{family}-110m-h{heads}" for family in ("gla", "softmax-gla") for heads in (4, 8, 16)}
    assert set(recipes.names()) == expected


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_complete(name: str) -> None:
    recipe = recipes.get(name)
    assert recipe.name == name
    assert recipe.model.head_gate == (HeadGateConfig() if name.startswith("softmax-") else None)
    assert (recipe.train.learning_rate, recipe.train.token_budget, recipe.train.sequence_length) == (1e-3, 15_000_000_000, 4096)


@pytest.mark.parametrize(
    ("name", "parameters", "body", "gates", "state"),
    [
        ("transformer-340m", 341_099_520, 308_331_520, 0, 24 * 2 * 1024 * 2),
        ("softmax-retnet-340m", 347_452_416, 314_684_416, 49_152, 24 * 4 * 256 * 512 * 4),
        ("softmax-gla-340m", 341_732_352, 308_964_352, 24_576, 24 * 4 * 128 * 256 * 4),
        ("softmax-gdn-340m", 341_523_648, 308_755_648, 24_576, 24 * (4 * 128 * 256 * 4 + 3 * 2048 * 2)),
        ("gla-110m-h16", 112_209_360, 91_729_360, 0, 18 * 16 * 20 * 40 * 4),
    ],
)
def test_summary(name: str, parameters: int, body: int, gates: int, state: int) -> None:
    summary = summarize(recipes.get(name))
    assert (summary.parameters, summary.body_parameters, summary.gate_parameters, summary.state_bytes) == (parameters, body, gates, state)
    assert summary.grows == name.startswith("transformer")


def test_unknown_recipe() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'softmax-gla-340'; did you mean 'softmax-gla-340m'"):
        recipes.get("softmax-gla-340")
