"""The plan: counted against real models and memory, monotone where it must be, and clear about what cannot be."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headmax import HeadmaxForCausalLM, recipes
from headmax.bench.timing import peak_memory
from headmax.plan import estimate as plan
from headmax.plan import table
from headmax.plan.estimate import CARDS, TrainingJob, Work, choose_efficiency, collective, estimate, measured_steps, memory
from headmax.recipes.summary import summarize


def run(recipe: str = "softmax-gla-340m", card: str = "h200", tokens: int = 15_000_000_000, batch_tokens: int = 2**19) -> TrainingJob:
    return TrainingJob(recipes.get(recipe), card, tokens, 4096, batch_tokens)


@pytest.mark.parametrize("recipe", ["softmax-gla-340m", "retnet-340m", "softmax-gdn-340m", "transformer-340m"])
def test_work_is_near_six_flops_per_parameter_and_token(recipe: str) -> None:
    work = Work.of(recipes.get(recipe), 4096)
    assert work.parameters == summarize(recipes.get(recipe)).parameters
    assert 1.0 < work.flops / (6 * work.parameters) < 1.35
    longer = Work.of(recipes.get(recipe), 16384)
    if recipe.startswith("transformer"):
        assert longer.flops - work.flops == 3 * 24 * 2 * 1024 * (16384 - 4096)
    else:
        assert longer.flops == work.flops


def test_flops_are_those_that_torch_counts() -> None:
    recipe, length = recipes.get("transformer-tiny"), 256
    with torch.device("meta"):
        model, tokens = HeadmaxForCausalLM(recipe.model), torch.zeros(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    counts = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("aten.bmm") / 2  # the mask's other half is not computed on a GPU
    assert Work.of(recipe, length).flops == 3 * (sum(counts.values()) + attention) / length


def test_parameters_gradients_and_optimizer_are_what_a_process_holds() -> None:
    recipe = recipes.get("gla-80m")
    work = Work.of(recipe, 128)
    predicted = sum(memory(work, 1)[name] for name in ("parameters", "gradients", "AdamW"))
    held = []

    def build() -> None:
        with torch.device("meta"):
            model = HeadmaxForCausalLM(recipe.model)
        model.to_empty(device="cpu")
        model.tie_weights()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.data.fill_(1.0)
            parameter.grad = torch.full_like(parameter, 1.0)
        optimizer.step()
        held.append((model, optimizer))

    measured = peak_memory(build, torch.device("cpu"))
    assert measured is not None
    assert predicted == pytest.approx(measured, rel=0.1)


def test_memory_falls_with_sharding_and_checkpointing_and_grows_with_the_micro_batch() -> None:
    work = Work.of(recipes.get("softmax-gla-340m"), 4096)

    def total(tokens: int, **how: object) -> float:
        return sum(memory(work, tokens, **how).values())  # type: ignore[arg-type]

    assert total(4096) < total(8192) < total(16384)
    assert total(8192, checkpointing=True) < total(8192)
    assert total(8192, gpus=8, parallel="fsdp") < total(8192, gpus=2, parallel="fsdp") < total(8192, gpus=2)
    assert total(8192, gpus=8) == total(8192)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("card", CARDS)
def test_more_gpus_take_less_time_and_no_less_work(card: str, parallel: plan.Parallel) -> None:
    work = Work.of(recipes.get("softmax-gla-340m"), 4096)
    ways = [estimate(run(card=card, batch_tokens=2**22), work, 0.5, 2**n, parallel) for n in range(10)]
    for fewer, more in itertools.pairwise(ways):
        assert more.seconds < fewer.seconds
        assert more.gpu_hours > 0.95 * fewer.gpu_hours
    for way in ways:
        assert way.gpus * way.micro_batch * way.accumulation == 1024
        assert sum(way.memory.values()) < 1e9 * CARDS[card].memory
        assert 0 <= way.communication < way.step


def test_a_better_card_is_faster_and_a_longer_budget_takes_longer() -> None:
    work = Work.of(recipes.get("softmax-gla-340m"), 4096)
    days = {card: estimate(run(card=card), work, 0.5, 8, "ddp").seconds for card in CARDS}
    assert days["b200"] < days["h200"] < days["h100"] < days["a100"] < days["h20"]
    assert estimate(run(tokens=30_000_000_000), work, 0.5, 8, "ddp").seconds == pytest.approx(2 * days["h200"], rel=1e-3)
    assert estimate(run(), work, 0.25, 1, "ddp").step == pytest.approx(2 * estimate(run(), work, 0.5, 1, "ddp").step)


def test_links() -> None:
    card = CARDS["h100"]
    assert collective(1e9, 2, card) == pytest.approx(0.5 / (0.8 * 450) + 20e-6)
    assert collective(1e9, 16, card) == pytest.approx((7 / 8 / 450 + 0.5 / 8 / 50) / 0.8 + 80e-6)
    assert collective(1e9, 8, CARDS["h800"]) > collective(1e9, 8, card)


def test_checkpointing_where_there_is_no_other_way() -> None:
    work = Work.of(recipes.get("softmax-gla-340m"), 65_536)
    long = replace(run(card="rtx4090"), length=65_536)
    way = estimate(long, work, 0.5, 8, "fsdp")
    assert way.checkpointing
    with pytest.raises(ValueError, match=r"one sequence of 262,144 does not fit on rtx4090: \d+ GB with checkpointing, 22 of 24 GB"):
        estimate(replace(run(card="rtx4090"), length=2**18), Work.of(recipes.get("softmax-gla-340m"), 2**18), 0.5, 1, "ddp")


def test_what_cannot_be_is_said() -> None:
    for change, said in (
        ({"card": "h2000"}, "unknown GPU 'h2000'; did you mean 'h200'"),
        ({"length": 0}, "holds no sequence of 0"),
        ({"batch_tokens": 4000}, "a batch of 4,000 tokens holds no sequence of 4,096"),
        ({"tokens": 1000}, "1,000 tokens are fewer than one batch of 524,288"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(run(), **change)  # type: ignore[arg-type]
    work = Work.of(recipes.get("softmax-gla-340m"), 4096)
    for gpus, said in (
        (0, "gpus must be between 1 and 1024, got 0"),
        (2048, "gpus must be between 1 and 1024, got 2048"),
        (6, "6 GPUs cannot share a batch of 128 sequences of 4,096 evenly; the next batch that they can is 540,672 tokens"),
        (256, "256 GPUs cannot share a batch of 128 sequences"),
    ):
        with pytest.raises(ValueError, match=said):
            estimate(run(), work, 0.5, gpus, "ddp")


def test_without_records_the_assumption_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none.json").write_text("[]")
    monkeypatch.setattr(plan, "MEASURED", tmp_path / "none.json")
    assert choose_efficiency("gla-340m", "h200", 4096, measured_steps()) == (0.5, "assumed, since no record of a training step is there")
    lines = [part for part in table.render(run(), 16, ("ddp", "fsdp")) if isinstance(part, str)]
    assert any("assumed" in line for line in lines)
    assert any(line.startswith("* with a larger batch") for line in lines)
    assert lines[-1] == "check: no record of a step of this model on this card"


def test_h20_is_not_h200() -> None:
    assert plan.card_of("NVIDIA H200") == "h200"
    assert plan.card_of("NVIDIA H20") == "h20"
    assert plan.card_of("NVIDIA A100-SXM4-80GB") == "a100"
    assert plan.card_of("NVIDIA H100 80GB HBM3") == "h100"
    assert plan.card_of("NVIDIA GeForce RTX 4090") == "rtx4090"
    assert plan.card_of("AMD EPYC, 2 threads") is None
