"""Recipes: every name of the paper, and what they weigh."""

from pathlib import Path

import pytest

from headmax import HeadGateConfig, recipes
from headmax.data.mqar import MQAR
from headmax.recipes.summary import summarize
from headmax.train import OptimConfig, ScheduleConfig, TrainConfig


def test_all_names_of_the_paper_are_there_and_those_of_later_backbones() -> None:
    scales = ("tiny", "80m", "110m", "170m", "340m")
    families = ("transformer", *(f"{soft}{b}" for soft in ("", "softmax-") for b in ("retnet", "gla", "gdn", "kda", "mamba2", "hybrid")))
    expected = {f"{family}-{scale}" for family in families for scale in scales}
    expected |= {f"{family}-110m-h{heads}" for family in ("gla", "softmax-gla") for heads in (4, 8, 16)}
    recalling = ("linear", "retnet", "gla", "gdn", "kda", "mamba2")
    recall = {"mqar-transformer", *(f"mqar-{soft}{b}" for soft in ("", "softmax-") for b in recalling)}
    assert set(recipes.names()) == expected | recall


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_complete(name: str) -> None:
    recipe = recipes.get(name)
    assert recipe.name == name
    gates = HeadGateConfig(scale="heads" if "mamba2" in name else 1.0)  # beside an ungated D x the paper's would leave of 32 heads 1/1024
    assert recipe.model.head_gate == (gates if "softmax-" in name else None)
    assert (recipe.task is not None) == name.startswith("mqar-")
    if recipe.task is None and not name.endswith("-tiny"):
        assert recipe.train == TrainConfig()


def test_the_defaults_are_the_papers() -> None:
    train = TrainConfig()
    assert (train.token_budget, train.sequence_length, train.batch_tokens) == (15_000_000_000, 4096, 524_288)
    assert train.optim == OptimConfig(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, grad_clip=1.0)
    assert train.schedule == ScheduleConfig(warmup_tokens=500_000_000, start_lr=3e-5, final_lr=3e-5)
    assert (train.compute.precision, train.documents, train.gate_balance) == ("bfloat16", "concatenate", 0.0)


def test_a_recall_recipe_for_another_size_of_its_task() -> None:
    recipe = recipes.get("mqar-softmax-gla").on(MQAR(num_pairs=3, vocab_size=16))
    assert (recipe.model.vocab_size, recipe.train.sequence_length, recipe.train.batch_size) == (16, 10, 64)
    assert recipe.train.steps == recipes.get("mqar-gla").train.steps
    source, held_out = recipe.sources(None)
    assert source.length == recipe.train.sequence_length
    assert source.identity != held_out.identity
    with pytest.raises(ValueError, match="--data: mqar-softmax-gla generates its samples; leave --data out"):
        recipe.sources(Path())
    with pytest.raises(ValueError, match="gla-tiny trains on text, not on a task"):
        recipes.get("gla-tiny").on(MQAR())
    with pytest.raises(ValueError, match="--data must name a folder that `headmax data prepare` wrote: gla-tiny trains on text"):
        recipes.get("gla-tiny").sources(None)


@pytest.mark.parametrize(
    ("name", "parameters", "body", "gates", "state", "token"),
    [
        ("transformer-340m", 341_099_520, 308_331_520, 0, 0, 24 * 2 * 1024 * 2),
        ("softmax-hybrid-340m", 338_273_424, 305_505_424, 18_432, 18 * (4 * 128 * 256 * 4 + 3 * 2048 * 2), 6 * 2 * 2 * 128 * 2),
        ("softmax-retnet-340m", 347_452_416, 314_684_416, 49_152, 24 * 4 * 256 * 512 * 4, 0),
        ("softmax-gla-340m", 341_732_352, 308_964_352, 24_576, 24 * 4 * 128 * 256 * 4, 0),
        ("softmax-gdn-340m", 341_523_648, 308_755_648, 24_576, 24 * (4 * 128 * 256 * 4 + 3 * 2048 * 2), 0),
        ("softmax-mamba2-340m", 342_410_496, 309_642_496, 196_608, 24 * (32 * 128 * 64 * 4 + 3 * (2 * 128 + 2048) * 2), 0),
        ("gla-110m-h16", 112_209_360, 91_729_360, 0, 18 * 16 * 20 * 40 * 4, 0),
    ],
)
def test_summary(name: str, parameters: int, body: int, gates: int, state: int, token: int) -> None:
    summary = summarize(recipes.get(name))
    assert (summary.parameters, summary.body_parameters, summary.gate_parameters) == (parameters, body, gates)
    assert (summary.state_bytes, summary.token_bytes) == (state, token)


def test_unknown_recipe() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'softmax-gla-340'; did you mean 'softmax-gla-340m'"):
        recipes.get("softmax-gla-340")
