"""What a run measures: gradients of the whole batch, validation, gate health, stability, and where it is written."""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from headmax import HeadmaxForCausalLM, HeadmaxModel, recipes
from headmax.data.mqar import MQAR
from headmax.train import LogConfig, OptimConfig
from headmax.train.evaluate import GateHealth, balance, evaluate
from headmax.train.metrics import Log, read_lines, scalars, stability, summarize
from headmax.train.parallel import World
from headmax.train.parallelize import Replica
from headmax.train.trainer import Trainer, fit
from tests.train.small import Walks, losses, model_config, train, train_config

ALONE = World(0, 1, torch.device("cpu"), None)


def first_loss(out: Path, source: Walks, **changes) -> tuple[float, float]:
    train(out, source=source, max_steps=1, **changes)
    ((_, loss, norm),) = losses(out)
    return loss, norm


@pytest.mark.parametrize("separate", [False, True])
def test_micro_batches_add_up_to_the_whole_batch(separate: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = HeadmaxForCausalLM(model_config()).train()
    batch = Walks(separate=separate).batch(range(8))
    loss = model(batch.input_ids, labels=batch.labels, cu_seqlens=batch.packing).loss
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    for size in (1, 2, 3, 8):
        found = first_loss(tmp_path / str(size), Walks(separate=separate), compute_micro_batch=size)
        assert found == pytest.approx((loss.item(), norm.item()), rel=1e-5)


@pytest.mark.parametrize("separate", [False, True])
def test_uneven_micro_batches_have_the_gradients_of_the_whole_batch(separate: bool, tmp_path: Path) -> None:
    source, config = Walks(separate=separate), train_config(compute_micro_batch=3)
    trainer = Trainer(model_config(), config, source, None, tmp_path, ALONE, {}, show=lambda line: None)
    batches = trainer.feed.read(0)
    assert sorted(batch.input_ids.numel() // source.length for batch in batches) == [2, 3, 3]
    for micro_batch in trainer.micro_batches(batches):
        trainer.add_gradients(*micro_batch)
    trainer.close()
    whole = HeadmaxForCausalLM(model_config()).train()
    whole.load_state_dict(trainer.model.state_dict())
    batch = source.batch(range(8))
    whole(batch.input_ids, labels=batch.labels, cu_seqlens=batch.packing).loss.backward()
    for (name, p), q in zip(whole.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks, and knows
def test_activation_checkpointing_and_compilation_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = first_loss(tmp_path / "plain", Walks())
    assert first_loss(tmp_path / "again", Walks(), compute_activation_checkpointing=True) == plain
    compiled = []
    compile_blocks = HeadmaxModel.compile_blocks
    monkeypatch.setattr(HeadmaxModel, "compile_blocks", lambda self: compiled.append(compile_blocks(self, backend="eager")))
    assert first_loss(tmp_path / "compiled", Walks(), compute_compile=True) == pytest.approx(plain, rel=1e-5)
    assert first_loss(tmp_path / "uneven", Walks(), compute_compile=True, compute_micro_batch=3) == pytest.approx(plain, rel=1e-5)
    assert len(compiled) == 2


def test_validation_is_the_mean_over_held_out_tokens(tmp_path: Path) -> None:
    config = train_config(eval_sequences=6)
    model = HeadmaxForCausalLM(model_config())
    found, gates = evaluate(Replica(model, config, ALONE), Walks(seed=5), config, ALONE)
    batch = Walks(seed=5).batch(range(6))
    output = model.eval()(batch.input_ids, labels=batch.labels, return_gates=True)
    assert found["loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(output.loss.item()), rel=1e-5)
    assert gates["1/write"]["share"] == pytest.approx(output.gates[1][1].mean((0, 1)).tolist(), rel=1e-4)
    config = train_config(eval_sequences=6, eval_accuracy=True)
    with_accuracy, _ = evaluate(Replica(model, config, ALONE), Walks(seed=5), config, ALONE)
    right = (output.logits[:, :-1].argmax(-1) == batch.labels[:, 1:]).float().mean().item()
    assert with_accuracy["accuracy"] == pytest.approx(right)
    assert with_accuracy["loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert model.training


def test_gate_health() -> None:
    even, winner = torch.full((2, 5, 4), 0.25), torch.zeros(2, 5, 4)
    winner[..., 2] = 3.0  # a gate's scale does not matter
    health = GateHealth()
    health.add(((even, winner), None, (None, even)))
    found = health.read(ALONE)
    assert set(found) == {"0/read", "0/write", "2/write"}
    assert found["0/read"] == {"entropy": pytest.approx(1.0), "share": [0.25] * 4, "dead": []}
    assert found["0/write"] == {"entropy": 0.0, "share": [0.0, 0.0, 1.0, 0.0], "dead": [0, 1, 3]}
    assert balance(((even, even),)).item() == pytest.approx(0.0)
    assert balance(((even, winner),)).item() == pytest.approx(1.5)  # (0 + 4 - 1) / 2


def test_the_balance_loss_evens_the_heads_out(tmp_path: Path) -> None:
    gate = {"head_gate": {"init_std": 3.0}}

    def unevenness(out: Path, weight: float) -> float:
        train(out, model=gate, gate_balance=weight, eval_every=30, max_steps=30, compute_micro_batch=8, optim_lr=0.03)
        gates = list(read_lines(out / "metrics.jsonl"))[-1]["gates"]
        return sum(4 * sum(p * p for p in found["share"]) - 1 for found in gates.values()) / len(gates)

    assert unevenness(tmp_path / "with", 1.0) < 0.5 * unevenness(tmp_path / "without", 0.0)


def test_spikes_and_peaks_are_counted_by_their_definition() -> None:
    random = torch.Generator().manual_seed(0)
    lines = [
        {"step": n, "loss": 2.0 + 0.1 * torch.randn((), generator=random).item(), "grad_norm": 1.0, "skipped": False} for n in range(1, 301)
    ]
    assert stability(lines) == {"loss_spikes": [], "gradient_peaks": []}
    lines[149]["loss"] = 3.0
    lines[199]["grad_norm"] = 3.1
    lines[249] |= {"loss": None, "grad_norm": None, "skipped": True}
    lines[20]["loss"] = 90.0  # too early to be judged
    assert stability(lines)["gradient_peaks"] == [200]
    assert stability(lines)["loss_spikes"] == [150]
    assert stability(lines[:50]) == {"loss_spikes": [], "gradient_peaks": []}


def test_the_summary_and_the_lines(tmp_path: Path) -> None:
    train(tmp_path, max_steps=4, eval_every=2, validation=Walks(seed=1))
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for name in ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "memory", "seconds"):
        assert all(isinstance(line[name], int | float) for line in lines)
    assert lines[3]["tokens"] == 768
    assert [sorted(line["validation"]) for line in lines if "validation" in line] == [["loss", "perplexity"]] * 2
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == summarize(tmp_path, torch.device("cpu"))
    assert (summary["steps"], summary["skipped_steps"], summary["validation"]) == (4, [], lines[3]["validation"])
    assert summary["stability"]["loss_spikes"]["count"] == 0
    assert dict(scalars(lines[1]))["gates/0/read/entropy"] == lines[1]["gates"]["0/read"]["entropy"]


def test_every_timestamp_is_on_the_clock_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's clock gives events, which only know how far they are from other events."""

    class Event:
        def __init__(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, later: "Event") -> float:
            return 1e3 * (later.at - self.at)

    monkeypatch.setattr("headmax.train.trainer.timestamp", lambda device: Event())
    train(tmp_path, max_steps=6, checkpoint_every=2, eval_every=3, validation=Walks(seed=1))
    assert all(line["seconds"] > 0 for line in read_lines(tmp_path / "metrics.jsonl"))


def test_json_stays_json_where_numbers_are_not_finite(tmp_path: Path) -> None:
    log = Log(tmp_path, train_config().log, after=0)
    log.write({"step": 1, "loss": float("nan"), "skipped": True, "gates": {"0/read": {"share": [float("inf"), 0.5]}}})
    log.close()
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 1, "loss": null, "skipped": true, "gates": {"0/read": {"share": [null, 0.5]}}}\n'


@pytest.mark.parametrize(("option", "package"), [({"log_tensorboard": True}, "tensorboard"), ({"log_wandb": "project"}, "wandb")])
def test_a_tracker_that_is_not_installed_is_named(option: dict, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package or name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"pip install {package}"):
        train(tmp_path, max_steps=1, **option)


def test_folders_of_the_same_name_are_different_runs_to_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.chdir(tmp_path)
    for folder in (Path("a/gla"), Path("b/gla"), tmp_path / "a/gla"):
        folder.mkdir(parents=True, exist_ok=True)
        Log(folder, LogConfig(wandb="project"), after=0).close()
    first, other, again = (call.kwargs for call in wandb.init.call_args_list)
    assert first["name"] == other["name"] == "gla"
    assert first["id"] == again["id"] != other["id"]


def test_a_vocabulary_that_is_too_small_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size is 40, but the data has 48 tokens"):
        train(tmp_path, model={"vocab_size": 40})


def test_a_balance_loss_without_gates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gate_balance is 0\.1, but the model has no head gates"):
        train(tmp_path, model={"head_gate": None}, gate_balance=0.1)


def test_recall_is_learnt_and_its_accuracy_reported(tmp_path: Path) -> None:
    recipe = recipes.get("mqar-softmax-linear").on(MQAR(num_pairs=2, vocab_size=8))
    torch.set_num_threads(1)
    train = replace(recipe.train, token_budget=60 * recipe.train.batch_tokens, device="cpu", optim=OptimConfig(lr=1e-2))
    source, held_out = recipe.sources(None)
    fit(recipe.model, train, source, tmp_path, validation=held_out)
    assert list(read_lines(tmp_path / "metrics.jsonl"))[-1]["validation"]["accuracy"] > 0.9
