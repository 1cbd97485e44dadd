"""A pytest plugin: flash-linear-attention's names for its ops stand for headmax's while its tests run."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headmax.ops import gated_delta_rule, gla, kda, linear_attention

Op = Callable[..., tuple[Tensor, Tensor | None]]
ELSEWHERE = {
    "normalize": "a normaliser of the read-out is no option of headmax's op: models have a norm",
    "return_intermediate_states": "headmax returns the last state only",
    "cp_context": "parallel over the context is the trainer's business",
    "output_attentions": "there is no map of attention",
}
"""Options that are no part of headmax's ops."""
IGNORED = {"chunk_size", "disable_recompute", "cu_seqlens_cpu", "use_graph"}
"""How flash-linear-attention computes, not what."""
MIXED = "must share q's dtype"
"""What headmax refuses: q, k and v of several dtypes."""


def decays(op: Op, options: dict[str, Any], g: Tensor) -> Tensor:
    """log_decay from what a gate in the kernel is made of."""
    a_log, bias, bound, _ = (options.pop(name, None) for name in ("A_log", "dt_bias", "lower_bound", "safe_gate"))
    if not options.pop("use_gate_in_kernel", False):
        return g
    if op is gated_delta_rule:
        from fla.ops.gated_delta_rule.gate import naive_gdn_gate

        return naive_gdn_gate(g, a_log, bias)
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate

    return naive_kda_gate(g, a_log, bias) if bound is None else naive_kda_lowerbound_gate(g, a_log, bias, bound)


def adapt(op: Op) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`op` as flash-linear-attention calls it; a test of what headmax does not have is skipped, and says so."""

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, **options: Any) -> Any:
        for name, reason in ELSEWHERE.items():
            if options.pop(name, None) not in (None, False):
                pytest.skip(f"{name}: {reason}")
        if "transpose_state_layout" in options:
            if "state_v_first" in options:
                raise ValueError("give one of state_v_first and transpose_state_layout")
            warnings.warn("transpose_state_layout is state_v_first", DeprecationWarning, stacklevel=2)
        state_first = [options.pop(name, False) for name in ("state_v_first", "transpose_state_layout")]
        options = {name: x for name, x in options.items() if name not in IGNORED and x is not None}
        g = options.pop("gk", g)
        sides = [] if g is None else [decays(op, options, g)]
        if beta is not None:
            factor = 2 if options.pop("allow_neg_eigval", False) else 1
            sides.append(beta.float().sigmoid() * factor if options.pop("use_beta_sigmoid_in_kernel", False) else beta)
            options["normalize_qk"] = options.pop("use_qk_l2norm_in_kernel", False)
        state = options.pop("initial_state", None)
        keep = options.pop("output_final_state", False)
        state = state.transpose(-1, -2) if state is not None and any(state_first) else state
        try:
            o, final = op(q, k, v, *sides, initial_state=state, return_state=keep, **options)
        except ValueError as error:
            if MIXED in str(error):
                pytest.skip(f"refused: {error}")
            raise
        return o, final.transpose(-1, -2) if final is not None and any(state_first) else final

    return run


def retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """A decay per head, by its number."""
    log_decay = torch.log1p(-torch.exp2(-5.0 - torch.arange(q.shape[2], device=q.device)))
    return adapt(linear_attention)(q, k, v, log_decay, **options)


WAYS = ("chunk", "fused_chunk", "fused_recurrent", "parallel")
NAMES: dict[str, Callable[..., Any]] = {
    **{f"fla.ops.gla:{way}_gla": adapt(gla) for way in WAYS},
    **{f"fla.ops.simple_gla.{way}:{way}_simple_gla": adapt(linear_attention) for way in WAYS},
    **{f"fla.ops.linear_attn:{way}_linear_attn": adapt(linear_attention) for way in WAYS},
    **{f"fla.ops.retention:{way}_retention": retention for way in WAYS},
    **{f"fla.ops.gated_delta_rule:{way}_gated_delta_rule": adapt(gated_delta_rule) for way in WAYS},
    **{f"fla.ops.kda:{way}_kda": adapt(kda) for way in WAYS},
}
"""Where the tests import each op from."""


def pytest_configure() -> None:
    for place, function in NAMES.items():
        module, name = place.split(":")
        setattr(importlib.import_module(module), name, function)
    if not torch.cuda.is_available():
        setattr(importlib.import_module("fla.utils"), "device", "cpu")  # noqa: B010


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of flash-linear-attention's own parts, which call none of the ops above."""
    own = ("flash_qla", "flash_kda", "test_gate", "wy_repr", "blackwell", "vllm", "ascend", "naive", "invalid_chunk_size", "to_mamba2")
    for item in items:
        if any(part in item.nodeid for part in own):
            item.add_marker(pytest.mark.skip(reason="of flash-linear-attention's own kernels"))
