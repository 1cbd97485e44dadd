"""Asking for gates changes, computes and saves nothing more, and nobody keeps the gates that were not asked for."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from headmax import HeadmaxForCausalLM
from headmax.analysis import gates
from headmax.layers.mixers.base import RecurrentMixer
from tests.analysis.conftest import make_model


class Recorded(TorchDispatchMode):
    """Every operation with the sizes of what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        made = function(*arguments, **(options or {}))
        self.done.append((str(function), [tuple(x.shape) for x in torch.utils._pytree.tree_leaves(made) if isinstance(x, Tensor)]))
        return made


@pytest.fixture(scope="module")
def model() -> HeadmaxForCausalLM:
    return make_model().eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(0))


def test_logits_are_the_same_bits(model: HeadmaxForCausalLM, ids: Tensor) -> None:
    with torch.no_grad():
        off, on = model(ids), model(ids, return_gates=True)
        gates.trace(model, ids[0], ["x"] * 40, "model")
        after = model(ids)
    assert off.gates is None
    assert [gate.shape for pair in on.gates for gate in pair] == [(2, 40, 4)] * 6
    for other in (on, after):
        assert torch.equal(off.logits, other.logits)


def test_nothing_more_is_computed_or_saved(model: HeadmaxForCausalLM, ids: Tensor) -> None:
    def training_step(model: HeadmaxForCausalLM, **options: bool) -> tuple[list, list]:
        saved: list[tuple] = []
        with Recorded() as seen, saved_tensors_hooks(lambda x: saved.append((tuple(x.shape), x.dtype)) or x, lambda x: x):
            model(ids, labels=ids, use_cache=False, **options).loss.backward()
        model.zero_grad()
        return seen.done, saved

    off = training_step(model)
    assert off == training_step(model, return_gates=True)
    assert len(off[0]) > 300
    assert len(off[1]) > 100


def test_gates_go_as_soon_as_they_are_used(model: HeadmaxForCausalLM, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref] = []
    forward = RecurrentMixer.forward

    def spied(self: RecurrentMixer, *arguments: object, **options: object) -> object:
        output = forward(self, *arguments, **options)
        made.extend(weakref.ref(gate) for gate in output.gates)
        return output

    monkeypatch.setattr(RecurrentMixer, "forward", spied)
    with torch.no_grad():
        off, on = model(ids, use_cache=False), model(ids, use_cache=False, return_gates=True)
    gc.collect()
    assert off.gates is None
    assert on.gates is not None
    assert [gate() is None for gate in made] == [True] * 6 + [False] * 6
