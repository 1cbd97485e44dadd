"""A trained model gets gates: first it computes what it did, then they learn."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM, softmaxify

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 64}
FLOOR = 1e-4
"""What the norm of the gates' gradient must exceed on a real batch, so that there is something to learn from."""


@pytest.mark.parametrize("mixer", ["linear", "retnet", "gla", "gated_deltanet", ["gla", "attention"]])
@pytest.mark.parametrize("heads", [3, 4])
def test_the_model_computes_what_it_did_before(mixer: str | list[str], heads: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = SMALL | {"num_heads": heads, "hidden_size": 16 * heads}
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer=mixer, **sizes)).eval()
    ids = torch.randint(0, 64, (2, 70))
    before = model(ids).logits
    assert softmaxify(model) is model
    after = model(ids, return_gates=True)
    assert (after.logits - before).abs().max() <= 1e-6 * before.abs().max()
    assert torch.allclose(after.gates[0][0], torch.ones(2, 70, heads))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.head_gate == HeadGateConfig(scale="heads", init_std=0.0, read_position="after_norm")
    assert torch.equal(again(ids).logits, after.logits)


def text(generator: torch.Generator, count: int) -> torch.Tensor:
    """Rows in which a marker says which earlier token comes back: something for a model to learn and for heads to share out."""
    rows = torch.randint(2, 34, (count, 48), generator=generator)
    rows[:, 24:] = rows[:, :24]
    return rows + 30 * (torch.arange(48) % 2)


def test_gates_trained_alone_lower_the_held_out_loss_of_a_trained_model() -> None:
    torch.manual_seed(0)
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **SMALL)).train()
    generator, held_out = torch.Generator().manual_seed(0), text(torch.Generator().manual_seed(1), 128)

    def fit(steps: int, rate: float) -> None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
        for _ in range(steps):
            batch = text(generator, 32)
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def measure() -> float:
        with torch.no_grad():
            return model(held_out, labels=held_out).loss.item()

    fit(150, 3e-3)
    trained = measure()
    softmaxify(model, train="gates")
    assert measure() == pytest.approx(trained, rel=1e-5)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(learning) == 4
    assert all(".head_gate." in name for name in learning)
    model(held_out, labels=held_out).loss.backward()
    assert sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5 > FLOOR
    model.zero_grad()
    fit(60, 3e-2)
    assert measure() < trained - 1e-3


def test_what_cannot_be_softmaxified_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="knows headmax models, got Linear"):
        softmaxify(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no recurrent layer"):
        softmaxify(HeadmaxForCausalLM(HeadmaxConfig(mixer="attention", **SMALL)))
    model = softmaxify(HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **SMALL)))
    with pytest.raises(ValueError, match="has gates already"):
        softmaxify(model)
    with pytest.raises(ValueError, match="train must be 'all' or 'gates'"):
        softmaxify(model, train="heads")  # type: ignore[arg-type]
