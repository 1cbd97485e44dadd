"""A model whose gates nobody asks for computes, saves and takes what one without any way to ask would."""

import copy
import gc
import inspect
import math
import textwrap
import time
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from headmax import HeadmaxForCausalLM
from headmax.analysis import gates
from headmax.layers.mixers.base import RecurrentMixer
from headmax.models.modeling import HeadmaxModel
from tests.analysis.conftest import make_model


def rewritten(function: Callable, changes: dict[str, str]) -> Callable:
    """The function, had its source been another."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    exec(source, inspect.getmodule(function).__dict__, made)
    return made[function.__name__]


PAIRS = 400
COLLECTING = {"            if return_gates:\n                gates.append(gate)\n": "", "gates=tuple(gates) if return_gates else None,": ""}
BARE = {
    HeadmaxModel: rewritten(HeadmaxModel.forward, COLLECTING),
    RecurrentMixer: rewritten(RecurrentMixer.forward, {"new_state, (read, write))": "new_state, None)"}),
}
"""The two methods that hand gates on, as if they did not."""


def bare(model: HeadmaxForCausalLM) -> HeadmaxForCausalLM:
    """A copy that has no way to hand gates on."""
    made = copy.deepcopy(model)
    for module in made.modules():
        for owner, forward in BARE.items():
            if isinstance(module, owner):
                module.forward = MethodType(forward, module)
    return made


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
        after, never = model(ids), bare(model)(ids)
    assert off.gates is None
    assert [gate.shape for pair in on.gates for gate in pair] == [(2, 40, 4)] * 6
    for other in (on, after, never):
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
    assert off == training_step(bare(model))
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


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 64])
def test_no_slowdown_is_measurable(model: HeadmaxForCausalLM, length: int) -> None:
    """One model with three sets of methods in turns: its own, the bare ones, and its own again, to show what no difference looks like."""
    tokens, times = torch.zeros(1, length, dtype=torch.int64), []
    own = {owner: rewritten(owner.forward, {}) for owner in BARE}
    turned = [(module, owner) for module in model.modules() for owner in BARE if isinstance(module, owner)]

    def seconds(methods: dict[type, Callable]) -> float:
        """By the thread's own clock, the best of five calls."""
        for module, owner in turned:
            module.forward = MethodType(methods[owner], module)
        taken = []
        for _ in range(5):
            begin = time.thread_time()
            model(tokens, use_cache=False)
            taken.append(time.thread_time() - begin)
        return min(taken)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        for n in range(PAIRS + 10):
            turn = [(n + m) % 3 for m in range(3)][:: 1 if n % 2 else -1]
            taken = {m: seconds((own, BARE, own)[m]) for m in turn}
            times.append([taken[m] for m in range(3)])
    torch.set_num_threads(threads)
    for module, _ in turned:
        del module.forward
    off, without, again = torch.tensor(times[10:]).T
    middle, spread = PAIRS // 2, round(0.98 * math.sqrt(PAIRS))
    for name, ratios in (("with over without", off / without), ("with over with", off / again)):
        low, median, high = ratios.sort().values[[middle - spread, middle, middle + spread]].tolist()  # the median's interval, by rank
        print(f"{length} tokens, {name}: {median:.4f}, 95% interval {low:.4f} to {high:.4f}")
        assert low < 1.005, "slower, by more than the measurement allows for"
        assert high - low < 0.05, "too noisy to tell"
