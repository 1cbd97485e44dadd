"""Kernels on trial, against the oracle."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headmax.ops import gated_delta_rule
from headmax.ops.packing import Packing
from lab.candidates import delta_head


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")
@pytest.mark.parametrize(("time", "key_heads", "heads", "key", "value", "gated", "cuts"), [
    (130, 1, 2, 32, 64, True, None),
    (200, 1, 3, 72, 96, True, [0, 70, 70, 200]),
    (1100, 1, 1, 32, 32, False, None),  # in segments
])  # fmt: skip
def test_the_delta_rule_with_one_decay_per_head(
    time: int, key_heads: int, heads: int, key: int, value: int, gated: bool, cuts: list[int] | None
) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, time, key_heads, key) for _ in range(2))
    v, log_decay, beta = torch.randn(1, time, heads, value), -0.3 * torch.rand(1, time, heads), torch.rand(1, time, heads)
    gates = [torch.softmax(torch.randn(1, time, heads), -1) * heads if gated else None for _ in range(2)]
    packing, sequences = (None, 1) if cuts is None else (Packing(cuts), len(cuts) - 1)
    given = [q, k, v, log_decay, beta, *gates, torch.randn(sequences, heads, key, value)]
    d_o, d_final = torch.randn(1, time, heads, value), torch.randn(sequences, heads, key, value)

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = [None if x is None else x.to(dtype).requires_grad_() for x in given]
        o, final = function(*inputs)
        leaves = [x for x in inputs if x is not None]
        return [o, final, *torch.autograd.grad([o, final], leaves, [d_o.to(dtype), d_final.to(dtype)])]

    def oracle(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, read: Any, write: Any, initial: Tensor) -> Any:
        options: dict[str, Any] = {"read_gate": read, "write_gate": write, "initial_state": initial, "return_state": True}
        return gated_delta_rule(q, k, v, log_decay, beta, backend="reference", normalize_qk=True, cu_seqlens=packing, **options)

    actual = run(lambda *x: delta_head.gated_delta_rule(*x[:7], key**-0.5, x[7], packing), torch.float32)
    for a, e in zip(actual, run(oracle, torch.float64), strict=True):
        assert (a.double() - e).abs().max() <= 2e-6 * e.abs().max()
