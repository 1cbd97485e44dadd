"""Settings, schedule, parameter groups and the split of a batch."""

import math
from dataclasses import replace

import pytest
import torch

from headmax import HeadmaxForCausalLM, recipes
from headmax.train import OptimConfig, ParallelConfig, ScheduleConfig, TrainConfig
from headmax.train.config import fixed_settings
from headmax.train.feed import Feed, count_targets, micro_batches
from headmax.train.optim import build_optimizer, learning_rate
from headmax.train.parallel import World
from tests.train.small import Walks, model_config, train_config


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, size, torch.device("cpu"), None)


def test_the_papers_schedule() -> None:
    config = recipes.get("softmax-gla-340m").train
    assert (config.batch_size, config.steps) == (128, 28_611)
    at = {tokens: learning_rate(config, tokens) for tokens in (0, 250_000_000, 500_000_000, 7_750_000_000, 15_000_000_000, 16_000_000_000)}
    expected = [3e-5, (3e-5 + 1e-3) / 2, 1e-3, (3e-5 + 1e-3) / 2, 3e-5, 3e-5]
    assert list(at.values()) == pytest.approx(expected)
    rates = [learning_rate(config, step * config.batch_tokens) for step in range(config.steps)]
    assert max(rates) == pytest.approx(1e-3, rel=1e-5)
    assert rates[-1] == pytest.approx(3e-5, rel=1e-5)


@pytest.mark.parametrize("mixer", ["linear", "retnet", "gla", "gated_deltanet", "kda", "mamba2", "attention"])
def test_weight_decay_is_on_matrices_alone(mixer: str) -> None:
    gate = {} if mixer != "attention" else {"head_gate": None}
    model = HeadmaxForCausalLM(model_config(mixer=mixer, **gate))
    decayed, free = build_optimizer(model, OptimConfig(weight_decay=0.3)).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    kinds = {names[id(p)].split(".")[-1] for p in free["params"]}
    assert all("norm" in names[id(p)] or names[id(p)].split(".")[-1] in ("bias", "A_log", "dt_bias", "D") for p in free["params"])
    steps = {"A_log", "dt_bias"}
    assert {"weight"} | {"gated_deltanet": steps, "kda": steps, "mamba2": {*steps, "D", "bias"}, "gla": {"bias"}}.get(mixer, set()) == kinds
    assert not any("norm" in names[id(p)] for p in decayed["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_tokens": 100}, "batch_tokens 100 must be a multiple of sequence_length 24"),
        ({"max_steps": 0}, "max_steps must be positive, got 0"),
        ({"checkpoint_every": -1}, "checkpoint_every must not be negative, got -1"),
        ({"optim_lr": 0.0}, "optim.lr must be positive, got 0.0"),
        ({"optim_lr": math.inf}, "optim.lr must be finite, got inf"),
        ({"optim_betas": (0.9, math.nan)}, r"optim.betas must be finite, got \(0.9, nan\)"),
        ({"optim_betas": (0.9, 1.0)}, r"optim.betas must be in \[0, 1\), got"),
        ({"schedule_final_lr": math.inf}, "schedule.final_lr must be finite, got inf"),
        ({"gate_balance": math.inf}, "gate_balance must be finite, got inf"),
        ({"sequence_length": 1}, "sequence_length must be at least 2, one token to read and one to predict, got 1"),
        ({"parallel_shard": 2}, "parallel.shard goes with parallel.strategy fsdp, got 'ddp'"),
        ({"parallel_context": 0}, "parallel.context must be positive, got 0"),
        ({"parallel_tensor": 0}, "parallel.tensor must be positive, got 0"),
        ({"parallel_context": 5}, "sequence_length 24 must be a multiple of parallel.context 5"),
        ({"parallel_context": 2, "gate_balance": 0.1}, "gate_balance does not go with parallel.context"),
        ({"parallel": "zero"}, "parallel.strategy must be ddp or fsdp, got 'zero'"),
        ({"seed": 2**63}, "seed must be at most 1000000000000000000, got 9223372036854775808"),
        ({"compute_cuda_graph": True, "documents": "separate"}, "compute.cuda_graph does not go with documents separate"),
        ({"compute_cuda_graph": True, "compute_activation_checkpointing": True}, "does not go with compute.activation_checkpointing"),
        ({"schedule_warmup_tokens": 10_000}, "schedule.warmup_tokens must be between 0 and token_budget 9600, got 10000"),
    ],
)
def test_bad_settings_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_config(**change)


def test_parallel_may_be_the_strategys_name_as_in_0_1() -> None:
    assert train_config(parallel="fsdp") == train_config(parallel_strategy="fsdp")
    assert train_config(parallel="fsdp").parallel == ParallelConfig("fsdp")


def test_fixed_settings_are_those_that_change_the_result() -> None:
    names = set(fixed_settings(TrainConfig()))
    assert {"seed", "token_budget", "batch_tokens", "optim.lr", "optim.betas", "schedule.warmup_tokens", "compute.precision"} <= names
    assert not names & {"max_steps", "checkpoint_every", "device", "parallel.strategy", "log.wandb", "eval.every", "compute.micro_batch"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("limit", [1, 3, 4, 5, 100])
def test_every_sample_of_a_step_is_taken_once(ranks: int, limit: int) -> None:
    shares = [micro_batches(24, 12, world(rank, ranks), limit) for rank in range(ranks)]
    assert [i for share in shares for indices in share for i in indices] == list(range(24, 36))
    sizes = {len(indices) for share in shares for indices in share}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= limit
    assert len(shares[0]) == math.ceil(12 / ranks / limit)


def test_a_prime_share_is_not_taken_one_by_one() -> None:
    assert sorted(map(len, micro_batches(0, 31, world(), 8))) == [7, 8, 8, 8]


def test_a_batch_that_does_not_split_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_tokens 192 is 8 sequences: must be a multiple of 3, for 3 processes"):
        Feed(Walks(), train_config(), world(0, 3))
    with pytest.raises(ValueError, match="sequence_length is 12, but samples have 24 tokens"):
        Feed(Walks(), train_config(sequence_length=12), world())


def test_batches_come_in_order_and_end() -> None:
    feed = Feed(Walks(), train_config(), world())
    steps = list(feed.steps(3, 7))
    assert len(steps) == 4
    for step, batches in enumerate(steps, 3):
        ids = torch.cat([batch.input_ids for batch in batches])
        assert torch.equal(ids, Walks().batch(range(8 * step, 8 * step + 8)).input_ids)
    assert list(feed.steps(7, 7)) == list(feed.steps(9, 7)) == []


@pytest.mark.parametrize("separate", [False, True])
def test_predicted_tokens_are_those_the_model_counts(separate: bool) -> None:
    batch = Walks(separate=separate).batch(range(3))
    model = HeadmaxForCausalLM(model_config()).train()
    mean = model(batch.input_ids, labels=batch.labels, cu_seqlens=batch.packing).loss
    total = model(batch.input_ids, labels=batch.labels, cu_seqlens=batch.packing, num_items_in_batch=1).loss
    assert count_targets(batch) == 3 * 23 - 3 * separate
    assert (total / mean).item() == pytest.approx(count_targets(batch))


def test_a_schedule_without_warm_up() -> None:
    config = replace(train_config(), schedule=ScheduleConfig(warmup_tokens=0, final_lr=0.0))
    assert learning_rate(config, 0) == config.optim.lr
    assert learning_rate(config, config.token_budget) == pytest.approx(0.0)
