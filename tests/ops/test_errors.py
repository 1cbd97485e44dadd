"""Wrong input raises ValueError naming the argument, what it got and what it needs."""

import itertools
from dataclasses import replace

import pytest
import torch

from headmax.ops import Packing, head_gate, registry
from headmax.ops.spec import Case

from .oracle import SPECS

CASE = Case(batch=2, time=6, heads=2, key=4, value=3, gates="both", initial_state=True)
ALL = list(SPECS)
GROUPED = [name for name in SPECS if name != "gla"]


def call(name: str, **changes: object) -> None:
    spec = SPECS[name]
    spec.function(**(spec.inputs(CASE) | changes))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(2, 6, 8)}, r"q must be \[batch, time, heads, key\], got \[2, 6, 8\]"),
        ({"q": 3}, r"q must be \[batch, time, heads, key\], got int"),
        ({"k": torch.randn(2, 6, 2, 5)}, r"k must be \[batch, time, heads, key\] = \[2, 6, 2, 4\], got \[2, 6, 2, 5\]"),
        ({"v": torch.randn(2, 6, 3, 3)}, r"v must (be|have).* got"),
        ({"v": torch.randn(2, 5, 2, 3)}, r"v must be \[batch, time, heads, value\] = \[2, 6, 2, 3\], got \[2, 5, 2, 3\]"),
        ({"q": torch.ones(2, 6, 2, 4, dtype=torch.int64)}, r"q must be float64, float32, float16 or bfloat16, got torch.int64"),
        ({"v": torch.randn(2, 6, 2, 3).bfloat16()}, r"v must share q's dtype torch.float32, got torch.bfloat16"),
        ({"read_gate": torch.rand(2, 6, 4)}, r"read_gate must be \[batch, time, heads\] = \[2, 6, 2\], got \[2, 6, 4\]"),
        ({"write_gate": torch.rand(2, 6)}, r"write_gate must be \[batch, time, heads\] = \[2, 6, 2\], got \[2, 6\]"),
        ({"initial_state": torch.rand(1, 2, 4, 3)}, r"initial_state must be \[batch, heads, key, value\] = \[2, 2, 4, 3\]"),
        ({"log_decay": torch.rand(2, 6, 5)}, r"log_decay must be \[batch, time, heads(, key)?\]"),
        ({"cu_seqlens": torch.tensor([0, 6])}, r"cu_seqlens packs sequences into batch 1, got batch 2"),
        ({"backend": "chunkwize"}, r"unknown backend 'chunkwize'; did you mean 'chunkwise'"),
        ({"q": torch.randn(2, 6, 2, 4, device="meta")}, r"must be on meta, as the other inputs are, got cpu"),
        ({"q": torch.randn(2, 6, 0, 4)}, r"must have no empty axis"),
    ],
)
def test_recurrences_name_the_argument(name: str, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        call(name, **change)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        (torch.tensor([0, 3, 5]), "must end at time = 6, got 5"),
        (torch.tensor([1, 6]), "must rise from 0"),
        (torch.tensor([0, 4, 3, 6]), "must rise from 0"),
        (torch.tensor([0.0, 6.0]), "must be a 1-D integer tensor, got torch.float32"),
        (torch.tensor([[0, 6]]), r"must be a 1-D integer tensor, got torch.int64 of shape \[1, 2\]"),
    ],
)
def test_boundaries_are_checked(boundaries: torch.Tensor, message: str) -> None:
    inputs = SPECS["gla"].inputs(Case(time=6, key=4, value=3))
    with pytest.raises(ValueError, match=f"cu_seqlens {message}"):
        SPECS["gla"].function(**inputs, cu_seqlens=boundaries)


def test_packed_states_are_counted_by_sequence() -> None:
    inputs = SPECS["gla"].inputs(Case(time=6, key=4, value=3, initial_state=True))
    with pytest.raises(ValueError, match=r"initial_state must be \[sequences, heads, key, value\] = \[2, 2, 4, 3\], got \[1, 2, 4, 3\]"):
        SPECS["gla"].function(**inputs, cu_seqlens=Packing([0, 2, 6]))


@pytest.mark.parametrize("name", GROUPED)
def test_value_heads_are_a_multiple(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: v must have a multiple of q's 2 heads, got 3"):
        call(name, v=torch.randn(2, 6, 3, 3))


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        *itertools.product(GROUPED, ("log_decay", "read_gate", "write_gate", "initial_state")),
        *((name, "beta") for name in GROUPED if name != "linear_attention"),
    ],
)
def test_value_heads_have_their_own_decays_gates_and_states(name: str, argument: str) -> None:
    inputs = SPECS[name].inputs(replace(CASE, value_heads=4))
    inputs[argument] = SPECS[name].inputs(CASE)[argument]
    with pytest.raises(ValueError, match=rf"^{name}: {argument} must be \[.*heads.*\] = \[2, .*4.*\], got \[2, .*2.*\]"):
        SPECS[name].function(**inputs)


def test_a_decay_per_head_is_one_for_each_value_head() -> None:
    with pytest.raises(ValueError, match=r"^linear_attention: log_decay must be \[heads\] = \[4\], got \[2\]"):
        SPECS["linear_attention"].function(**SPECS["linear_attention"].inputs(replace(CASE, value_heads=4)) | {"log_decay": torch.zeros(2)})


def test_an_explicit_backend_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_chosen", {})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="gla: backend 'triton' cannot run here: needs a CUDA device, got cpu"):
        call("gla", backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    wide = SPECS["gla"].inputs(CASE, torch.float64)
    with pytest.raises(ValueError, match=r"gla: .*triton.* computes in float32, got torch.float64; use .chunkwise."):
        SPECS["gla"].function(**wide, backend="triton")
    with pytest.raises(ValueError, match=r"heads are at most 256 .key. and 512 .value. wide, got 4 and 600"):
        SPECS["gla"].function(**SPECS["gla"].inputs(Case(time=2, key=4, value=600)), backend="triton")


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.randn(2, 3), torch.randn(4, 8), r"x must be \[batch, time, heads, dim\] or \[batch, time, dim\], got \[2, 3\]"),
        (torch.randn(2, 3, 4, 8), torch.randn(8), r"weight must be \[heads, dim\], got \[8\]"),
        (torch.randn(2, 3, 4, 8), torch.randn(4, 7), r"weight must be \[heads, dim\] = \[4, 8\], got \[4, 7\]"),
        (torch.randn(2, 3, 4, 8), torch.randn(6, 8), "weight must have a multiple of x's 4 heads, got 6"),
        (torch.ones(2, 3, 4, 8, dtype=torch.int32), torch.randn(4, 8), "x must be float64, float32, float16 or bfloat16, got torch.int32"),
    ],
)
def test_head_gate_names_the_argument(x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^head_gate: {message}"):
        head_gate(x, weight)
