"""The decoding step in kernels against the blocks' own forward, one token at a time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM
from headmax.layers.block import Block
from headmax.layers.feature_map import FEATURE_MAPS
from headmax.layers.fusion import Fusion
from headmax.layers.mixers import MIXERS, MixerConfig
from headmax.layers.mixers.attention import AttentionSlots
from headmax.models.decoding import Slots, make_slots

pytest.importorskip("triton")
from headmax.ops.kernels import linear

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
here = pytest.mark.gpu if GPU else lambda test: test  # interpreted where there is no GPU
LENGTH, HIDDEN = 8, 24
GATE = HeadGateConfig(init_std=1.0)
RECURRENT = ("linear", "retnet", "gla", "gated_deltanet", "kda", "mamba2")


def make(mixer: str | MixerConfig, dtype: torch.dtype = torch.float32, **options: Any) -> Block:
    torch.manual_seed(0)
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "initializer_range": 0.3,
    }
    if isinstance(mixer, str) and mixer != "attention":
        settings |= {"head_k_dim": 12, "head_v_dim": 20, "head_gate": GATE}
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer=mixer, fused=True, **settings | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and decays that are all alike would hide an index gone wrong
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.model.layers[0].to(DEVICE, dtype).requires_grad_(False)


def tensors(slots: Slots) -> dict[str, torch.Tensor]:
    return {name: x for name, x in slots._asdict().items() if isinstance(x, torch.Tensor) and name != "position"}


def filled(block: Block, rows: int, state_dtype: torch.dtype) -> Slots:
    """Slots as they are after a few tokens, one more of them than is used."""
    generator = torch.Generator().manual_seed(1)
    slots = make_slots([block], rows + 1, state_dtype, torch.arange(rows + 1, device=DEVICE) % 3 + 2, LENGTH)[0]
    for x in tensors(slots).values():
        x.copy_(torch.randn(x.shape, generator=generator))
    return slots


def fused_step(block: Block, x: torch.Tensor, slots: Slots, rotary: Any) -> torch.Tensor:
    return block.step(x, state=slots, positions=rotary).hidden


def plain_step(block: Block, x: torch.Tensor, slots: Slots, rotary: Any) -> torch.Tensor:
    return block(x, state=slots, return_state=True, positions=rotary, fusion=Fusion()).hidden


def decode(step: Any, slots: Slots, block: Block, rows: int, steps: int = 2, positions: int | None = None) -> torch.Tensor:
    """`positions` are how many rows have a position of their own: all unless given, or one that all rows share."""
    generator, dtype = torch.Generator().manual_seed(2), block.mlp_norm.weight.dtype
    outputs, settings = [], getattr(block.mixer, "rotary", None)
    position = torch.arange(positions or rows, device=DEVICE) % 3 + 2
    used = slots.rows(slice(0, rows))
    for _ in range(steps):
        x = torch.randn(rows, 1, HIDDEN, generator=generator).to(DEVICE, dtype)
        outputs.append(step(block, x, used, settings and settings.at(position[:, None], dtype)))
        position += 1
        if isinstance(used, AttentionSlots):
            used.position.add_(1)
    return torch.stack(outputs)


def assert_equal_to_plain(block: Block, rows: int = 1, tolerance: float = 2e-5, state_dtype: torch.dtype = torch.float32) -> None:
    assert block.step_obstacle(torch.zeros(1, 1, HIDDEN, device=DEVICE, dtype=block.mlp_norm.weight.dtype)) is None
    ours, theirs = (filled(block, rows, state_dtype) for _ in range(2))
    expected = decode(plain_step, theirs, block, rows)
    actual = decode(fused_step, ours, block, rows)
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()
    for (name, x), wanted in zip(tensors(ours).items(), tensors(theirs).values(), strict=True):
        assert (x - wanted).abs().max() <= tolerance * wanted.abs().max(), name
        assert torch.equal(x[rows:], wanted[rows:]), f"{name} of a slot that is not in use"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter takes its time for each program, and threads would wait for each other."""
    if not GPU:
        monkeypatch.setattr(linear, "processors", lambda device: 1)
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
def test_rows_at_one_position() -> None:
    """As a model decodes them whose positions are not given."""
    block = make("retnet")
    ours, theirs = (filled(block, 3, torch.float32) for _ in range(2))
    expected, actual = decode(plain_step, theirs, block, 3, positions=1), decode(fused_step, ours, block, 3, positions=1)
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


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
@pytest.mark.parametrize("norm", ["head", "joint", "none"])
@pytest.mark.parametrize("mixer", ["kda", "mamba2"])
def test_gates_and_norms_in_their_own_order(mixer: str, norm: str) -> None:
    """KDA's sigmoid after the norm, of narrow matrices; Mamba-2's swish gate before it. Both with a read gate after the norm, and none."""
    kind = MIXERS[mixer]
    for gate, rows in ((HeadGateConfig(read_position="after_norm", init_std=1.0), 1), (None, 3)):
        odd = {"decay_rank": 5, "gate_rank": 7} if mixer == "kda" else {"num_groups": 2}
        own = kind(**odd, output_norm=norm, conv_size=0 if rows == 1 else 4, head_k_dim=12, head_v_dim=20)
        assert_equal_to_plain(make(own, head_gate=gate), rows)


@here
def test_odd_numbers_and_widths_of_heads(rows: int) -> None:
    assert_equal_to_plain(make("gla", num_heads=1), rows)
    assert_equal_to_plain(make("gla", head_k_dim=20, head_v_dim=40), rows)
    assert_equal_to_plain(make("retnet", num_heads=3, head_k_dim=6, head_v_dim=9), rows)


@here
def test_bfloat16_is_no_further_from_the_truth_than_the_plain_step(rows: int) -> None:
    for mixer, state_dtype in (
        ("gla", torch.float32),
        ("gated_deltanet", torch.bfloat16),
        ("kda", torch.float32),
        ("mamba2", torch.float32),
    ):
        block, exact = make(mixer, torch.bfloat16), make(mixer)
        exact.load_state_dict(block.state_dict())
        ours, theirs, true = filled(block, rows, state_dtype), filled(block, rows, state_dtype), filled(exact, rows, torch.float32)
        for name, x in tensors(true).items():
            x.copy_(getattr(ours, name))
        fused, plain = decode(fused_step, ours, block, rows), decode(plain_step, theirs, block, rows)
        truth = decode(lambda b, x, *a, e=exact: plain_step(e, x.float(), *a), true, block, rows)
        assert (fused - truth).norm() <= 1.2 * (plain - truth).norm(), mixer


@pytest.mark.gpu
def test_outputs_are_written_everywhere(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is poisoned with NaN before the kernels run, as for all tests where they are interpreted; nothing of it may show."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    gate = HeadGateConfig(read_position="after_norm", init_std=1.0)
    for mixer in ("gated_deltanet", "kda"):
        assert_equal_to_plain(make(mixer, head_gate=gate), rows)


@pytest.mark.parametrize(("width", "input_dtype", "dtype", "few"), [
    (1024, torch.float32, torch.bfloat16, True),
    (2048, torch.float32, torch.bfloat16, False),
    (2048, torch.bfloat16, torch.bfloat16, True),
    (256, torch.float32, torch.float32, True),
    (512, torch.float32, torch.float32, False),
])  # fmt: skip
def test_an_input_too_wide_for_registers_is_normalised_first(
    width: int, input_dtype: torch.dtype, dtype: torch.dtype, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Mamba-2's read-out, which is float32 and normalised as a whole, twice as wide as the model."""
    launched: list[str] = []
    monkeypatch.setattr(linear, "launch", lambda kernel, *_: launched.append(kernel.fn.__name__))
    weight = torch.empty(16, width, dtype=dtype)
    linear.linear(linear.LinearInput(torch.empty(4, width, dtype=input_dtype), weight[0]), [weight])
    assert launched == (["few_rows_kernel"] if few else ["normalize_kernel", "rows_kernel"])


def test_what_cannot_step_in_kernels_says_why() -> None:
    x = torch.zeros(1, 1, HIDDEN)
    assert make("gla").cpu().step_obstacle(x) is None
    assert make("gla").cpu().double().step_obstacle(x.double()) == "kernels compute in float32, the model is float64"
    assert make("gla", head_k_dim=300).cpu().step_obstacle(x) == "keys are at most 256 wide, got 300"
    assert "torch.bfloat16" in str(make("gla").cpu().step_obstacle(x.bfloat16()))
    adapted = make("gla").cpu()
    adapted.mixer.q_proj = torch.nn.Sequential(adapted.mixer.q_proj)
    assert adapted.step_obstacle(x) == "a part of a GatedLinearAttention block has been replaced"
    for mixer, part in (("gla", "decay_up_proj"), ("kda", "decay_up_proj"), ("kda", "gate_up_proj"), ("mamba2", "dt_proj")):
        adapted = make(mixer).cpu()
        setattr(adapted.mixer, part, torch.nn.Sequential(getattr(adapted.mixer, part)))
        assert adapted.step_obstacle(x) == f"a part of a {type(adapted.mixer).__name__} block has been replaced"
    hooked = make("gla").cpu()
    hooked.mixer.register_forward_hook(lambda *_: None)
    assert hooked.step_obstacle(x) == "a block has hooks"
