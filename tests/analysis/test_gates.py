"""Gates of a model on a text, and what is read off them."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from headmax import HeadGateConfig
from headmax.analysis import gates
from headmax.analysis.gates import Gate, Layer, Trace
from tests.analysis.conftest import make_model


def test_statistics_of_a_gate_by_hand() -> None:
    gate = Gate(torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]))
    assert gate.winners.tolist() == [0, 1, -1, -1]  # a shared lead has no winner
    assert gate.entropy.tolist() == pytest.approx([1.5, 0.0, 1.0, 2.0])
    assert gate.load.tolist() == [0.3125, 0.5, 0.125, 0.0625]
    assert gate.wins.tolist() == [0.25, 0.25, 0.0, 0.0]
    assert gate.dead.tolist() == [False] * 4  # the last has a quarter of an even share
    assert Gate(torch.tensor([[0.6, 0.4, 0.0], [0.4, 0.59, 0.01]])).dead.tolist() == [False, False, True]
    assert Gate(torch.ones(3, 1)).winners.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "uniform"])
@pytest.mark.parametrize("scale", [1.0, "heads"])
def test_shares_are_the_models_gates_over_their_scale(kind: str, scale: float | str) -> None:
    model = make_model(head_gate=HeadGateConfig(kind=kind, scale=scale, init_std=1.0)).eval()
    ids = torch.randint(512, (50,))
    found = gates.trace(model, ids, ["x"] * 50, "model")
    exact = model(ids[None], return_gates=True).gates
    factor = 4.0 if scale == "heads" else 1.0
    for layer, (read, write) in zip(found.layers, exact, strict=True):
        torch.testing.assert_close(layer.read.shares * factor, read[0])
        torch.testing.assert_close(layer.write.shares * factor, write[0])
        assert (layer.read.winners == -1).all() == (kind == "uniform")
        torch.testing.assert_close(
            layer.agreement(slice(3, 7), slice(9)), torch.einsum("ih,jh->ij", read[0, 3:7], write[0, :9]) / factor**2
        )


def test_attention_layers_and_missing_gates_are_left_out() -> None:
    model = make_model(mixer=["attention", "gla", "retnet"], head_gate=HeadGateConfig(read=False))
    found = gates.trace(model, torch.arange(9), list("abcdefghi"), "hybrid")
    assert [(layer.index, layer.mixer, layer.read) for layer in found.layers] == [(1, "gla", None), (2, "retnet", None)]
    with pytest.raises(ValueError, match="layer 1: agreement needs a read and a write gate"):
        found.layers[0].agreement()


def test_what_cannot_be_traced_is_refused() -> None:
    with pytest.raises(ValueError, match="plain: the model has no head gates \\(head_gate is None\\); take one of a softmax recipe"):
        gates.trace(make_model(head_gate=None), torch.arange(3), list("abc"), "plain")
    with pytest.raises(ValueError, match="ids must be \\[time > 0\\] with a text for each, got \\[0\\] and 0 texts"):
        gates.trace(make_model(), torch.arange(0), [], "m")
    with pytest.raises(ValueError, match="token 600 exceeds the model's vocabulary of 512"):
        gates.trace(make_model(), torch.tensor([600]), ["x"], "m")


def test_pieces_make_up_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "  Heads compete,\n\tonce   to write. "
    ids, pieces = gates.encode(tokenizer, text)
    assert "".join(pieces) == text
    assert len(ids) == len(pieces)
    _, pieces = gates.encode(tokenizer, "λ→☃")  # the snowman is three tokens: its text, and the names of two bytes
    assert all(pieces)
    assert {"λ", "☃"} <= set(pieces)


def test_the_comparison_is_that_of_all_pairs() -> None:
    torch.manual_seed(0)

    def layer(index: int, heads: int) -> Layer:
        return Layer(index, "gla", *(Gate(torch.randn(20, heads).softmax(-1)) for _ in range(2)))

    first = Trace("a", ["x"] * 20, [layer(0, 4), layer(1, 4)], "softmax", "query")
    second = Trace("b", ["x"] * 20, [layer(1, 8)], "softmax", "query")
    (only,) = gates.compare(first, second)
    a, b = first.layers[1], second.layers[0]
    assert only.layer == 1
    assert only.agreement == pytest.approx(float((a.agreement() - b.agreement()).square().mean().sqrt()))
    assert only.read == pytest.approx(float(b.read.entropy.mean() - a.read.entropy.mean()))
    permuted = Layer(1, "gla", Gate(a.read.shares.flip(1)), Gate(a.write.shares.flip(1)))
    assert gates.compare(first, Trace("c", ["x"] * 20, [permuted], "softmax", "query"))[0].agreement == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="a and d split the text into different tokens"):
        gates.compare(first, Trace("d", ["y"] * 20, [], "softmax", "query"))


def test_checkpoint_in_trace_out(checkpoints: dict[str, Path]) -> None:
    found = gates.of_checkpoint(checkpoints["decided"], "The heads compete for every token.", name="decided", most=6)
    assert len(found.tokens) == 6
    assert "".join(found.tokens) == "The heads compete for every token."[: len("".join(found.tokens))]
    assert found.name == "decided"
    assert len(found.layers) == 3
