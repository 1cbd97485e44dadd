"""Which implementation runs, and what is said about it."""

import pytest
import torch

from headmax.ops import registry
from headmax.ops.registry import dispatch


class GPU:
    """As much of a tensor on a GPU as is asked about."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = torch.device("cuda"), dtype


def reference() -> None: ...


def chunkwise() -> None: ...


def kernels() -> None: ...


class Kernels(registry.Lazy):
    """Kernels on CUDA devices, without a module to import."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__("", "", needs="")
        self.reason, self.function = reason, kernels

    def unavailable(self, device_type: str) -> str | None:
        return self.reason or (None if device_type == "cuda" else f"needs a CUDA device, got {device_type}")


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_announced", set())
    monkeypatch.setattr(registry, "_chosen", {})
    monkeypatch.setattr(registry, "_tables", {})
    registry.register("scan", {"reference": reference, "chunkwise": chunkwise, "triton": Kernels()})
    registry.register("norm", {"reference": reference, "triton": Kernels()})
    registry.register("old", {"reference": reference, "triton": Kernels("the card is too old")})


def test_auto_takes_the_fastest_that_can_run(caplog: pytest.LogCaptureFixture) -> None:
    assert dispatch("scan", "auto", GPU()) is kernels  # type: ignore[arg-type]
    assert dispatch("scan", "auto", torch.ones(1)) is chunkwise
    assert dispatch("norm", "auto", torch.ones(1)) is reference
    assert not caplog.records


@pytest.mark.parametrize(
    ("op", "dtype", "obstacle", "why"),
    [
        ("scan", torch.bfloat16, "heads are too wide", "heads are too wide"),
        ("scan", torch.float64, None, "it computes in float32, got torch.float64"),
        ("old", torch.bfloat16, None, "the card is too old"),
    ],
)
def test_auto_says_once_why_it_passes_kernels_over_on_a_gpu(
    op: str, dtype: torch.dtype, obstacle: str | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert dispatch(op, "auto", GPU(dtype), obstacle) is (chunkwise if op == "scan" else reference)  # type: ignore[arg-type]
    registry._chosen.clear()
    dispatch(op, "auto", GPU(dtype), obstacle)  # type: ignore[arg-type]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"{op}: the faster backend 'triton' is passed over: {why}"]


def test_a_named_backend_runs_or_is_an_error() -> None:
    assert dispatch("scan", "chunkwise", GPU()) is chunkwise  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scan: backend 'triton' cannot run here: needs a CUDA device, got cpu; use 'chunkwise'"):
        dispatch("scan", "triton", torch.ones(1))
    with pytest.raises(ValueError, match="scan: backend 'triton' cannot run here: heads are too wide; use 'chunkwise'"):
        dispatch("scan", "triton", GPU(), "heads are too wide")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norm: .* it computes in float32, got torch.float64; use 'reference'"):
        dispatch("norm", "triton", GPU(torch.float64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scan: unknown backend 'tritn'; did you mean 'triton'"):
        dispatch("scan", "tritn", GPU())  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["reference", "chunkwise", "fla"])
def test_ops_that_are_no_recurrence_run_their_plain_form_for_backends_of_recurrences(backend: str) -> None:
    assert dispatch("norm", backend, GPU()) is reference  # type: ignore[arg-type]


def test_heads_too_wide_for_the_kernels_are_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    from headmax.ops.checks import too_wide

    q = torch.empty(1, 1, 1, 300)
    assert too_wide(q, q) == "heads are at most 256 (key) and 512 (value) wide, got 300 and 300"
    assert too_wide(q[..., :256], q) is None
