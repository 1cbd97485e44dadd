"""What must hold for any input: causality, hand-over of the state, packing, and the paper's parallel form."""

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from headmax.ops import Packing, gla, linear_attention, registry
from headmax.ops.spec import Case

from .oracle import SPECS, distance, run

BACKENDS = ("reference", "chunkwise")
PER_TOKEN = ("q", "k", "v", "log_decay", "beta", "read_gate", "write_gate")


def cut(inputs: dict, first: int, end: int) -> dict:
    """The inputs of tokens first to end."""
    return {key: x[:, first:end] if key in PER_TOKEN and torch.is_tensor(x) and x.ndim > 1 else x for key, x in inputs.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
@given(time=st.integers(2, 150), data=st.data())
def test_state_hand_over_equals_one_pass(name: str, backend: str, time: int, data: st.DataObject) -> None:
    spec, at = SPECS[name], data.draw(st.integers(1, time - 1))
    inputs = spec.inputs(Case(time=time, key=8, value=6, gates="both", initial_state=True, decay="mixed"), torch.float64, seed=time)
    whole, last = spec.function(**inputs, return_state=True, backend=backend)
    first, state = spec.function(**cut(inputs, 0, at), return_state=True, backend=backend)
    second, state = spec.function(**cut(inputs, at, time) | {"initial_state": state}, return_state=True, backend=backend)
    assert distance(torch.cat([first, second], 1), whole) <= 1e-12
    assert distance(state, last) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
@given(lengths=st.lists(st.integers(0, 90), min_size=1, max_size=5).filter(any))
def test_packing_equals_separate_sequences(name: str, backend: str, lengths: list[int]) -> None:
    spec = SPECS[name]
    case = Case(time=sum(lengths), key=8, value=6, gates="both", initial_state=True, lengths=tuple(lengths), decay="mixed")
    inputs = spec.inputs(case, torch.float64, seed=len(lengths))
    packed, states = spec.function(**inputs, return_state=True, backend=backend)
    bounds = inputs.pop("cu_seqlens").cu_seqlens.tolist()
    for n, (first, end) in enumerate(itertools.pairwise(bounds)):
        if first == end:
            assert torch.equal(states[n], inputs["initial_state"][n])
            continue
        alone = cut(inputs, first, end) | {"initial_state": inputs["initial_state"][n : n + 1]}
        o, state = spec.function(**alone, return_state=True, backend=backend)
        assert distance(packed[:, first:end], o) <= 1e-12
        assert distance(states[n], state[0]) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
@given(time=st.integers(2, 100), data=st.data())
def test_nothing_depends_on_later_tokens(name: str, backend: str, time: int, data: st.DataObject) -> None:
    spec, at = SPECS[name], data.draw(st.integers(1, time - 1))
    case = Case(time=time, key=8, value=6, gates="both")
    before, other = spec.inputs(case, torch.float64, seed=0), spec.inputs(case, torch.float64, seed=1)
    mixed = {key: torch.cat([x[:, :at], other[key][:, at:]], 1) if key in PER_TOKEN else x for key, x in before.items()}
    expected = spec.function(**before, backend=backend)[0][:, :at]
    assert (
        torch.equal(spec.function(**mixed, backend=backend)[0][:, :at], expected)
        or distance(spec.function(**mixed, backend=backend)[0][:, :at], expected) <= 1e-14
    )


@pytest.mark.parametrize("name", SPECS)
def test_packing_object_and_tensor_are_the_same(name: str) -> None:
    spec = SPECS[name]
    inputs = spec.inputs(next(case for case in spec.cases if case.lengths))
    packing = inputs.pop("cu_seqlens")
    o, _ = spec.function(**inputs, cu_seqlens=packing)
    for boundaries in (packing.cu_seqlens, packing.cu_seqlens.int()):
        assert torch.equal(spec.function(**inputs, cu_seqlens=boundaries)[0], o)


def test_packing_reads_positions_of_flattened_batches() -> None:
    packing = Packing.from_positions(torch.tensor([[0, 1, 2, 0, 0, 1]]))
    assert packing is not None
    assert packing.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert packing.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert Packing.from_positions(torch.arange(6)[None]) is None
    assert Packing.from_positions(torch.arange(5, 11)[None]) is None
    midway = Packing.from_positions(torch.tensor([[5, 6, 7, 0, 1]]))
    assert midway is not None
    assert midway.cu_seqlens.tolist() == [0, 3, 5]


@pytest.mark.parametrize("name", SPECS)
def test_gates_are_factors_of_query_and_write(name: str) -> None:
    """read_gate scales q; write_gate scales k, and v in the delta rule, whose keys have unit length."""
    spec = SPECS[name]
    inputs = spec.inputs(Case(time=70, key=8, value=6, gates="both"), torch.float64)
    gated, _ = spec.function(**inputs)
    read, write = inputs.pop("read_gate")[..., None], inputs.pop("write_gate")[..., None]
    target = "v" if name in ("gated_delta_rule", "kda") else "k"
    ungated, _ = spec.function(**inputs | {target: inputs[target] * write})
    assert distance(gated, ungated * read) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in SPECS if name != "gla"])
def test_a_key_head_serves_value_heads_that_follow_each_other(name: str, backend: str) -> None:
    """Value head h is what it would be by itself, with key head h // 3."""
    spec = SPECS[name]
    inputs = spec.inputs(Case(time=70, key=8, value=6, value_heads=6, gates="both", initial_state=True), torch.float64)
    o, state = spec.function(**inputs, return_state=True, backend=backend)
    for h in range(6):
        own = {
            key: x.narrow(1 if key == "initial_state" else 2, h // 3 if key in "qk" else h, 1) if torch.is_tensor(x) else x
            for key, x in inputs.items()
        }
        alone, last = spec.function(**own, return_state=True, backend=backend)
        assert distance(o[:, :, h], alone[:, :, 0]) <= 1e-13
        assert distance(state[:, h], last[:, 0]) <= 1e-13


KDA = Case(batch=2, time=70, key=8, value=6, gates="both", initial_state=True)


@pytest.mark.parametrize(("backend", "bound"), [("reference", 1e-12), ("chunkwise", 1e-12), ("triton", 1e-5)])
def test_kda_with_one_decay_for_all_channels_is_the_gated_delta_rule(backend: str, bound: float) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    delta = SPECS["gated_delta_rule"]
    inputs = delta.inputs(replace(KDA, batch=1, heads=1, value_heads=2), torch.float32 if backend == "triton" else torch.float64, device)
    expected = run(delta, inputs, backend)
    spread = inputs["log_decay"].unsqueeze(-1).expand(-1, -1, -1, KDA.key)
    found = run(SPECS["kda"], inputs | {"log_decay": spread}, backend)
    found["d_log_decay"] = found["d_log_decay"].sum(-1)
    for key, x in found.items():
        assert distance(x, expected[key]) <= bound, key


@pytest.mark.parametrize("backend", BACKENDS)
def test_kda_whose_keys_recall_nothing_is_gla(backend: str) -> None:
    """Each key has a channel of its own, as long as there are any: there is nothing to erase, and beta is one more write gate."""
    inputs = SPECS["kda"].inputs(replace(KDA, time=8, initial_state=False, normalize=False), torch.float64)
    inputs["k"] = torch.eye(8, dtype=torch.float64)[:, None].expand(2, 8, 2, 8)
    o, state = SPECS["kda"].function(**inputs, return_state=True, backend=backend)
    beta, _ = inputs.pop("beta"), inputs.pop("normalize_qk")
    expected = gla(**inputs | {"write_gate": inputs["write_gate"] * beta}, return_state=True, backend=backend)
    assert distance(o, expected[0]) <= 1e-13
    assert distance(state, expected[1]) <= 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
def test_kda_that_writes_nothing_reads_what_decays(backend: str) -> None:
    inputs = SPECS["kda"].inputs(replace(KDA, decay="mixed"), torch.float64) | {"normalize_qk": False}
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    o, state = SPECS["kda"].function(**inputs, scale=1.0, return_state=True, backend=backend)
    left = inputs["log_decay"].cumsum(1).exp()
    read = inputs["q"] * inputs["read_gate"][..., None] * left
    assert distance(o, torch.einsum("bthk,bhkv->bthv", read, inputs["initial_state"])) <= 1e-13
    assert distance(state, left[:, -1, :, :, None] * inputs["initial_state"]) <= 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_parallel_form_of_the_paper(decay: str, backend: str) -> None:
    """The masked quadratic product in closed form: plain linear attention, RetNet, GLA."""
    case = Case(batch=2, time=100, heads=3, key=8, value=6, gates="both", decay="none" if decay == "none" else "head")
    spec = SPECS["gla" if decay == "channel" else "linear_attention"]
    inputs = spec.inputs(case, torch.float64)
    q, k, v = (inputs[x].transpose(1, 2) for x in ("q", "k", "v"))
    read, write = (inputs[x].transpose(1, 2) for x in ("read_gate", "write_gate"))
    steps = torch.arange(100.0, dtype=torch.float64)
    causal = (steps[:, None] >= steps).double()
    if decay == "none":
        weights = torch.einsum("bhik,bhjk->bhij", q, k)
    elif decay == "head":
        distance_in_time = (steps[:, None] - steps).clamp_min(0)
        weights = torch.einsum("bhik,bhjk->bhij", q, k) * torch.exp(inputs["log_decay"][:, None, None] * distance_in_time)
    else:
        total = inputs["log_decay"].transpose(1, 2).cumsum(2)
        weights = torch.einsum("bhik,bhjk,bhijk->bhij", q, k, torch.exp((total[:, :, :, None] - total[:, :, None]).clamp_max(0)))
    weights = read[..., None] * weights * write[..., None, :] * causal * 8**-0.5
    function = gla if decay == "channel" else linear_attention
    o, _ = function(**inputs, backend=backend)
    assert distance(o, (weights @ v).transpose(1, 2)) <= 1e-12


@pytest.mark.parametrize("name", SPECS)
def test_compiles_into_one_graph_and_packing_does_not_recompile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 2 tokens: decays per channel take a step for each power of two, which the compiler traces."""
    monkeypatch.setattr("headmax.ops.packing.CHUNK", 2)
    spec = SPECS[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(spec.function, fullgraph=True, backend=counter, dynamic=True)
    for lengths in ((30, 70, 50), (64, 36, 50), (10, 10, 130)):
        inputs = spec.inputs(Case(time=150, key=8, value=6, gates="both", initial_state=True, lengths=lengths))
        expected, actual = spec.function(**inputs, return_state=True), compiled(**inputs, return_state=True)
        assert distance(actual[0], expected[0]) <= 1e-6
        assert distance(actual[1], expected[1]) <= 1e-6
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_work_counted_by_hand() -> None:
    """Retention at B=8 T=4096 H=4 K=256 V=512 in bfloat16: q, k, v, o once are 0.40 GB, chunks of 64 take 75 GFLOP."""
    case, spec = Case(batch=8, time=4096, heads=4, key=256, value=512, decay="head"), SPECS["linear_attention"]
    tokens = 8 * 4096 * 4
    assert spec.bytes_moved(case, 2) == tokens * 2 * (256 + 512) * 2 == 402_653_184
    assert spec.flops(case) == tokens * (64 * (256 + 512) + 4 * 256 * 512)
    assert SPECS["gated_delta_rule"].flops(case) > spec.flops(case)
    assert SPECS["gla"].bytes_moved(case, 2) == 402_653_184 + 4 * tokens * 256


def test_auto_says_once_which_backend_it_took(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_announced", set())
    monkeypatch.setattr(registry, "_chosen", {})
    inputs = SPECS["gla"].inputs(Case(time=3, key=4, value=4))
    with caplog.at_level("DEBUG", logger="headmax"):
        gla(**inputs)
        gla(**inputs)
    assert [record.getMessage() for record in caplog.records] == ["gla: backend 'chunkwise' on cpu"]


def test_a_packing_does_not_change() -> None:
    packing = Packing([0, 2, 2, 5])
    elsewhere = packing.to("meta")
    assert (elsewhere.cu_seqlens.device.type, elsewhere.num_sequences, elsewhere.size) == ("meta", 3, packing.size)
    assert packing.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert packing.to("cpu") is packing


def test_packing_of_short_sequences_uses_short_chunks() -> None:
    packing = Packing([0, 2, 3, 5])
    assert packing.size == 2
    assert packing.slot_tokens.tolist() == [0, 1, 2, 5, 3, 4]
    assert packing.chunk_table.tolist() == [[0, 2], [2, 1], [3, 2]]
    long = Packing([0, 130, 131])
    assert long.size == 64
    assert long.chunk_table.tolist() == [[0, 64], [64, 64], [128, 2], [130, 1]]
    assert long.chunk_starts.tolist() == [0, 3, 4]
    assert [x.tolist() for x in long.chunks(128)] == [[[0, 128], [128, 2], [130, 1]], [0, 2, 3]]
    assert long.slot_starts.tolist() == [0, 3, 4]


def test_a_packing_is_built_once_for_a_tensor_until_it_changes_or_goes() -> None:
    bounds, cpu = torch.tensor([0, 2, 5]), torch.device("cpu")
    packing = Packing.of(bounds, cpu, 5)
    assert Packing.of(bounds, cpu, 5) is packing
    assert Packing.of(bounds.clone(), cpu, 5) is not packing
    bounds[1] = 3
    assert packing.cu_seqlens.tolist() == [0, 2, 5]
    assert Packing.of(bounds, cpu, 5).cu_seqlens.tolist() == [0, 3, 5]
    kept = weakref.ref(Packing.of(bounds, cpu, 5))
    del bounds
    gc.collect()
    assert kept() is None
    with torch.inference_mode():
        bounds = torch.tensor([0, 2, 5])
        Packing.of(bounds, cpu, 5)
        bounds[1] = 3
        assert Packing.of(bounds, cpu, 5).cu_seqlens.tolist() == [0, 3, 5]
