"""Tensors of more than 2^31 elements, of which kernels see shapes alone: the programs at the corners of each grid stay within them."""

from typing import Any

import pytest
import torch

from headmax.ops.packing import CHUNK

pytest.importorskip("triton")
from headmax.ops.kernels import decayed_attention, delta_rule, gate, step
from tests.memory import CHECKER, dry

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")
BATCH, TIME, HEADS, KEY, VALUE = 140_000, 65, 4, 64, 80
SEQUENCES = 300_000
"""Packed, of a chunk each."""
KINDS = [(kind, 0) for kind in ("none", "head", "token", "channel", "delta", "channel delta")]
KINDS += [("channel", 1), ("channel delta", 1)]  # chunks whose decays are mild go their own ways


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gradients_of(
    module: Any, kind: str, d_o: torch.Tensor, inputs: tuple[Any, ...], results: tuple[Any, ...], options: tuple[Any, ...]
) -> None:
    """The backward pass, of `module`'s ops as they are called."""
    d_final = results[1].to(torch.float32)
    if module is delta_rule:
        module.backward(d_o, d_final, *inputs, *options, *results[2:])
    else:
        module.backward(d_o, d_final, *inputs, *results[2:], kind in ("token", "channel"))


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["rows", "packed"])
@pytest.mark.parametrize(("kind", "mild"), KINDS)
def test_chunks_of_more_than_2_31_elements(kind: str, mild: int, packed: bool) -> None:
    table, starts, rows = None, None, (BATCH, TIME)
    if packed:
        starts, rows = torch.arange(SEQUENCES + 1), (1, SEQUENCES * CHUNK)
        table = torch.stack([CHUNK * starts[:-1], torch.full((SEQUENCES,), CHUNK)], 1)
    sequences = SEQUENCES if packed else BATCH
    q, k, v, gates = meta(*rows, HEADS, KEY), meta(*rows, HEADS, KEY), meta(*rows, HEADS, VALUE), meta(*rows, HEADS, dtype=torch.float32)
    decay = {"none": None, "head": meta(HEADS), "token": gates, "delta": gates}.get(kind, meta(*rows, HEADS, KEY, dtype=torch.float32))
    assert min(q.numel(), sequences * HEADS * KEY * VALUE) > 2**31
    module = delta_rule if "delta" in kind else decayed_attention
    strength, options = ((gates,), (True,)) if module is delta_rule else ((), ())
    initial = meta(sequences, HEADS, KEY, VALUE, dtype=torch.float32)
    inputs = (q, k, v, decay, *strength, gates, gates, 0.1, initial, table, starts)
    before = CHECKER.launches
    with dry(fill=mild):
        results = module.forward(*inputs, *options)
        gradients_of(module, kind, meta(*v.shape), inputs, results, options)
    assert CHECKER.launches - before >= 5


@pytest.mark.parametrize("kind", ["linear_attention", "kda"])
def test_a_step_on_states_of_more_than_2_31_elements(kind: str) -> None:
    import headmax.ops

    rows = 60_000
    q, v = meta(rows, 2, HEADS, 128), meta(rows, 2, HEADS, 128)
    side = (meta(rows, 2, HEADS, 128, dtype=torch.float32), meta(rows, 2, HEADS, dtype=torch.float32)) if kind == "kda" else ()
    state = meta(rows, HEADS, 128, 128, dtype=torch.float32)
    with dry():
        step.step(getattr(headmax.ops, kind), (q, q, v, *side), state, 1.0)


@pytest.mark.parametrize("heads_in", [True, False], ids=["heads", "hidden"])
def test_gates_of_more_than_2_31_elements(heads_in: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "PROGRAMS", 2**17)  # a few tokens each, so that none of them goes on and on
    x = meta(8, 2**19, *((HEADS, 160) if heads_in else (640,)))
    weight, gates = meta(HEADS, x.shape[-1]), meta(8, 2**19, HEADS, dtype=torch.float32)
    scores, d_gates = meta(8, 2**21, 256), [meta(8, 2**21, 128, dtype=torch.float32)] * 2
    assert min(x.numel(), scores.numel()) > 2**31
    with dry():
        gate.gate_forward(x, weight, 1.0, 1.0, True)
        gate.gate_backward(gates, gates, x, weight, 1.0, 1.0, True)
        split = gate.split_forward(scores, 2, 1.0, 1.0, True)
        gate.split_backward(split, d_gates, 1.0, 1.0, True, torch.bfloat16)
