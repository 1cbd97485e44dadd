import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; Triton reads this when it is first imported
    if importlib.util.find_spec("triton") is not None:
        from tests.interpreter import round_like_a_gpu
        from tests.memory import check_memory

        round_like_a_gpu()
        check_memory()

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # the workers are two
settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("default")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What nothing was stored in is NaN, or the largest integer: so an output shows that a kernel wrote only in part. On a GPU, where this
    would refuse other ops too, tests of their own poison memory."""
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def called() -> Callable[..., subprocess.CompletedProcess]:
    """`headmax` in this process: its exit code, output and errors."""
    from tests.command_line import run

    return run


@pytest.fixture
def headmax(called: Callable[..., subprocess.CompletedProcess]) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: (exit code, output, errors)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        done = called(*arguments)
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.fixture
def plain_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention's kernels with the first tiles they would try, so that none is timed for minutes, and all bits of float32: by
    default their products keep 11 bits of it, and the delta rule's triangular inverse does so whatever is asked."""
    autotuner, language = pytest.importorskip("triton.runtime.autotuner"), pytest.importorskip("triton.language")
    chunk = pytest.importorskip("fla.ops.gated_delta_rule.chunk_fwd")
    prune = autotuner.Autotuner.prune_configs
    monkeypatch.setattr(autotuner.Autotuner, "prune_configs", lambda self, kwargs: prune(self, kwargs)[:1])
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    monkeypatch.setattr(chunk, "SOLVE_TRIL_DOT_PRECISION", language.constexpr("ieee"))
