"""What the kernels promise beyond agreement with the oracle."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headmax.ops import registry
from headmax.ops.spec import Case

from .oracle import SPECS, distance, each, run

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
here = pytest.mark.gpu if GPU else lambda test: test  # interpreted where there is no GPU
BOTH = Case(batch=2, time=150, heads=2, key=20, value=24, gates="both", initial_state=True)


EMPTY_BETWEEN = (0, 6, 0, 250, 0)


def both(name: str) -> Case:
    """BOTH, and less of it for KDA where it is interpreted: it runs most kernels twice."""
    return BOTH if GPU or name != "kda" else replace(BOTH, batch=1, time=70)


def inputs_of(name: str, case: Case, dtype: torch.dtype = torch.float32) -> dict:
    return SPECS[name].inputs(case, dtype, DEVICE)


def assert_bit_identical(name: str, inputs: dict, expected: dict[str, torch.Tensor]) -> None:
    for key, x in run(SPECS[name], inputs, "triton").items():
        assert torch.equal(x, expected[key]), key


def cut_into_segments(monkeypatch: pytest.MonkeyPatch, segments: int = 3) -> None:
    """Every sequence, whatever its length, on a GPU so small that blocks of states stay whole."""
    from headmax.ops.kernels import common, scan

    monkeypatch.setattr(scan, "processors", lambda device: 1)
    monkeypatch.setattr(common.Layout, "segments", lambda self, blocks, wanted: segments)


def remembering(name: str, case: Case, dtype: torch.dtype) -> dict:
    """Inputs whose states hardly decay, so that it shows what segments hand on."""
    inputs = inputs_of(name, case, dtype)
    return inputs | {"log_decay": inputs["log_decay"] / 200}


def test_segments_give_every_processor_a_block_and_are_not_short() -> None:
    from headmax.ops.kernels.common import MIN_SEGMENT, Layout

    def segments(batch: int, chunks: int, blocks: int, processors: int) -> int:
        return Layout(batch, 64 * chunks, None, None).segments(blocks, processors)

    assert segments(2, 256, 16, 132) == 4
    assert segments(1, 3 * MIN_SEGMENT, 1, 132) == 3
    assert segments(8, 256, 16, 132) == segments(1, 1, 1, 132) == 1


@here
@pytest.mark.parametrize(("name", "kernel", "key"), [("linear_attention", "scan", 160), ("gated_delta_rule", "delta_scan", 40)])
def test_blocks_of_states_half_as_wide_change_no_bit(name: str, kernel: str, key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from headmax.ops.kernels import scan

    inputs = inputs_of(name, Case(time=200, heads=1, key=key, value=2 * key, gates="both", initial_state=True), torch.bfloat16)

    def on(processors: int) -> tuple[dict[str, int], int]:
        monkeypatch.setattr(scan, "processors", lambda device: processors)
        return scan.scan_tiles(kernel, inputs["k"], inputs["v"], scan.Layout(1, 200, None, None), narrowest=32)

    whole, _ = on(1)
    expected = run(SPECS[name], inputs, "triton")
    half, segments = on(2 * scan.state_blocks(whole, inputs["k"], inputs["v"]))
    assert (2 * half["BV"], segments) == (whole["BV"], 1)
    assert_bit_identical(name, inputs, expected)


@here
@pytest.mark.parametrize(
    ("name", "dtype", "lengths", "segments", "initial"),
    each(
        [
            (dtype, lengths, *begin)
            for dtype in (torch.float32, torch.bfloat16)
            for lengths in (None, EMPTY_BETWEEN)
            for begin in ((4, True), (4, False), (2, True))
        ],
        [(torch.float32, EMPTY_BETWEEN, 4, True), (torch.bfloat16, None, 4, False)],
    ),
)
def test_segments_of_a_sequence_change_nothing(
    name: str, dtype: torch.dtype, lengths: tuple[int, ...] | None, segments: int, initial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, some segments of the short sequence are empty, and so are whole sequences."""
    case = Case(batch=1, time=256, heads=1, key=20, value=24, gates="both", initial_state=initial, lengths=lengths)
    inputs = remembering(name, case, dtype)
    expected = SPECS[name].oracle(inputs)
    cut_into_segments(monkeypatch, segments)
    for key, x in run(SPECS[name], inputs, "triton").items():
        assert distance(x, expected[key]) <= (2e-5 if dtype == torch.float32 else 1e-2), key


@here
@pytest.mark.parametrize("name", ["linear_attention", "gated_delta_rule"])
@pytest.mark.parametrize("lengths", [None, (130, 470)], ids=["rows", "packed"])
def test_segments_of_wide_heads(name: str, lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear attention has long chunks there; the delta rule hands on states in several blocks of keys and of values."""
    case = Case(batch=1, time=600, heads=1, key=136, value=80, gates="both", initial_state=True, lengths=lengths)
    inputs = remembering(name, case, torch.bfloat16)
    expected = SPECS[name].oracle(inputs)
    cut_into_segments(monkeypatch, 4)
    for key, x in run(SPECS[name], inputs, "triton").items():
        assert distance(x, expected[key]) <= 1e-2, key


@here
@pytest.mark.parametrize(("name", "used", "segments"), each([(0, False), (1, False), (0, True), (1, True)], [(1, False), (0, True)]))
def test_one_result_may_be_without_a_gradient(name: str, used: int, segments: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, inputs = SPECS[name], inputs_of(name, Case(time=300, heads=1, key=20, value=24, gates="both", initial_state=True))

    def function(backend: str, **arguments: Any) -> list[torch.Tensor]:
        nothing = sum(0 * x.sum() for x in arguments.values() if isinstance(x, torch.Tensor))
        results = spec.function(**arguments, return_state=True, backend=backend)
        return [x if n == used else x.detach() + nothing for n, x in enumerate(results)]

    wide = {key: x.double() if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
    expected = spec.evaluate(wide, partial(function, "reference"))
    if segments:
        cut_into_segments(monkeypatch)
    for key, x in spec.evaluate(inputs, partial(function, "triton")).items():
        assert distance(x, expected[key]) <= 2e-5 if expected[key].any() else not x.any(), key


@here
@pytest.mark.parametrize("name", SPECS)
def test_gradients_of_steep_decays_are_not_differences_of_large_numbers(name: str) -> None:
    """Next to nothing is left of a token by the next one: what a step scales is a thousandth of what a token reads of itself."""
    case = Case(time=70, heads=1, key=20, value=24, gates="both", initial_state=True)
    inputs = inputs_of(name, case)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], math.log(1e-3))
    expected, found = SPECS[name].oracle(inputs)["d_log_decay"], run(SPECS[name], inputs, "triton")["d_log_decay"]
    assert distance(found, expected) <= 1e-5


@here
def test_gradients_of_keys_of_one_channel_are_as_near_as_float32_s_sums() -> None:
    """A number divided by its own length is 1 or -1: its gradient is a difference of two equal terms, and nearly 0."""
    inputs = inputs_of("gated_delta_rule", Case(time=40, heads=1, key=1, value=24, gates="both", initial_state=True))
    exact = SPECS["gated_delta_rule"].oracle(inputs)
    unit = inputs | {"q": inputs["q"].sign(), "k": inputs["k"].sign(), "normalize_qk": False}
    terms = SPECS["gated_delta_rule"].oracle(unit)
    found = run(SPECS["gated_delta_rule"], inputs, "triton")
    for name in ("q", "k"):
        term = (terms[f"d_{name}"] / inputs[name].double().abs()).norm()
        assert float((found[f"d_{name}"].double() - exact[f"d_{name}"]).norm() / term) <= 3e-7, name


@here
def test_a_state_that_is_not_finite_leaves_the_gradients_of_keys_as_they_are() -> None:
    inputs = inputs_of("gla", Case(time=64, heads=1, key=8, value=8, gates="both", initial_state=True))
    expected = run(SPECS["gla"], inputs, "triton")["d_k"]
    inputs["initial_state"][0, 0, 3, 2] = float("nan")
    found = run(SPECS["gla"], inputs, "triton")
    assert found["d_q"][..., 3].isnan().any()
    assert distance(found["d_k"], expected) <= 1e-6


@here
@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
def test_keys_that_resemble_each_other_are_still_told_apart(name: str) -> None:
    """The triangular inverse at its worst: equal keys, full strength, no decay."""
    inputs = inputs_of(name, Case(time=130, heads=1, key=20, value=24, normalize=False))
    inputs["k"] = torch.nn.functional.normalize(inputs["k"][:, :1].expand_as(inputs["k"]) + 1e-3 * inputs["k"], dim=-1)
    inputs["beta"] = torch.ones_like(inputs["beta"])
    inputs["log_decay"] = torch.zeros_like(inputs["log_decay"])
    spec = SPECS[name]
    expected = spec.oracle(inputs)
    for key, x in run(spec, inputs, "triton").items():
        assert distance(x, expected[key]) <= 1e-3, key


@here
@pytest.mark.parametrize("name", SPECS)
def test_gates_near_zero_have_their_gradients(name: str) -> None:
    inputs = inputs_of(name, both(name))
    inputs["read_gate"][:, 3, 0], inputs["write_gate"][:, 5, 1] = 0.0, 0.0
    inputs["read_gate"][:, 66, 1], inputs["write_gate"][:, 68, 0] = 1e-30, -1e-12
    expected = SPECS[name].oracle(inputs)
    found = run(SPECS[name], inputs, "triton")
    for key, x in found.items():
        assert distance(x, expected[key]) <= 2e-5, key
    for key, token, head in (("d_read_gate", 3, 0), ("d_write_gate", 5, 1), ("d_read_gate", 66, 1), ("d_write_gate", 68, 0)):
        assert distance(found[key][:, token, head], expected[key][:, token, head]) <= 1e-4, key


@here
@pytest.mark.parametrize(("scale", "write"), [(-0.5, 0.0), (0.0, 1.0)])
def test_chunks_that_write_or_read_nothing_have_gradients(scale: float, write: float) -> None:
    inputs = inputs_of("gla", Case(time=64, key=20, value=24, gates="both")) | {"scale": scale}
    inputs["write_gate"] *= write
    expected, found = SPECS["gla"].oracle(inputs), run(SPECS["gla"], inputs, "triton")
    for key, x in found.items():
        assert distance(x, expected[key]) <= 2e-5, key


NEAR_THE_RANGE = [(name, step) for name, steps in {"gla": (-0.5, -1.3, -1.6, -1.85, -1.9), "kda": (-1.85,)}.items() for step in steps]


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "step"), NEAR_THE_RANGE)
def test_decays_over_a_chunk_near_the_range_of_float32(name: str, step: float, dtype: torch.dtype) -> None:
    """Up to exp(-120) over 64 tokens one product does; what two chunks in a row decay by is then no number of float32 any more."""
    inputs = inputs_of(name, BOTH if name == "gla" else replace(BOTH, batch=1, heads=1), dtype)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], step)
    inputs["log_decay"][..., ::2] /= 10
    expected, found = SPECS[name].oracle(inputs), run(SPECS[name], inputs, "triton")
    for key, x in found.items():
        assert distance(x, expected[key]) <= (2e-5 if dtype == torch.float32 else 1e-2), key


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_growth_and_decay_within_a_chunk_are_no_steep_decay(dtype: torch.dtype) -> None:
    """What grows by exp(62) and decays by as much two tokens later: the whole chunk does neither."""
    inputs = inputs_of("gla", BOTH, dtype)
    inputs["log_decay"].zero_()[:, 10] = 62.0
    inputs["log_decay"][:, 12] = -62.0
    expected, found = SPECS["gla"].oracle(inputs), run(SPECS["gla"], inputs, "triton")
    for key, x in found.items():
        assert distance(x, expected[key]) <= (2e-5 if dtype == torch.float32 else 1e-2), key


@here
@pytest.mark.parametrize("name", ["gla", "kda"])
def test_decays_in_bfloat16_get_their_gradient_so(name: str) -> None:
    inputs = inputs_of(name, both(name), torch.bfloat16)
    inputs["log_decay"] = inputs["log_decay"].bfloat16()
    expected, found = SPECS[name].oracle(inputs), run(SPECS[name], inputs, "triton")
    assert found["d_log_decay"].dtype == torch.bfloat16
    for key, x in found.items():
        assert distance(x, expected[key]) <= 1e-2, key


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "segments"), each([(1,), (3,)], [(3,)]))
def test_outputs_are_written_everywhere(name: str, segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is poisoned with NaN before the kernels run, as for all tests where they are interpreted; nothing of it may show."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poisoned(make):  # type: ignore[no-untyped-def]
        def made(*args, **kwargs):  # type: ignore[no-untyped-def]
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() and not x.is_meta else x

        return made

    inputs = inputs_of(name, both(name))
    if segments > 1:
        cut_into_segments(monkeypatch, segments)
    clean = run(SPECS[name], inputs, "triton")
    monkeypatch.setattr(torch, "empty", poisoned(empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(new_empty))
    assert_bit_identical(name, inputs, clean)


@here
@pytest.mark.parametrize("name", SPECS)
def test_non_contiguous_inputs(name: str) -> None:
    inputs = inputs_of(name, both(name))
    strided = {key: x.transpose(0, -1).contiguous().transpose(0, -1) if torch.is_tensor(x) else x for key, x in inputs.items()}
    assert not strided["q"].is_contiguous()
    straight = run(SPECS[name], inputs, "triton")
    assert_bit_identical(name, strided, straight)


@here
@pytest.mark.parametrize("name", SPECS)
def test_repeated_runs_are_bit_identical(name: str) -> None:
    """Forward and backward: no kernel adds with atomics, nor fills a tile that a product still reads."""
    wide = Case(batch=2, time=300, heads=2, key=136, value=80, gates="both", initial_state=True)
    for inputs in (inputs_of(name, both(name)), *[inputs_of(name, wide, torch.bfloat16)] * 3 * GPU):
        first = run(SPECS[name], inputs, "triton")
        assert_bit_identical(name, inputs, first)


@here
@pytest.mark.parametrize("name", SPECS)
def test_gates_save_nothing_but_themselves(name: str) -> None:
    def saved(case: Case) -> int:
        inputs = {key: x.requires_grad_() if torch.is_tensor(x) else x for key, x in inputs_of(name, case).items()}
        kept: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            kept[x.data_ptr()] = x.numel() * x.element_size()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            SPECS[name].function(**inputs, backend="triton")
        return sum(kept.values())

    case = both(name)
    plain, gated = (saved(replace(case, gates=gates)) for gates in ("", "both"))
    assert gated - plain == 2 * 4 * case.batch * case.time * case.heads


@here
@pytest.mark.parametrize(("name", "dynamic"), each([(None,), (True,)], [(True,)] if GPU else []))
def test_compiled_and_eager_agree_without_a_graph_break(name: str, dynamic: bool | None) -> None:
    inputs = inputs_of(name, both(name))
    spec = SPECS[name]

    def call(**x):  # type: ignore[no-untyped-def]
        return spec.function(**x, return_state=True, backend="triton")

    eager, compiled = spec.evaluate(inputs, call), spec.evaluate(inputs, torch.compile(call, fullgraph=True, dynamic=dynamic))
    for key, x in compiled.items():
        assert distance(x, eager[key]) <= 1e-6, key


CHECKS = ("test_schema", "test_faketensor")


@here
@pytest.mark.parametrize("name", SPECS)
def test_operators_are_registered_properly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema and fake implementation, by PyTorch's own check, of whole sequences and of segments."""
    from headmax.ops.kernels import decayed_attention, delta_rule

    x = inputs_of(name, both(name))
    gates = (x["read_gate"], x["write_gate"], 0.3, x["initial_state"], None, None)
    if name in ("gated_delta_rule", "kda"):
        op, arguments = delta_rule._forward, (x["q"], x["k"], x["v"], x["log_decay"], x["beta"], *gates, True)
    else:
        op, arguments = decayed_attention._forward, (x["q"], x["k"], x["v"], x["log_decay"], *gates)
    torch.library.opcheck(op, arguments, test_utils=CHECKS)
    cut_into_segments(monkeypatch)
    torch.library.opcheck(op, arguments, test_utils=CHECKS)


@here
def test_the_gates_operator_is_registered_properly() -> None:
    from headmax.ops.kernels import gate

    scores = torch.randn(2, 5, 8, device=DEVICE)
    torch.library.opcheck(gate._split, (scores, 2, 1.0, 1.0, True), test_utils=CHECKS)


def test_inputs_beyond_the_kernels_are_refused_by_name_and_passed_over_by_auto() -> None:
    inputs = SPECS["gla"].inputs(Case(time=5, key=300, value=8))
    with pytest.raises(ValueError, match=r"at most 256 .key. and 512 .value. wide, got 300 and 8; use .chunkwise."):
        SPECS["gla"].function(**inputs, backend="triton")


def test_auto_says_why_a_gpu_goes_without_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(registry, "_announced", set())
    monkeypatch.setattr(registry, "_chosen", {})
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert registry._choose("gla", "auto", "cuda", torch.float32, None) == "chunkwise"
    assert "'triton' is passed over: triton is not installed" in caplog.text


def test_auto_goes_without_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_chosen", {})
    monkeypatch.setattr(registry, "kernel_obstacle", lambda: None)
    for compiles, expected in ((True, "triton"), (False, "chunkwise")):
        monkeypatch.setattr(registry, "compiles_in_16_bits", lambda compiles=compiles: compiles)
        chosen = registry.obstacles("gla", "cuda", torch.bfloat16)
        assert next(name for name, reason in chosen.items() if reason is None) == expected
        assert registry.obstacles("gla", "cuda", torch.float32)["triton"] is None
        assert registry.obstacles("short_conv", "cuda", torch.bfloat16)["triton"] is None


@pytest.mark.parametrize(
    ("major", "shared", "hip", "why"),
    [(7, 99, None, "compute capability 8.0"), (8, 64, None, "99 KiB of shared memory"), (9, 227, "6.4", "NVIDIA"), (9, 227, None, None)],
)
def test_gpus_too_small_for_the_kernels_go_without(
    major: int, shared: int, hip: str | None, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(name="a card", major=major, minor=5, shared_memory_per_block_optin=1024 * shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    registry.kernel_obstacle.cache_clear()
    found = registry.kernel_obstacle()
    registry.kernel_obstacle.cache_clear()
    assert found is None if why is None else why in str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_more_sequences_than_a_grids_second_axis_holds(name: str) -> None:
    inputs = inputs_of(name, Case(time=34_000, heads=4, key=64, value=64, gates="both", lengths=(2,) * 17_000))
    expected = run(SPECS[name], inputs, "chunkwise")
    for key, x in run(SPECS[name], inputs, "triton").items():
        assert distance(x, expected[key]) <= 2e-5, key


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", SPECS)
def test_kernels_run_where_their_tensors_are(name: str) -> None:
    inputs = SPECS[name].inputs(BOTH, torch.float32, "cuda:1")
    expected = SPECS[name].oracle(inputs)
    for key, x in run(SPECS[name], inputs, "triton").items():
        assert distance(x, expected[key]) <= 2e-5, key


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_more_than_two_to_the_31_elements(name: str) -> None:
    """Of v and o: the second half by itself, from the state the first half leaves, must give the same."""
    spec, time, half = SPECS[name], 1_100_032, 550_016
    small = spec.inputs(Case(time=64, heads=4, key=64, value=512, gates="both"), torch.bfloat16, "cuda")
    inputs = {key: x.repeat(1, time // 64, *[1] * (x.ndim - 2)) if torch.is_tensor(x) and x.ndim > 1 else x for key, x in small.items()}
    assert inputs["v"].numel() > 2**31
    last = inputs["v"][:, half:].detach().requires_grad_()
    first = {key: x[:, :half] if torch.is_tensor(x) and x.ndim > 1 else x for key, x in inputs.items()}
    second = {key: x[:, half:] if torch.is_tensor(x) and x.ndim > 1 else x for key, x in inputs.items()} | {"v": last}
    _, state = spec.function(**first, return_state=True, backend="triton")
    o, _ = spec.function(**second, initial_state=state, backend="triton")
    d_last = torch.autograd.grad(o.float().sum(), last)[0]
    v = inputs["v"].requires_grad_()
    whole, _ = spec.function(**inputs, backend="triton")
    d_v = torch.autograd.grad(whole[:, half:].float().sum(), v)[0]
    assert distance(whole[:, -4096:], o[:, -4096:]) <= 1e-2
    assert distance(d_v[:, -4096:], d_last[:, -4096:]) <= 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax-gla-tiny", "softmax-retnet-tiny", "softmax-gdn-tiny"])
def test_a_sequence_of_262144_tokens_trains(name: str) -> None:
    from headmax import HeadmaxForCausalLM, recipes

    model = HeadmaxForCausalLM(recipes.get(name).model).cuda().train()
    ids = torch.randint(0, 1000, (1, 262_144), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.skipif(GPU, reason="says that there is no GPU")
@pytest.mark.parametrize("name", SPECS)
def test_fla_is_refused_where_it_cannot_run(name: str) -> None:
    """And nothing else minds that it is installed: this suite runs beside it."""
    pytest.importorskip("fla")
    with pytest.raises(ValueError, match=f"{name}: backend 'fla' cannot run here: needs a CUDA device, got cpu"):
        SPECS[name].function(**SPECS[name].inputs(Case(time=5)), backend="fla")


@pytest.mark.gpu
@pytest.mark.usefixtures("plain_fla")
@pytest.mark.parametrize("name", SPECS)
def test_fla_behind_our_signature(name: str) -> None:
    pytest.importorskip("fla")
    case = Case(batch=2, time=130, heads=2, key=64, value=64, gates="both", initial_state=True)
    inputs = SPECS[name].inputs(case, torch.bfloat16, "cuda")
    with torch.no_grad():
        o, state = SPECS[name].function(**inputs, return_state=True, backend="fla")
        expected = SPECS[name].function(**inputs, return_state=True, backend="chunkwise")
    assert distance(o, expected[0]) <= 2e-2
    assert distance(state, expected[1]) <= 2e-2
