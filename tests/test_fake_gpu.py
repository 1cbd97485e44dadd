"""Host code of a GPU where there is none: see fake_gpu.py."""

from types import SimpleNamespace

import pytest
import torch

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM, Packing
from headmax.layers.packed_attention import flash_can
from headmax.models.decoding import Replay

pytest.importorskip("triton")
from tests.fake_gpu import DEVICE, move, pretended

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends what is there")
KINDS = ("gla", "kda", "mamba2", "attention")
MIXERS = (*KINDS, *(pytest.param(mixer, marks=pytest.mark.slow) for mixer in ("linear", "retnet", "gated_deltanet")))
DTYPES = (torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16)))
GATES = {"head": HeadGateConfig(), "hidden": HeadGateConfig(source="hidden", read_position="after_norm", kind="sigmoid"), "none": None}
WIDE = {"hidden_size": 512, "num_heads": 2}
"""Heads so wide that long chunks and all kinds of tiles come up."""


def make(mixer: str, gate: str = "head", **changes: object) -> HeadmaxForCausalLM:
    sizes = {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 1, "vocab_size": 50, "eos_token_id": None, "backend": "triton"}
    gates = None if mixer == "attention" else GATES[gate]
    return HeadmaxForCausalLM(HeadmaxConfig(mixer=mixer, head_gate=gates, **sizes | changes)).eval()


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.int64, device=DEVICE)


def there(packing: Packing) -> Packing:
    """With tables that are pretended."""
    return packing._with_tables(lambda x: torch.empty(x.shape, dtype=x.dtype, device=DEVICE))


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_steps_are_launched_with_what_their_kernels_take(mixer: str) -> None:
    from headmax.generate.sampling import Features
    from headmax.generate.step import Fetched, Step

    model = make(mixer)
    with pretended() as (card, _):
        move(model, torch.bfloat16)
        for rows in (1, 3, 20):
            cache = model(ids(rows, 30), use_cache=True).past_key_values
            for length in (1, 1, 1, 5, 20):
                model(ids(rows, length), past_key_values=cache, use_cache=True)
        step = Step(model, 3, torch.float32, 64)
        for features in (None, Features(), Features(True, True, True, True)):
            sampled = step.prepare(3, features)()
        Fetched(sampled, 3)
    assert {"few_rows_kernel", *(() if mixer == "attention" else ("row_kernel", "rows_kernel"))} <= set(card.launched)
    assert {device for device, _ in card.captured} == ({1} if DEVICE == "cuda:1" else set())
    assert card.events == ([1] if DEVICE == "cuda:1" else [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_prompts_are_read_without_waiting_for_the_device(mixer: str, dtype: torch.dtype) -> None:
    model, packing = make(mixer, **WIDE), Packing([0, 70, 70, 200])
    with pretended() as (card, _):
        move(model, dtype)
        model(ids(1, 2000), use_cache=True)
        if mixer != "attention":  # without a kernel it reads where sequences end
            model(ids(1, 200), cu_seqlens=there(packing), use_cache=True)
    assert len(card.launched) >= 3


@pytest.mark.skipif(DEVICE != "cpu", reason="no gradients without a device")
@pytest.mark.parametrize(
    ("gate", "conv_size"), [("head", 4), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("hidden", 0), ("none", 4), ("head", 0)))]
)
@pytest.mark.parametrize("mixer", MIXERS)
def test_operators_give_what_their_fake_forms_promise(mixer: str, gate: str, conv_size: int) -> None:
    """Forward and backward, of rows and of packed sequences, in every dtype and under autocast."""
    options = {} if mixer == "attention" else {"conv_size": conv_size}
    model, packing = make(mixer, gate, **options).train(), Packing([0, 70, 70, 200])
    for dtype, autocast in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        with pretended() as (card, real):
            move(model, dtype)
            for rows, packed in ((2, None), (1, None if mixer == "attention" else there(packing))):
                with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                    loss = model(ids(rows, 200), labels=ids(rows, 200), cu_seqlens=packed).loss
                loss.backward()
            assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
        assert len(real.seen) >= 4
        assert "query_key_gradients" in "".join(card.launched) or mixer == "attention"


def test_a_graph_is_captured_on_the_device_of_what_it_replays() -> None:
    """A second GPU, which nobody made the current one."""
    seen: list[int] = []
    with pretended() as (card, _):
        Replay(lambda: seen.append(card.current), torch.device("cuda", 1))
    assert seen == [1, 1, 1]
    assert card.captured == [(1, [])]


def test_flash_attention_is_asked_for_heads_that_it_takes() -> None:
    for width, able in ((64, True), (24, True), (20, False), (256, True), (264, False)):
        assert flash_can(SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(3, 2, width))) == able  # type: ignore[arg-type]
