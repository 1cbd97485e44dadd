"""The mixers as drop-in modules: state, packing, padding, and gates that do what they say."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM, Packing
from headmax.layers import MIXERS
from headmax.layers.feature_map import FEATURE_MAPS
from headmax.layers.fusion import Fusion
from headmax.layers.mixers import RecurrentMixer
from headmax.layers.mixers.config import RecurrentConfig
from headmax.layers.norm import OutputNorm
from headmax.layers.rotary import Rotary, RotarySettings, rotate
from headmax.layers.short_conv import ShortConvolution, unit_convolution
from headmax.ops import linear_attention, registry
from headmax.ops.spec import distance
from tests.layers.compare import DEVICES, compare

RECURRENT = [name for name in MIXERS if name != "attention"]
WIDTH = 32


def make(name: str, *, heads: int = 4, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if name != "attention":
        narrow = {"head_k_dim": 8} if name == "mamba2" else {}
        options = {"conv_size": 4, "head_gate": HeadGateConfig(init_std=1.0), **narrow} | options
    mixer = build(name, heads, **options).double().requires_grad_(False)
    if name == "mamba2":
        mixer.D *= 0.01  # at first its steps are so short that D x hides what the state does
    return mixer


def build(name: str, heads: int, **options: Any) -> nn.Module:
    """The mixer with options of its own and of its model."""
    shared = {key: options.pop(key) for key in ("norm_eps", "head_gate", "backend") if key in options}
    return MIXERS[name](**options).build(WIDTH, heads, **shared)


def hidden(batch: int, time: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, time, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(x: torch.Tensor, y: torch.Tensor, tolerance: float = 1e-12) -> bool:
    return bool((x - y).abs().max() <= tolerance)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("at", [1, 2, 5, 19])
@pytest.mark.parametrize("told", [True, False], ids=["positions", "no positions"])
def test_state_hand_over(name: str, at: int, told: bool) -> None:
    mixer, x = make(name), hidden(2, 20)
    positions = torch.arange(20)[None] if told else torch.empty(1, 0)
    whole = mixer(x, return_state=True, positions=positions if told else None)
    first = mixer(x[:, :at], return_state=True, positions=positions[:, :at] if told else None)
    second = mixer(x[:, at:], state=first.state, return_state=True, positions=positions[:, at:] if told else None)
    assert close(torch.cat([first.hidden, second.hidden], 1), whole.hidden)
    for x, y in zip(_leaves(second.state), _leaves(whole.state), strict=True):
        assert close(x, y)


def _leaves(state: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(state) if x is not None]


@pytest.mark.parametrize("name", MIXERS)
def test_token_by_token_equals_one_pass(name: str) -> None:
    mixer, x, state, outputs = make(name), hidden(2, 9), None, []
    for t in range(9):
        output, state, _ = mixer(x[:, t : t + 1], state=state, return_state=True, positions=torch.tensor([[t]]))
        outputs.append(output)
    assert close(torch.cat(outputs, 1), mixer(x).hidden)


@pytest.mark.parametrize("name", MIXERS)
def test_packing_equals_separate_sequences(name: str) -> None:
    mixer, lengths = make(name), [1, 2, 70, 3]
    pieces = [hidden(1, length, seed) for seed, length in enumerate(lengths)]
    packed = mixer(torch.cat(pieces, 1), packing=Packing([0, 1, 3, 73, 76])).hidden
    assert close(packed, torch.cat([mixer(piece).hidden for piece in pieces], 1))


@pytest.mark.parametrize("name", RECURRENT)
def test_packed_sequences_go_on_from_their_own_states(name: str) -> None:
    """In three rounds, sequences shorter than the convolution among them: states, outputs and gradients are those of each alone."""
    mixer, rounds = make(name), [[1, 2, 70, 3], [2, 1, 1, 5], [4, 9, 2, 1]]
    alone: list[Any] = [None] * 4
    state, seen = None, [0] * 4
    for n, lengths in enumerate(rounds):
        pieces = [hidden(1, length, seed=10 * n + i).requires_grad_() for i, length in enumerate(lengths)]
        places = [torch.arange(start, start + length) for start, length in zip(seen, lengths, strict=True)]
        packing = Packing([0, *accumulate(lengths)])
        packed = mixer(torch.cat(pieces, 1), state=state, return_state=True, packing=packing, positions=torch.cat(places)[None])
        single = [
            mixer(x, state=past, return_state=True, positions=place[None]) for x, past, place in zip(pieces, alone, places, strict=True)
        ]
        expected = torch.cat([each.hidden for each in single], 1)
        assert close(packed.hidden, expected)
        for x, *xs in zip(_leaves(packed.state), *(_leaves(each.state) for each in single), strict=True):
            assert close(x, torch.cat(xs))
        direction = torch.randn_like(expected)
        actual, wanted = (torch.autograd.grad(y, pieces, direction, retain_graph=True) for y in (packed.hidden, expected))
        assert all(close(a, e, 1e-10) for a, e in zip(actual, wanted, strict=True))
        state, alone, seen = packed.state, [each.state for each in single], [a + b for a, b in zip(seen, lengths, strict=True)]


def test_attention_refuses_the_state_of_packed_sequences() -> None:
    mixer, x, packing = make("attention"), hidden(1, 5), Packing([0, 2, 5])
    with pytest.raises(ValueError, match="Attention: packed sequences leave no state"):
        mixer(x, packing=packing, return_state=True)
    with pytest.raises(ValueError, match="Attention: packed sequences leave no state"):
        mixer(x, packing=packing, state=mixer(x, return_state=True).state)


def choices(monkeypatch: pytest.MonkeyPatch, backend: str, device: str = "cpu") -> dict[str, set[str]]:
    """Which backend each op took in a small model's training step, and in reading a prompt."""
    taken: dict[str, set[str]] = {}
    choose = registry._choose

    def spy(op: str, *arguments: Any) -> str:
        taken.setdefault(op, set()).add(name := choose(op, *arguments))
        return name

    monkeypatch.setattr(registry, "_choose", spy)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "vocab_size": 20, "conv_size": 4}
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **sizes, head_gate=HeadGateConfig(), backend=backend)).to(device)
    ids = torch.arange(10, device=device)[None]
    model.train()(ids, labels=ids).loss.backward()
    model.eval()(ids, use_cache=True)
    return taken


AROUND = ("head_gate", "short_conv", "rms_norm", "cross_entropy")
"""The ops around a recurrence that have kernels."""


@pytest.mark.parametrize("backend", ["auto", "reference", "chunkwise", "triton"])
def test_a_backend_is_that_of_every_op(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    taken = choices(monkeypatch, backend)
    assert taken["gla"] == {"chunkwise" if backend == "auto" else backend}
    assert {op: taken[op] for op in AROUND} == {op: {"triton" if backend == "triton" else "reference"} for op in AROUND}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "chunkwise", "triton"])
def test_a_backend_is_that_of_every_op_on_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = "reference" if backend == "chunkwise" else "triton"
    taken = choices(monkeypatch, backend, "cuda")
    assert taken["gla"] == {"chunkwise" if backend == "chunkwise" else "triton"}
    assert {op: taken[op] for op in AROUND} == {op: {kernels} for op in AROUND}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", RECURRENT)
def test_the_kernels_of_a_mixer_compute_what_its_plain_form_does(name: str, device: str) -> None:
    pytest.importorskip("triton")
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    mixers = [make(name, backend=backend).float().to(device) for backend in ("triton", "chunkwise")]
    x, packing = hidden(1, 20).float().to(device), Packing([0, 2, 20], device)
    for state, positions in ((None, None), (mixers[1](x, packing=packing, return_state=True).state, packing.positions[None])):
        kernels, plain = (mixer(x, packing=packing, state=state, positions=positions, return_state=True) for mixer in mixers)
        assert all(distance(a, e) <= 1e-5 for a, e in zip(_leaves(kernels[:2]), _leaves(plain[:2]), strict=True))


def test_a_kernel_that_cannot_run_says_so() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"short_conv: backend 'triton' cannot run here: it computes in float32, got torch\.float64"):
        make("gla", backend="triton")(hidden(1, 5))


@pytest.mark.parametrize("name", MIXERS)
def test_left_padding_leaves_no_trace(name: str) -> None:
    mixer, x = make(name), hidden(1, 12)
    padded = torch.cat([hidden(1, 5, seed=9), x], 1)
    mask = torch.tensor([[0] * 5 + [1] * 12])
    assert close(mixer(padded, mask=mask).hidden[:, 5:], mixer(x).hidden, 1e-10)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_padding_is_nowhere_seen(name: str, fused: bool) -> None:
    """Holes, padding on either side, a row without tokens: outputs, states, gates and gradients are those of the tokens alone."""
    mixer, mask = make(name), torch.zeros(4, 12, dtype=torch.int64)
    mask[0, 2:], mask[1, :5], mask[2, [0, 3, 4, 9]] = 1, 1, 1
    x, past = hidden(4, 12).requires_grad_(), mixer(hidden(4, 3, seed=1), return_state=True).state
    positions = 3 + (mask.cumsum(1) - 1).clamp_min(0)
    for state in (None, past):
        place = positions if name == "retnet" and state is not None else None
        rotary = None if place is None else mixer.rotary.at(place[mask.bool()][None], torch.float64)
        padded = mixer(x, state=state, return_state=True, positions=rotary, mask=mask, fused=fused)
        for row in range(4):
            own = mask[row].bool()
            assert not padded.hidden[row, ~own].any()
            before = None if state is None else _row(state, row)
            if not own.any():
                kept = torch.zeros_like(padded.state.recurrent[row]) if before is None else before.recurrent[0]
                assert torch.equal(padded.state.recurrent[row], kept)
                continue
            alone = mixer(
                x[row : row + 1, own], state=before, return_state=True, positions=None if place is None else place[row, own][None]
            )
            assert close(padded.hidden[row, own], alone.hidden[0], 1e-10)
            assert all(close(a[row], e[0], 1e-10) for a, e in zip(_leaves(padded.state), _leaves(alone.state), strict=True))
            assert all(close(a[row, own], e[0], 1e-10) for a, e in zip(padded.gates, alone.gates, strict=True))
            wanted, actual = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (alone.hidden, padded.hidden[row]))
            assert close(actual, wanted, 1e-10)


def _row(state: Any, row: int) -> Any:
    return type(state)(state.recurrent[row : row + 1], tuple(x[row : row + 1] for x in state.conv))


@pytest.mark.parametrize("name", MIXERS)
def test_causal(name: str) -> None:
    mixer, x = make(name), hidden(1, 20)
    changed = torch.cat([x[:, :11], hidden(1, 9, seed=3)], 1)
    assert close(mixer(x).hidden[:, :11], mixer(changed).hidden[:, :11])


@pytest.mark.parametrize("source", ["head", "hidden_heads", "hidden"])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "uniform"])
@pytest.mark.parametrize("name", RECURRENT)
def test_every_kind_starts_from_the_same_mean_and_sums_to_its_scale(name: str, kind: str, source: str) -> None:
    for scale, total in ((1.0, 1.0), ("heads", 4.0)):
        gate = HeadGateConfig(kind=kind, source=source, scale=scale, init_std=0.0)  # type: ignore[arg-type]
        read, write = make(name, head_gate=gate)(hidden(2, 7)).gates
        for g in (read, write):
            assert g.shape == (2, 7, 4)
            assert close(g, torch.full_like(g, total / 4))
    gate = HeadGateConfig(kind=kind, source=source, init_std=1.0)  # type: ignore[arg-type]
    read, write = make(name, head_gate=gate)(hidden(2, 7)).gates
    sums_to_one = close(read.sum(-1), torch.ones(2, 7)) and close(write.sum(-1), torch.ones(2, 7))
    assert sums_to_one == (kind != "sigmoid")


PLACEMENTS = [
    ("query", "head"),
    ("query", "joint"),
    ("query", "none"),
    ("after_norm", "head"),
    ("after_norm", "joint"),
    ("after_norm", "none"),
]


def effect(name: str, gate: HeadGateConfig, **options: Any) -> float:
    """How much the layer's output changes from frozen uniform gates to these, the other weights being the same."""
    gated, uniform = make(name, head_gate=gate, **options), make(name, head_gate=replace(gate, kind="uniform"), **options)
    assert not uniform.load_state_dict(gated.state_dict(), strict=False).missing_keys
    x = hidden(1, 30)
    return float((gated(x).hidden - uniform(x).hidden).norm() / uniform(x).hidden.norm())


@pytest.mark.parametrize(("read_position", "output_norm"), PLACEMENTS)
@pytest.mark.parametrize("name", RECURRENT)
def test_each_gate_changes_the_output_at_each_placement(name: str, read_position: Any, output_norm: str) -> None:
    for read, write in ((True, False), (False, True)):
        gate = replace(MIXERS[name].recipe_gate, read=read, write=write, read_position=read_position, init_std=2.0)
        assert effect(name, gate, output_norm=output_norm, norm_eps=1e-5) > 0.03


@pytest.mark.parametrize("name", [name for name in RECURRENT if name != "mamba2"])
def test_the_literal_read_gate_acts_through_eps_alone(name: str) -> None:
    """Take eps away and a per-head norm leaves nothing of it; after the norm, or under a joint one, it stays."""
    literal, after = HeadGateConfig(write=False, init_std=2.0), HeadGateConfig(write=False, init_std=2.0, read_position="after_norm")
    assert effect(name, literal, norm_eps=1e-30) < 1e-9
    assert effect(name, after, norm_eps=1e-30) > 0.03
    assert effect(name, literal, norm_eps=1e-30, output_norm="joint") > 0.03


def test_the_literal_read_gate_of_mamba2_acts_beside_what_has_no_gate() -> None:
    literal = HeadGateConfig(write=False, scale="heads", init_std=2.0)
    assert effect("mamba2", literal, output_norm="head", norm_eps=1e-30) > 0.03


def test_a_per_head_norm_divides_the_literal_read_gate_out() -> None:
    """RMSNorm(G o) = o / sqrt(mean(o^2) + eps / G^2): a smaller gate acts as a larger eps, and as nothing else."""
    norm = OutputNorm("head", num_heads=4, head_dim=8, eps=1e-3).double()
    o, gate = torch.randn(2, 5, 4, 8, dtype=torch.float64), torch.rand(2, 5, 4, 1, dtype=torch.float64)
    expected = o / (o.square().mean(-1, keepdim=True) + 1e-3 / gate**2).sqrt()
    assert close(norm(gate * o), expected)
    tiny = OutputNorm("head", num_heads=4, head_dim=8, eps=1e-30).double()
    assert close(tiny(gate * o), tiny(o))
    joint = OutputNorm("joint", num_heads=4, head_dim=8, eps=1e-30).double()
    assert not close(joint(gate * o), joint(o), 1e-2)


def test_more_value_heads_than_key_heads() -> None:
    mixer = make("gated_deltanet", num_v_heads=8, head_v_dim=6)
    output = mixer(hidden(2, 11), return_state=True)
    assert output.gates[0].shape == (2, 11, 8)
    assert output.state.recurrent.shape == (2, 8, 4, 6)
    with pytest.raises(ValueError, match="num_v_heads must be a multiple of num_heads 4, got 6"):
        make("gated_deltanet", num_v_heads=6, head_v_dim=4)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_feature_maps(name: str) -> None:
    output = make("linear", feature_map=name)(hidden(1, 5)).hidden
    assert output.isfinite().all()
    phi = FEATURE_MAPS[name](torch.tensor([-2.0, 0.0, 3.0]))
    expected = {
        "identity": [-2.0, 0.0, 3.0],
        "relu": [0.0, 0.0, 3.0],
        "elu": [0.135335, 1.0, 4.0],
        "silu": [-0.238406, 0.0, 2.857722],
        "softmax": [0.006377, 0.047123, 0.946500],
    }
    torch.testing.assert_close(phi, torch.tensor(expected[name]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_short_convolution_is_a_causal_convolution(bias: bool) -> None:
    conv = ShortConvolution(6, 4, bias).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    y, state = conv(x, return_state=True)
    padded = nn.functional.pad(x.transpose(1, 2), (3, 0))
    expected = nn.functional.silu(nn.functional.conv1d(padded, conv.weight[:, None], conv.bias, groups=6)).transpose(1, 2)
    assert close(y, expected)
    assert torch.equal(state, x[:, -3:])
    assert state.untyped_storage().nbytes() < x.nbytes, "a state must not keep all inputs alive"
    assert conv(x)[1] is None


def test_rotary_depends_on_distance_only() -> None:
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def at(position: int) -> Rotary:
        return RotarySettings(8, 10_000.0).at(torch.tensor([[position]]), torch.float64)

    def product(i: int, j: int) -> torch.Tensor:
        return (rotate(q, at(i)) * rotate(k, at(j))).sum()

    assert close(product(7, 3), product(104, 100))
    assert not close(product(7, 3), product(7, 4), 1e-6)
    assert close(rotate(q, at(0)), q)


def test_errors_name_the_setting() -> None:
    with pytest.raises(ValueError, match="unknown kind 'softmx'; did you mean 'softmax'"):
        HeadGateConfig(kind="softmx")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown source 'query'; known: 'head', 'hidden_heads', 'hidden'"):
        HeadGateConfig(source="query")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="read and write are both False"):
        HeadGateConfig(read=False, write=False)
    with pytest.raises(ValueError, match="temperature must be a positive number, got 0"):
        HeadGateConfig(temperature=0)
    with pytest.raises(ValueError, match="scale must be a positive number or 'heads', got 'head'"):
        HeadGateConfig(scale="head")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_gate must be a HeadGateConfig or None, got True"):
        make("gla", head_gate=True)
    with pytest.raises(ValueError, match="GLAConfig: unknown output_norm 'heads'; did you mean 'head'"):
        make("gla", output_norm="heads")
    with pytest.raises(ValueError, match="LinearAttentionConfig: unknown feature_map 'rellu'; did you mean 'relu'"):
        make("linear", feature_map="rellu")
    with pytest.raises(ValueError, match="num_heads must be at least 1, got -4"):
        build("gla", -4)
    with pytest.raises(ValueError, match="head_v_dim: 32 channels do not split over 5 heads"):
        build("gla", 5, head_k_dim=4)
    with pytest.raises(ValueError, match="GLAConfig: conv_size must be 0 or a width of at least 2, got 1"):
        make("gla", conv_size=1)
    with pytest.raises(ValueError, match="source 'hidden_heads' needs a hidden_size that num_heads 3 divides, got 32"):
        build("gla", 3, head_k_dim=4, head_v_dim=4, head_gate=HeadGateConfig(source="hidden_heads"))
    retnet, x = make("retnet"), hidden(1, 3)
    state = retnet(x, return_state=True, positions=torch.arange(3)[None]).state
    with pytest.raises(ValueError, match="RetNet: positions must be given with a state that was made with positions"):
        retnet(x, state=state)


def test_a_recurrence_must_be_defined() -> None:
    with pytest.raises(TypeError, match="does not define a recurrence"):
        RecurrentMixer(WIDTH, 4, RecurrentConfig())(torch.randn(1, 2, WIDTH))


@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_reach_every_parameter(name: str) -> None:
    mixer = make(name, norm_eps=1e-2).requires_grad_()
    mixer(hidden(2, 12)).hidden.square().sum().backward()
    for key, parameter in mixer.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("time", "channels", "width", "bounds"), [(130, 70, 4, None), (5, 3, 2, None), (3, 8, 4, None), (151, 16, 4, [0, 1, 18, 82, 151])]
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_kernel_of_the_short_convolution(
    time: int, channels: int, width: int, bounds: list[int] | None, bias: bool, device: str
) -> None:
    pytest.importorskip("triton")
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    from headmax.ops.kernels.conv import short_conv

    conv = ShortConvolution(channels, width, bias).double()
    x = torch.randn(2 if bounds is None else 1, time, channels, dtype=torch.float64, requires_grad=True)
    packing = None if bounds is None else Packing(bounds)
    expected, _ = conv(x, None, packing)
    direction = torch.randn_like(expected)
    given = [x, *conv.parameters()]
    wanted = torch.autograd.grad(expected, given, direction)
    leaves = [y.detach().to(device, torch.float32).requires_grad_() for y in given]
    actual = short_conv(*(leaves if bias else [*leaves, None]), None if packing is None else packing.positions.to(device))
    gradients = torch.autograd.grad(actual, leaves, direction.to(device, torch.float32))
    for a, e in zip((actual, *gradients), (expected, *wanted), strict=True):
        assert distance(a, e) <= 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize(("time", "heads", "width", "gates", "bounds"), [
    (66, 1, 20, 1, None), (7, 3, 96, 3, None), (5, 1, 128, 0, None), (19, 2, 40, 4, [0, 1, 12, 19]),
])  # fmt: skip
def test_the_kernel_of_the_convolution_to_unit_length(
    time: int, heads: int, width: int, gates: int, bounds: list[int] | None, dtype: torch.dtype, bound: float, device: str
) -> None:
    """Heads of unit length, and the scores of heads before that: one for each, or several."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    packing = None if bounds is None else Packing(bounds)
    weight, scorer = torch.randn(heads * width, 4), torch.randn(gates, width) if gates else None

    def function(x: torch.Tensor, weight: torch.Tensor, scorer: torch.Tensor | None, backend: str) -> list[torch.Tensor]:
        there = packing and packing.to(x.device)
        return [y for y in unit_convolution(x, weight, scorer, heads, packing=there, backend=backend) if y is not None]

    compare(function, [torch.randn(2 if bounds is None else 1, time, heads * width), weight, scorer], device, dtype, bound)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks, at a block's input
@pytest.mark.parametrize(("name", "options", "products"), [
    ("gla", {"conv_size": 0}, 6),  # k, v, swish gate, output, decay up, and one for q, decay down and scores
    ("retnet", {"conv_size": 0}, 4),  # v, swish gate, output, and one for q, k and scores
    ("gated_deltanet", {"num_v_heads": 8}, 5),  # k, v, swish gate, output, and one for q, decay and strength
    ("mamba2", {"num_groups": 2}, 5),  # k, v, swish gate, output, and one for q and step
])  # fmt: skip
@pytest.mark.parametrize("source", ["head", "hidden_heads", "hidden"])
def test_a_fused_mixer_computes_what_its_modules_do(name: str, options: dict[str, Any], products: int, source: Any) -> None:
    """In float64, which autocast leaves alone; eagerly and compiled."""
    mixer = make(name, **options, head_gate=HeadGateConfig(init_std=1.0, source=source)).requires_grad_()
    x, leaves = hidden(2, 20).requires_grad_(), list(mixer.parameters())

    def gradients(mixer: Any, fused: bool) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(mixer(x, fused=fused).hidden.square().sum(), [x, *leaves])

    expected = gradients(mixer, fused=False)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(mixer, fullgraph=True, backend=counter)
    with torch.autocast("cpu", torch.bfloat16):
        for actual in (gradients(mixer, fused=True), gradients(compiled, fused=True)):
            assert max(distance(a, e) for a, e in zip(actual, expected, strict=True)) <= 1e-10
    found = [node for node in counter.graphs[0].graph.nodes if node.target is torch._C._nn.linear]
    assert len(found) == products


@pytest.mark.parametrize("name", RECURRENT)
def test_a_fused_mixer_hands_over_its_state(name: str) -> None:
    """Packed sequences too, some shorter than the convolution."""
    mixer, packing = make(name), Packing([0, 2, 12, 13])
    x, later = hidden(1, 13), hidden(1, 13, seed=1)
    positions = packing.positions[None]
    options = {"packing": packing, "positions": positions, "return_state": True}
    for state in (None, mixer(later, **options).state):
        fused, modules = (mixer(x, state=state, fused=fused, **options) for fused in (True, False))
        assert close(fused.hidden, modules.hidden)
        assert all(close(a, e) for a, e in zip(_leaves(fused.state), _leaves(modules.state), strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("name", "settings"), [
    ("gla", {}),
    ("gla", {"write": False, "read_position": "after_norm"}),
    ("gla", {"read": False, "kind": "sigmoid"}),
    ("retnet", {}),
    ("retnet", None),
    ("gated_deltanet", {"read_position": "after_norm"}),
], ids=str)  # fmt: skip
def test_the_kernels_of_a_fused_mixer(name: str, settings: dict[str, Any] | None) -> None:
    """They compute what the modules do, eagerly and compiled, and all gates are made in one."""
    gates = None if settings is None else HeadGateConfig(init_std=1.0, **settings)
    options: dict[str, Any] = {} if name == "gated_deltanet" else {"conv_size": 0}
    mixer = make(name, backend="triton", head_gate=gates, heads=2, **options).float().requires_grad_()
    x, leaves = hidden(2, 6).float().requires_grad_(), list(mixer.parameters())

    def gradients(mixer: Any, fused: bool) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(mixer(x, fused=fused).hidden.square().sum(), [x, *leaves])

    expected = gradients(mixer, fused=False)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mixer, fullgraph=True, backend=counter)
    for actual in (gradients(mixer, fused=True), gradients(compiled, fused=True)):
        assert max(distance(a, e) for a, e in zip(actual, expected, strict=True)) <= 2e-5
    called = [str(node.target) for part in counter.graphs[0].modules() if hasattr(part, "graph") for node in part.graph.nodes]
    kernels = {"retnet": "split_rotary", "gated_deltanet": "short_conv", "gla": "decayed_attention"}
    for kernel in ("read_out", kernels[name]):
        assert any(kernel in target for target in called), kernel
    assert sum(target == "headmax.split_gates.default" for target in called) == (gates is not None)


@pytest.mark.parametrize("name", ["gla", "retnet", "gated_deltanet"])
def test_what_is_no_longer_as_it_was_built_is_called(name: str) -> None:
    """A hook doubles what its module gives; an adapter stands where a norm or a projection was."""

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(x)

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "vocab_size": 20}
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer=name, **sizes, head_gate=HeadGateConfig(init_std=1.0), fused=True)).double()
    block, x = model.model.layers[0], torch.randn(2, 5, 16, dtype=torch.float64)
    assert block.fusion(x) == Fusion(norms=True, mixer=True, mlp=True)
    before = block(x).hidden
    assert distance(before, block(x, fusion=Fusion()).hidden) <= 1e-10
    norms = {"mixer_norm", "mlp_norm"}
    mlp = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    mixer = {"mixer.q_proj", "mixer.k_proj", "mixer.o_proj", "mixer.output_norm", "mixer.output_norm.norm"}
    mixer |= {f"mixer.{side}" for side in block.mixer.side} | ({"mixer.convs.0"} if name == "gated_deltanet" else set())

    def double(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (2 * output[0], output[1]) if isinstance(output, tuple) else 2 * output

    for path in sorted(norms | mlp | mixer):
        expected = Fusion(path not in norms, path not in mixer, path not in mlp)
        handle = block.get_submodule(path).register_forward_hook(double)
        assert block.fusion(x) == expected
        hooked = block(x).hidden
        handle.remove()
        assert distance(hooked, before) > 1e-9, path
        assert distance(block(x).hidden, before) <= 1e-12, path
        if path != "mixer.output_norm" and "convs" not in path:
            owner, _, last = path.rpartition(".")
            inner = block.get_submodule(path)
            setattr(block.get_submodule(owner), last, Doubled(inner))
            assert block.fusion(x) == expected
            assert distance(block(x).hidden, hooked) <= 1e-12, path
            setattr(block.get_submodule(owner), last, inner)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_see_a_hook_that_arrives_later() -> None:
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", hidden_size=16, num_hidden_layers=1, num_heads=2, vocab_size=20, fused=True))
    ids = torch.arange(10)[None]
    expected = model.double()(ids).logits
    torch._dynamo.reset()
    model.model.compile_blocks(backend="eager")
    assert distance(model(ids).logits, expected) <= 1e-10
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    hooked = model(ids).logits
    assert distance(hooked, expected) > 1e-3
    model.model.layers[0]._compiled_call_impl = None
    assert distance(hooked, model(ids).logits) <= 1e-10


def test_the_operator_of_the_short_convolution_is_registered_properly() -> None:
    pytest.importorskip("triton")
    from headmax.ops.kernels.conv import _forward, short_conv

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight, scorer = (torch.randn(shape, device=device) for shape in ((1, 5, 6), (6, 3), (2, 3)))
    for bias, *given in ((None, None, 0), (weight[:, 0].contiguous(), None, 0), (None, None, 2), (None, scorer, 2)):
        torch.library.opcheck(_forward, (x, weight, bias, None, *given, 1e-6))
    single = torch.randn(1, 3, 6, device=device).transpose(0, 1)  # one token each, whose strides say little
    torch.testing.assert_close(
        short_conv(single, weight, None, None), short_conv(single.clone(memory_format=torch.contiguous_format), weight, None, None)
    )


def test_the_first_token_reads_the_sign_of_its_own_score() -> None:
    """It has only itself to read, o = (q·k) v, and the norm divides all but the sign out: hence peaks of the gradient near q·k = 0."""
    norm = OutputNorm("head", num_heads=1, head_dim=8, eps=1e-6).double()
    torch.manual_seed(0)
    v, target = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def read(score: float) -> tuple[torch.Tensor, float]:
        q = torch.tensor([score, 0.0], dtype=torch.float64).view(1, 1, 1, 2).requires_grad_()
        o, _ = linear_attention(q, torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64), v, scale=1.0)
        normed = norm(o)
        (gradient,) = torch.autograd.grad((normed * target).sum(), q)
        return normed.detach(), float(gradient.norm())

    above, below, near = (read(score) for score in (0.1, -0.1, 0.0))
    torch.testing.assert_close(above[0], -below[0])
    torch.testing.assert_close(above[0], read(1.0)[0], rtol=1e-3, atol=0.0)
    assert near[1] > 1e4 * above[1]
