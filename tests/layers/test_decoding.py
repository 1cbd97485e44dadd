"""The decoding step in kernels against the blocks' own forward, one token at a time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM
from headmax.layers.block import Block
from headmax.layers.decoding import Place, Slots, make_slots, plain_step, unfit
from headmax.layers.feature_map import FEATURE_MAPS

pytest.importorskip("triton")
from headmax.layers import triton_linear
from headmax.layers.triton_block import FusedBlock

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
here = pytest.mark.gpu if GPU else lambda test: test  # interpreted where there is no GPU
LENGTH, HIDDEN = 8, 24
GATE = HeadGateConfig(init_std=1.0)
RECURRENT = ("linear", "retnet", "gla", "gated_deltanet")


def make(mixer: str, dtype: torch.dtype = torch.float32, **options: Any) -> Block:
    torch.manual_seed(0)
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "initializer_range": 0.3,
    }
    if mixer != "attention":
        settings |= {"head_k_dim": 12, "head_v_dim": 20, "head_gate": GATE}
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer=mixer, **settings | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and decays that are all alike would hide an index gone wrong
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.model.layers[0].to(DEVICE, dtype).requires_grad_(False)


def place(block: Block, position: torch.Tensor, dtype: torch.dtype) -> Place:
    settings = getattr(block.mixer, "rotary", None)
    rotary = {settings: settings and settings.at(position[:, None], dtype)}
    return Place(position, rotary, (torch.arange(LENGTH, device=DEVICE) <= position[:, None])[:, None, None])


def filled(block: Block, rows: int, state_dtype: torch.dtype) -> Slots:
    """Slots as they are after a few tokens, one more of them than is used."""
    generator = torch.Generator().manual_seed(1)
    slots = make_slots(block, rows + 1, state_dtype, LENGTH)
    for x in vars(slots).values():
        if isinstance(x, torch.Tensor):
            x.copy_(torch.randn(x.shape, generator=generator))
    return slots


def decode(step: Any, slots: Slots, block: Block, rows: int, steps: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    outputs, start = [], torch.arange(rows, device=DEVICE) % 3 + 2
    for n in range(steps):
        x = torch.randn(rows, HIDDEN, generator=generator).to(DEVICE, dtype)
        outputs.append(step(x, slots, place(block, start + n, dtype)))
    return torch.stack(outputs)


def assert_equal_to_plain(block: Block, rows: int = 1, tolerance: float = 2e-5, state_dtype: torch.dtype = torch.float32) -> None:
    dtype = block.mlp_norm.weight.dtype
    ours, theirs = (filled(block, rows, state_dtype) for _ in range(2))
    expected = decode(lambda *a: plain_step(block, *a), theirs, block, rows, 2, dtype)
    actual = decode(FusedBlock(block), ours, block, rows, 2, dtype)
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()
    for name, x in vars(ours).items():
        if isinstance(x, torch.Tensor):
            wanted = getattr(theirs, name)
            assert (x - wanted).abs().max() <= tolerance * wanted.abs().max(), name
            assert torch.equal(x[rows:], wanted[rows:]), f"{name} of a slot that is not in use"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter takes its time for each program, and threads would wait for each other."""
    if not GPU:
        monkeypatch.setattr(triton_linear, "processors", lambda device: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 3])
def rows(request: pytest.FixtureRequest) -> int:
    """Sequences in a batch: one, and more than that, are multiplied in two ways."""
    return request.param


@here
@pytest.mark.parametrize("mixer", [*RECURRENT, "attention"])
def test_every_mixer_at_every_size_of_batch(mixer: str, rows: int) -> None:
    assert_equal_to_plain(make(mixer), rows)


@here
@pytest.mark.parametrize("source", ["head", "hidden_heads", "hidden"])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "uniform"])
def test_every_gate(kind: str, source: str) -> None:
    """With a convolution scores of heads are taken in the mixer's kernel, without one by the projection."""
    gate = HeadGateConfig(kind=kind, source=source, init_std=1.0, temperature=0.7, scale="heads")  # type: ignore[arg-type]
    for conv_size in (0, 4) if source == "head" else (0,):
        assert_equal_to_plain(make("gla", head_gate=gate, conv_size=conv_size))


@here
@pytest.mark.parametrize(
    "gate", [None, HeadGateConfig(read=False, init_std=1.0), HeadGateConfig(write=False, init_std=1.0)], ids=["none", "write", "read"]
)
@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet"])
def test_one_gate_or_none(mixer: str, gate: HeadGateConfig | None) -> None:
    assert_equal_to_plain(make(mixer, head_gate=gate))


@here
@pytest.mark.parametrize("norm", ["head", "joint", "none"])
@pytest.mark.parametrize("position", ["query", "after_norm"])
def test_every_place_of_the_read_gate(position: str, norm: str) -> None:
    gate = HeadGateConfig(read_position=position, init_std=1.0)  # type: ignore[arg-type]
    assert_equal_to_plain(make("retnet", head_gate=gate, output_norm=norm))


@here
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_every_feature_map(feature_map: str) -> None:
    assert_equal_to_plain(make("retnet", feature_map=feature_map))


@here
@pytest.mark.parametrize("conv_size", [2, 3])
def test_convolutions_move_on(conv_size: int, rows: int) -> None:
    assert_equal_to_plain(make("linear", conv_size=conv_size, output_norm="none"), rows)


@here
def test_more_value_heads_than_key_heads(rows: int) -> None:
    for conv_size in (4, 0):
        assert_equal_to_plain(make("gated_deltanet", num_v_heads=6, head_v_dim=12, conv_size=conv_size), rows)
    if rows == 1:
        after = HeadGateConfig(read_position="after_norm", source="hidden", init_std=1.0)
        assert_equal_to_plain(make("gated_deltanet", num_v_heads=6, head_v_dim=12, head_gate=after))


@here
def test_odd_numbers_and_widths_of_heads(rows: int) -> None:
    assert_equal_to_plain(make("gla", num_heads=1), rows)
    assert_equal_to_plain(make("gla", head_k_dim=20, head_v_dim=40), rows)
    assert_equal_to_plain(make("retnet", num_heads=3, head_k_dim=6, head_v_dim=9), rows)


@here
def test_bfloat16_is_no_further_from_the_truth_than_the_plain_step(rows: int) -> None:
    for mixer, state_dtype in (("gla", torch.float32), ("gated_deltanet", torch.bfloat16)):
        block, exact = make(mixer, torch.bfloat16), make(mixer)
        exact.load_state_dict(block.state_dict())
        ours, theirs, true = filled(block, rows, state_dtype), filled(block, rows, state_dtype), filled(exact, rows, torch.float32)
        for name, x in vars(true).items():
            if isinstance(x, torch.Tensor):
                x.copy_(getattr(ours, name))
        fused = decode(FusedBlock(block), ours, block, rows, 2, torch.bfloat16)
        plain = decode(lambda *a, b=block: plain_step(b, *a), theirs, block, rows, 2, torch.bfloat16)
        truth = decode(lambda x, *a, b=exact: plain_step(b, x.float(), *a), true, exact, rows, 2, torch.bfloat16)
        assert (fused - truth).norm() <= 1.2 * (plain - truth).norm(), mixer


@here
def test_outputs_are_written_everywhere(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is poisoned with NaN before the kernels run; nothing of it may show."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    gate = HeadGateConfig(read_position="after_norm", init_std=1.0)
    assert_equal_to_plain(make("gated_deltanet", head_gate=gate), rows)


@here
def test_the_model_keeps_its_weights_as_views_of_the_stacks() -> None:
    block = make("gla")
    before = {name: x.clone() for name, x in block.state_dict().items()}
    fused = FusedBlock(block)
    for name, x in block.state_dict().items():
        assert torch.equal(x, before[name]), name
    block.mixer.k_proj.weight.zero_()
    block.mlp.up_proj.weight.zero_()
    assert (fused.mixer.inputs[24:48] == 0).all()
    assert (fused.up[40:] == 0).all()


def test_what_cannot_be_fused_says_why() -> None:
    assert unfit(make("gla")) is None
    assert unfit(make("gla").double()) == "kernels compute in float32, the model is float64"
    assert unfit(make("gla", head_k_dim=300)) == "keys are at most 256 wide, got 300"
    adapted = make("gla")
    adapted.mixer.q_proj = torch.nn.Sequential(adapted.mixer.q_proj)
    assert unfit(adapted) == "mixer.q_proj is a Sequential, not a plain matrix"
    with pytest.raises(ValueError, match=r"a layer cannot be fused: mixer\.q_proj is a Sequential, not a plain matrix"):
        FusedBlock(adapted)
