"""ONNX: what stands for our operators there, and with onnxruntime the whole model. `pip install onnx onnxscript onnxruntime`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headmax.layers.packed_attention import pieces
from headmax.models import onnx
from tests.generate.checkpoint import make_model, tokens

BOUNDS = torch.tensor([[0, 20, 40], [0, 20, 40]])
SHAPES: dict[Any, tuple[Any, ...]] = {
    "chunk_scan": ((2, 5, 3, 4, 6), (2, 5, 3, 4, 1), (2, 3, 4, 6), (0,)),
    "delta_scan": ((2, 5, 3, 8, 6), (2, 5, 3, 8, 4), (2, 5, 3, 8, 4), (2, 5, 3, 4, 1), (2, 3, 4, 6), (0,)),
    "packed_attention": ((40, 4, 8), (40, 2, 8), (40, 2, 8)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_operators_are_what_stands_for_them(name: str) -> None:
    torch.manual_seed(0)
    operator = getattr(torch.ops.headmax, name).default
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES[name]]
    if name != "packed_attention":
        found = zip(onnx.DECOMPOSITIONS[operator](*inputs), operator(*inputs), strict=True)
        assert all(torch.allclose(ours, exact, atol=1e-12) for ours, exact in found)
    else:
        assert len(list(pieces(*BOUNDS.tolist(), 7))) == 2
        for window in (None, 7):
            ours, exact = onnx.packed_attention(*inputs, BOUNDS, window), operator(*inputs, BOUNDS, window)
            assert torch.allclose(ours, exact, atol=1e-12)


def test_unit_lower_triangles_are_solved_whatever_stands_on_and_above_the_diagonal() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 64, 64, dtype=torch.float64) / 4, torch.randn(2, 3, 64, 5, dtype=torch.float64)
    exact = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
    assert torch.allclose(onnx.solve_triangular(a, b, upper=False, unitriangular=True), exact, rtol=1e-10)
    ones = torch.ones(64, 64)  # every key the same: powers of it would grow to 1e18
    assert torch.equal(onnx.solve_triangular(ones, ones, upper=False, unitriangular=True)[1:], torch.zeros(63, 64))
    with pytest.raises(ValueError, match="for unit lower triangles on the left only"):
        onnx.solve_triangular(a, b, upper=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["linear", "retnet", "gla", "gated_deltanet", "kda", "mamba2", "hybrid"])
def test_a_prompt_and_then_tokens_one_by_one_in_onnxruntime(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make_model("gla", mixer=name) if name in ("kda", "mamba2") else make_model(name)
    text = torch.tensor([tokens(76), tokens(76, seed=1)])
    expected = model(text).logits.detach()
    prefill, step = (onnxruntime.InferenceSession(path) for path in onnx.export_onnx(model, tmp_path, length=70, batch=2))
    states = [x.name for x in prefill.get_outputs()][1:]
    results = prefill.run(None, {"input_ids": text[:, :70].numpy()})
    for at in range(70, 76):
        assert (torch.from_numpy(results[0]) - expected[:, at - 1]).abs().max() <= 1e-4
        given = {"input_ids": text[:, at : at + 1].numpy(), "position_ids": torch.full((2, 1), at).numpy()}
        results = step.run(None, given | dict(zip(states, results[1:], strict=True)))
    assert (torch.from_numpy(results[0]) - expected[:, 75]).abs().max() <= 1e-4
