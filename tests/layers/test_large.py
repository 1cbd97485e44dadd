"""Layers' kernels on tensors of more than 2^31 elements, see tests/ops/test_large.py."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")
from headmax.ops.kernels import conv, decay, loss, norm, rotary, swiglu
from headmax.ops.kernels.linear import Convolution, LinearInput, Scores, linear
from tests.memory import CHECKER, dry

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")
BATCH, TIME, HEADS, WIDTH = 5, 300_001, 4, 2048
TOKENS = BATCH * TIME


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def convolution() -> None:
    x, weight, bias, before = meta(BATCH, TIME, WIDTH), meta(WIDTH, 4), meta(WIDTH), meta(TIME, dtype=torch.int64)
    conv.forward(x, weight, bias, before, None, 0, 0.0)
    conv.backward(x, meta(0), x, weight, bias, before, None, 0, 0.0)
    scorer, d_scores = meta(2 * HEADS, WIDTH // HEADS), meta(BATCH, TIME, 2 * HEADS, dtype=torch.float32)
    conv.forward(x, weight, None, None, scorer, HEADS, 1e-6)
    conv.backward(x, d_scores, x, weight, None, None, scorer, HEADS, 1e-6)


def decays() -> None:
    x, y = meta(TOKENS, WIDTH), meta(TOKENS, WIDTH, dtype=torch.float32)
    decay.forward(x, 16.0)
    decay.backward(y, y, 16.0, torch.bfloat16)
    rate, bias = meta(HEADS, dtype=torch.float32), meta(WIDTH, dtype=torch.float32)
    decay.softplus_forward(x, rate, bias)
    decay.softplus_backward(y, x, rate, bias)


def norms() -> None:
    x, weight = meta(BATCH, 8_000_001, 64), meta(64)
    norm.norm_forward(x, x, weight, 1e-6)
    norm.norm_backward(x, x, x, weight, 1e-6)
    o = meta(10_000_001, HEADS, 64)
    swish, read = meta(len(o), 8 * 64)[:, 4 * 64 :], meta(len(o), HEADS)
    norm.read_out_forward(o, swish, read, weight, meta(8, HEADS * 64), 1e-6)
    norm.read_out_backward(o, o, swish, read, weight, 1e-6)


def rotations() -> None:
    cos = meta(TOKENS, WIDTH // HEADS // 2)
    parts = rotary.forward(meta(TOKENS, 3 * WIDTH), cos, cos, HEADS, WIDTH // HEADS)
    rotary.backward(*parts, cos, cos)


def gated_units() -> None:
    joint = meta(TOKENS, 2 * WIDTH)
    swiglu.forward(joint, meta(8, WIDTH))
    swiglu.backward(meta(TOKENS, WIDTH), joint)


def losses() -> None:
    loss.cross_entropy_rows(meta(TOKENS, WIDTH), meta(TOKENS, dtype=torch.int64))


def products() -> None:
    """Of a matrix as large as that, of as many rows, and of the past of a convolution."""
    linear(LinearInput(meta(1, WIDTH)), [meta(TOKENS, WIDTH)], residual=meta(1, TOKENS))
    linear(LinearInput(meta(7, 256)), [meta(8 * TOKENS, 256)])
    linear(LinearInput(meta(TOKENS, WIDTH), norm=meta(WIDTH)), [meta(1600, WIDTH)], residual=meta(TOKENS, 1600))
    matrices = [meta(1024, 64)] * 3
    past, sums = Convolution([meta(1024, 4)] * 3, [meta(1024)] * 3, meta(TOKENS, 3, 3072)), meta(TOKENS, 2, HEADS, 16, dtype=torch.float32)
    linear(LinearInput(meta(TOKENS, 64)), matrices, convolution=past, scores=Scores(meta(HEADS, 256), meta(HEADS, 256), HEADS, sums))


@pytest.mark.parametrize(
    "kernels", [convolution, decays, norms, rotations, gated_units, losses, products], ids=lambda function: function.__name__
)
def test_more_than_2_31_elements(kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOKENS * WIDTH > 2**31
    monkeypatch.setattr(norm, "processors", lambda device: TOKENS)  # a tile each, so that no program goes on and on
    before = CHECKER.launches
    with dry():
        kernels()
    assert CHECKER.launches > before
