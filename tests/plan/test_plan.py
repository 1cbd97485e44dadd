"""The plan: counted against real models and memory, monotone where it must be, and clear about what cannot be."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headmax import HeadmaxConfig, HeadmaxForCausalLM, recipes
from headmax.bench.timing import peak_memory
from headmax.plan import measured as plan
from headmax.plan import table
from headmax.plan.cards import CARDS, Cluster, card_of
from headmax.plan.estimate import TrainingJob, Wanted, estimate, memory, ways
from headmax.plan.measured import choose_efficiency, measured_steps
from headmax.plan.mesh import ALONE, DIRECTIONS, Mesh, messages
from headmax.plan.work import Work
from headmax.recipes.summary import summarize
from headmax.tables import Table
from headmax.train.config import Strategy


def run(recipe: str = "softmax-gla-340m", card: str = "h200", tokens: int = 15_000_000_000, batch_tokens: int = 2**19) -> TrainingJob:
    return TrainingJob(recipes.get(recipe), Cluster.of(card), tokens, 4096, batch_tokens)


@functools.cache
def work_of(recipe: str = "softmax-gla-340m", length: int = 4096) -> Work:
    return Work.of(recipes.get(recipe), length)


@pytest.mark.parametrize("recipe", ["softmax-gla-340m", "retnet-340m", "softmax-gdn-340m", "transformer-340m"])
def test_work_is_near_six_flops_per_parameter_and_token(recipe: str) -> None:
    work = work_of(recipe)
    assert work.parameters == summarize(recipes.get(recipe)).parameters
    assert 1.0 < work.flops / (6 * work.parameters) < 1.35
    longer = work_of(recipe, 16384)
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
    def total(tokens: int, mesh: Mesh = ALONE, **how: Any) -> float:
        return sum(memory(work_of(), tokens, mesh, **how).values())

    assert total(4096) < total(8192) < total(16384)
    assert total(8192, checkpointing=True) < total(8192)
    assert total(8192, Mesh(8, "fsdp")) < total(8192, Mesh(2, "fsdp")) < total(8192, Mesh(2))
    assert total(8192, Mesh(8)) == total(8192) == total(8192, Mesh(8, context=8))
    assert total(8192, Mesh(8, tensor=4)) < total(8192, Mesh(8, tensor=2)) < total(8192)
    assert total(8192, Mesh(8, "fsdp", shard=2)) == total(8192, Mesh(2, "fsdp"))
    held = memory(work_of(), 8192, Mesh(8, "fsdp"), accumulation=2)["gradients"]  # whole until the last micro-batch
    assert held == pytest.approx(4 * work_of().parameters)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("card", CARDS)
def test_more_gpus_take_less_time_and_no_less_work(card: str, parallel: Strategy) -> None:
    found = [estimate(run(card=card, batch_tokens=2**22), work_of(), 0.5, Mesh(2**n, parallel)) for n in range(10)]
    for fewer, more in itertools.pairwise(found):
        assert more.seconds < fewer.seconds
        assert more.gpu_hours > 0.95 * fewer.gpu_hours
    for way in found:
        assert way.mesh.gpus * way.micro_batch * way.accumulation == 1024
        assert sum(way.memory.values()) < 1e9 * CARDS[card].memory
        assert 0 <= way.waiting < way.step


def test_a_better_card_is_faster_and_a_longer_budget_takes_longer() -> None:
    work = work_of()
    days = {card: estimate(run(card=card), work, 0.5, Mesh(8)).seconds for card in CARDS}
    assert days["b200"] < days["h200"] < days["h100"] < days["a100"] < days["h20"]
    assert estimate(run(tokens=30_000_000_000), work, 0.5, Mesh(8)).seconds == pytest.approx(2 * days["h200"], rel=1e-3)
    assert estimate(run(), work, 0.25, Mesh()).step == pytest.approx(2 * estimate(run(), work, 0.5, Mesh()).step)


def test_links() -> None:
    cluster = Cluster.of("h100")
    assert cluster.seconds("gather", 1e9, 2) == pytest.approx(0.5 / (0.8 * 450) + 20e-6)
    assert cluster.seconds("gather", 1e9, 16) == pytest.approx((7 / 8 / 450 + 0.5 / 8 / 50) / 0.8 + 80e-6)
    assert cluster.seconds("reduce", 1e9, 16) == pytest.approx(2 * cluster.seconds("gather", 1e9, 16))
    assert cluster.seconds("next", 1e9, 4, stride=4) == pytest.approx(1 / (0.8 * 50) + 20e-6)
    assert cluster.seconds("gather", 1e9, 1) == 0
    # two of four ranks that are four apart lie in each node
    assert cluster.seconds("gather", 1e9, 4, stride=4) == pytest.approx((0.5 / 450 + 0.5 / 2 / 50) / 0.8 + 40e-6)
    assert Cluster.of("h800").seconds("gather", 1e9, 8) > cluster.seconds("gather", 1e9, 8)
    assert Cluster.of("h100", per_node=4, network=25.0).seconds("gather", 1e9, 16) > cluster.seconds("gather", 1e9, 16)


def sent(mesh: Mesh, recipe: str = "softmax-gla-340m", length: int = 4096) -> dict[str, float]:
    """Bytes of one sequence's step by direction."""
    found = dict.fromkeys(DIRECTIONS, 0.0)
    for message in messages(work_of(recipe, length), mesh, length, 1, 1):
        found[message.direction] += message.sent
    return found


def test_states_do_not_grow_with_the_length_and_keys_do() -> None:
    mesh = Mesh(4, context=4)
    assert sent(mesh)["context"] == sent(mesh, length=65_536)["context"] > 0
    assert sent(mesh, "transformer-340m", 65_536)["context"] == pytest.approx(16 * sent(mesh, "transformer-340m")["context"])


def test_a_softmax_over_heads_costs_two_numbers_a_token_and_gate_and_one_back() -> None:
    mesh, layers = Mesh(2, tensor=2), 24
    more = sent(mesh)["tensor"] - sent(mesh, "gla-340m")["tensor"]
    assert more == 2 * layers * 4096 * 4 * (2 + 1)  # a gather of two numbers, a sum of one, among two GPUs


def test_long_sequences_are_cut_in_pieces_and_models_that_do_not_fit_spread() -> None:
    """The best mesh: without context parallelism one sequence is for one GPU, and no rtx3090 holds the states of 3B parameters."""
    length = 2**17
    job = replace(run(), length=length, batch_tokens=length)
    best = ways(job, work_of(length=length), 0.5, 8)[0]
    assert (best.mesh.context, best.mesh.data) == (8, 1)
    assert ways(job, work_of(length=length), 0.5, 8, Wanted(context=1, tensor=1)) == []
    shape = replace(recipes.get("softmax-gla-340m"), model=HeadmaxConfig(mixer="gla", hidden_size=2560, num_hidden_layers=32, num_heads=8))
    big = Work.of(shape, 4096)
    found = ways(run(card="rtx3090"), big, 0.5, 8)
    assert found
    assert all(way.mesh.strategy == "fsdp" or way.mesh.tensor > 2 for way in found)
    steps = [way.step for way in found]
    assert steps[0] <= 1.02 * min(steps)
    assert steps[1:] == sorted(steps[1:])


def test_wishes_are_kept_and_slow_links_avoided() -> None:
    found = ways(run(), work_of(), 0.5, 16, Wanted("fsdp", shard=8, context=2, tensor=1))
    assert [way.mesh for way in found] == [Mesh(16, "fsdp", 8, 2, 1)]
    copies = [mesh for mesh in Wanted("fsdp", context=1).meshes(16, per_node=8) if mesh.shard]
    assert copies == [Mesh(16, "fsdp", 8), Mesh(16, "fsdp", 4, tensor=2), Mesh(16, "fsdp", 2, tensor=4)]  # each within a node
    assert found[0].mesh.options == "--parallel.strategy fsdp --parallel.shard 8 --parallel.context 2"
    slow = replace(run(), cluster=Cluster.of("h200", network=0.1))
    assert ways(slow, work_of(), 0.5, 64)[0].step > ways(run(), work_of(), 0.5, 64)[0].step
    costs = ways(slow, work_of(), 0.5, 64)[0].costs
    assert sum(cost.waiting for cost in costs.values()) > 0


def test_checkpointing_where_there_is_no_other_way() -> None:
    way = estimate(replace(run(card="rtx4090"), length=65_536), work_of(length=65_536), 0.5, Mesh(8, "fsdp"))
    assert way.checkpointing
    with pytest.raises(ValueError, match=r"one sequence of 262,144 does not fit on rtx4090: \d+ GB with checkpointing, 22 of 24 GB"):
        estimate(replace(run(card="rtx4090"), length=2**18), work_of(length=2**18), 0.5, Mesh())


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="unknown GPU 'h2000'; did you mean 'h200'"):
        Cluster.of("h2000")
    with pytest.raises(ValueError, match="--network must be positive, got 0"):
        Cluster.of("h200", network=0.0)
    for change, said in (
        ({"length": 0}, "holds no sequence of 0"),
        ({"batch_tokens": 4000}, "a batch of 4,000 tokens holds no sequence of 4,096"),
        ({"tokens": 1000}, "1,000 tokens are fewer than one batch of 524,288"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(run(), **change)
    for mesh, said in (
        ({"gpus": 0}, "gpus must be between 1 and 1024, got 0"),
        ({"gpus": 2048}, "gpus must be between 1 and 1024, got 2048"),
        ({"gpus": 6}, "6 GPUs cannot share a batch of 128 sequences of 4,096 evenly; the next batch that they can is 540,672 tokens"),
        ({"gpus": 256}, "256 GPUs cannot share a batch of 128 sequences"),
        ({"gpus": 8, "context": 3}, "parallel.context 3 times parallel.tensor 1 must divide the 8 GPUs"),
        ({"gpus": 6, "context": 3}, "sequence_length 4096 must be a multiple of parallel.context 3"),
        ({"gpus": 8, "tensor": 8}, "parallel.tensor 8 must divide the heads of GatedLinearAttention, got 4"),
        ({"gpus": 8, "shard": 2}, "parallel.shard goes with parallel.strategy fsdp"),
        ({"gpus": 8, "strategy": "fsdp", "shard": 3}, "parallel.shard 3 must divide the 8 GPUs"),
        ({"gpus": 8, "context": -1}, "parallel.context must be positive, got -1"),
    ):
        with pytest.raises(ValueError, match=said):
            estimate(run(), work_of(), 0.5, Mesh(**mesh))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted(shard=3), "parallel.shard 3 must divide the 8 GPUs"),
        (Wanted("ddp", shard=2), "parallel.shard goes with parallel.strategy fsdp"),
        (Wanted(context=3), "parallel.context 3 times parallel.tensor 1 must divide the 8 GPUs"),
        (Wanted(tensor=8), "parallel.tensor 8 must divide the heads of GatedLinearAttention, got 4"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_for_its_own_reason(wanted: Wanted, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(table.render(run(), 8, wanted))


def test_the_command_of_a_plan_trains_what_was_planned() -> None:
    def command(**changes: int) -> str:
        parts = table.render(replace(run(), **changes), 8, Wanted("fsdp", context=2, tensor=1))
        return next(part for part in parts if isinstance(part, str) and part.startswith("torchrun"))

    options = command(length=2**14, batch_tokens=2**18 + 5, tokens=10**9).split("--out RUN ")[1]
    changed = f"--tokens {10**9} --length {2**14} --batch-tokens {2**18}"
    assert options.startswith(f"{changed} --parallel.strategy fsdp --parallel.context 2 --compute.micro-batch ")
    train = recipes.get("softmax-gla-340m").train
    assert "tokens" not in command(tokens=train.token_budget, length=train.sequence_length, batch_tokens=train.batch_tokens)


def test_without_records_the_assumption_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none.json").write_text("[]")
    monkeypatch.setattr(plan, "MEASURED", tmp_path / "none.json")
    assert choose_efficiency("gla-340m", "h200", 4096, measured_steps()) == (0.5, "assumed, since no training step was measured")
    parts = list(table.render(run(batch_tokens=2**17), 16, Wanted(context=1, tensor=1)))
    lines = [part for part in parts if isinstance(part, str)]
    assert all(len(part.header) <= 7 for part in parts if isinstance(part, Table))
    assert "torchrun --nnodes 2 --nproc-per-node 8 -m headmax train softmax-gla-340m --data DATA --out RUN " in "\n".join(lines)
    assert any("assumed" in line for line in lines)
    assert any(line.startswith("* with a larger batch") for line in lines)
    assert lines[-1] == "check: this model has not been measured on this GPU"


def test_h20_is_not_h200() -> None:
    assert card_of("NVIDIA H200") == "h200"
    assert card_of("NVIDIA H20") == "h20"
    assert card_of("NVIDIA A100-SXM4-80GB") == "a100"
    assert card_of("NVIDIA H100 80GB HBM3") == "h100"
    assert card_of("NVIDIA GeForce RTX 4090") == "rtx4090"
    assert card_of("AMD EPYC, 2 threads") is None
