"""A replayed micro-step adds the gradients that it would have added, with operators on the same memory in the place of a CUDA graph."""

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from headmax.train.graph import Replayed, ReplayedUpdate, side_stream
from headmax.train.optim import clip, step_unless
from headmax.train.parallel import World, graphed
from headmax.train.trainer import Trainer
from tests.train.small import train, train_config

MOMENTS: dict[Any, dict[str, Tensor]] = {}
"""Of an optimizer that a test replays."""


class Tape(TorchDispatchMode):
    """The operators that ran, to run again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        made = function(*arguments, **options or {})
        self.calls.append((function, *tree_map_only(Tensor, Tensor.detach, (arguments, options or {}, made))))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        for function, arguments, options, made in self.calls:
            for place, x in zip(tree_leaves(made), tree_leaves(function(*arguments, **options)), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != x.data_ptr():
                    place.copy_(x)


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        pass


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.ModuleDict]:
    made = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})

    @contextlib.contextmanager
    @torch.no_grad()
    def graph(tape: Tape, **_: Any) -> Iterator[None]:
        """A capture computes nothing."""
        kept = [x for p in made.parameters() for x in (p, p.grad, *MOMENTS.get(p, {}).values()) if x is not None]
        before = [x.clone() for x in kept]
        with torch.enable_grad(), tape:
            yield
        for x, old in zip(kept, before, strict=True):
            x.copy_(old)

    side_stream.cache_clear()
    fakes = {"graph": graph, "CUDAGraph": Tape, "Stream": lambda device: Stream(), "current_stream": Stream, "current_device": lambda: 0}
    fakes |= {"stream": lambda stream: contextlib.nullcontext(), "graph_pool_handle": lambda: None}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    yield made
    side_stream.cache_clear()


def test_gradients_of_any_shapes_in_any_order(model: nn.ModuleDict) -> None:
    """Shapes that come in the middle of a step, steps of other shapes, a parameter without a gradient, gradients that were NaN."""

    def compute(x: Tensor, items: Tensor) -> Tensor:
        loss = model["used"](x).square().sum() / items
        loss.backward()
        return loss.detach()

    replayed, random = Replayed(compute, model.parameters()), torch.Generator().manual_seed(0)
    for sizes in ([2, 3, 3], [3, 2], [2], [5, 2, 3]):
        batches = [(torch.randn(n, 4, generator=random), torch.tensor(float(sum(sizes)))) for n in sizes]
        expected = torch.stack([compute(*batch) for batch in batches])
        wanted = [p.grad for p in model.parameters()]
        model.zero_grad()
        torch.testing.assert_close(torch.stack([replayed(*batch).clone() for batch in batches]), expected)
        for p, gradient in zip(model.parameters(), wanted, strict=True):
            assert (p.grad is None) == (gradient is None)
            if p.grad is not None and gradient is not None:
                torch.testing.assert_close(p.grad, gradient)
                p.data.sub_(0.1 * gradient)
                p.grad.fill_(float("nan"))
        model.zero_grad()
    kinds = {(first, shapes[0][0]) for first, shapes in replayed.captured}
    assert kinds == {(True, 2), (True, 3), (True, 5), (False, 2), (False, 3)}


def test_updates_are_those_of_the_optimizer(model: nn.ModuleDict, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any learning rate; none where a loss is not finite; and the optimizer's own settings are as they were."""
    twin = copy.deepcopy(model)
    random = torch.Generator().manual_seed(0)

    def trainer(part: nn.ModuleDict) -> tuple[Any, Any, AdamW]:
        optimizer = AdamW(part.parameters(), lr=0.5, fused=True)

        def compute(x: Tensor) -> Tensor:
            loss = part["used"](x).square().sum()
            loss.backward()
            return loss.detach()

        def advance(loss: Tensor, lr: Tensor) -> Tensor:
            norm = clip(part, 1.0)
            step_unless(optimizer, 1.0 - norm.isfinite().float(), lr)
            return torch.stack([loss, norm])

        return compute, advance, optimizer

    compute, advance, optimizer = trainer(model)
    replayed = Replayed(compute, model.parameters())
    update = ReplayedUpdate(advance, optimizer, replayed)
    monkeypatch.setattr("tests.train.test_graph.MOMENTS", optimizer.state)
    straight, stepped, _ = trainer(twin)
    for n, size in enumerate([2, 3, 3, 2, 5, 3, 2]):
        x = torch.randn(size, 4, generator=random)
        if n == 4:
            x[0, 0] = float("inf")
        lr = torch.tensor(0.01 * (n + 1))
        expected = stepped(straight(x), lr)
        torch.testing.assert_close(update(replayed(x), lr), expected, equal_nan=True)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    assert update.captured is not None
    assert [(group["capturable"], group["lr"]) for group in optimizer.param_groups] == [(False, 0.5)]


@pytest.mark.parametrize(
    ("changes", "kind", "size", "wanted"),
    [
        ({}, "cuda", 1, True),
        ({}, "cuda", 2, False),
        ({}, "cpu", 1, False),
        ({"compute_cuda_graph": True}, "cuda", 1, True),
        ({"compute_cuda_graph": False}, "cuda", 1, False),
        ({"documents": "separate"}, "cuda", 1, False),
        ({"compute_activation_checkpointing": True}, "cuda", 1, False),
    ],
)
def test_graphs_where_they_can_be(changes: dict[str, Any], kind: str, size: int, wanted: bool) -> None:
    assert graphed(train_config(**changes), World(0, size, torch.device(kind), None)) == wanted


@pytest.mark.parametrize(("kind", "size", "said"), [("cuda", 2, "2 processes"), ("cpu", 1, "device cpu")])
def test_graphs_that_were_asked_for_and_cannot_be_are_refused(kind: str, size: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"compute.cuda_graph does not go with {said}: leave it out"):
        graphed(train_config(compute_cuda_graph=True), World(0, size, torch.device(kind), None))


def test_a_trainer_ends_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it the optimizer and all graphs, though nobody collects garbage."""
    begin, seen = Trainer.__init__, list[weakref.ref[Trainer]]()

    def noted(self: Trainer, *arguments: Any) -> None:
        begin(self, *arguments)
        self.replayed = Replayed.__new__(Replayed)
        self.replayed.function = self.add_gradients  # as on a GPU
        monkeypatch.setattr(Replayed, "__call__", lambda replayed, *given: replayed.function(*given))
        seen.append(weakref.ref(self))

    monkeypatch.setattr(Trainer, "__init__", noted)
    gc.disable()
    try:
        train(tmp_path, max_steps=2)
        assert [reference() for reference in seen] == [None]
    finally:
        gc.enable()
