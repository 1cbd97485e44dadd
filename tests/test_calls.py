"""Calls from Python that no function can answer: a ValueError that names the argument and what it needs; and odd ones that it can."""

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from headmax import HeadGateConfig, Packing, accelerate, load_gates, save_gates, softmaxify
from headmax.generate import Engine, Request, Sampling
from headmax.layers import GLAConfig
from headmax.ops import gla, head_gate, step
from headmax.ops.head_gate import split_gates
from headmax.ops.spec import Case
from tests.generate.checkpoint import MODELS, make_model, make_tokenizer
from tests.ops.oracle import SPECS

NAN = float("nan")
CASE = Case(batch=2, time=6, heads=2, key=4, value=3, gates="both", initial_state=True)
ROW = Case(batch=1, time=6, heads=2, key=4, value=3)
EIGHT = torch.float8_e4m3fn
IDS = torch.randint(2, 258, (2, 9), generator=torch.Generator().manual_seed(0))


def refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def recurrence(name: str, case: Case = CASE, **changes: Any) -> tuple[Tensor, Tensor | None]:
    spec = SPECS[name]
    return spec.function(**(spec.inputs(case) | changes))


INPUTS = SPECS["gla"].inputs(CASE)
ONE = SPECS["gla"].inputs(Case(batch=2, time=1, heads=2, key=4, value=3))
TERMS = tuple(ONE[name] for name in ("q", "k", "v", "log_decay"))
STATE = torch.zeros(2, 2, 4, 3)
NESTED = torch.nested.nested_tensor([torch.randn(6, 2, 4)] * 2, layout=torch.jagged)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": INPUTS["q"].to(EIGHT), "k": INPUTS["k"].to(EIGHT), "v": INPUTS["v"].to(EIGHT)}, "q must be float64, .* got torch.float8"),
        ({"q": INPUTS["q"].to(torch.complex64)}, "q must be float64, .* got torch.complex64"),
        ({"read_gate": INPUTS["read_gate"].to(EIGHT)}, "read_gate must be float64, .* got torch.float8"),
        ({"write_gate": INPUTS["write_gate"].to("meta")}, "write_gate must be on cpu, as the other inputs are, got meta"),
        ({"initial_state": STATE.to(EIGHT)}, "initial_state must be float64, .* got torch.float8"),
        ({"initial_state": STATE.long()}, "initial_state must be float64, .* got torch.int64"),
        ({"initial_state": STATE.to("meta")}, "initial_state must be on cpu, as the other inputs are, got meta"),
        ({"initial_state": STATE.to_sparse()}, "initial_state must be a dense tensor, got torch.sparse_coo"),
        ({"q": INPUTS["q"].to_sparse()}, "q must be a dense tensor, got torch.sparse_coo"),
        ({"q": NESTED}, "q must be a dense tensor, got a nested tensor: pack its sequences"),
        ({"scale": NAN}, "scale must be a finite number, got nan"),
        ({"scale": "heads"}, "scale must be a finite number, got 'heads'"),
        ({"scale": 1j}, "scale must be a finite number, got 1j"),
        ({"scale": torch.tensor(0.5, requires_grad=True)}, "scale must be a finite number, got Tensor"),
        ({"context_group": 3}, "context_group must be a ProcessGroup of torch.distributed, got int"),
        ({"backend": ["auto"]}, r"backend must be a name, .* got \['auto'\]"),
    ],
)
def test_recurrences(name: str, change: dict[str, Any], message: str) -> None:
    refused(f"^{name}: {message}", lambda: recurrence(name, **change))


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 2.5, 6], "must be a 1-D integer tensor, got torch.float32"),
        ([0.0, 6.0], "must be a 1-D integer tensor, got torch.float32"),
        ([False, True], "must be a 1-D integer tensor, got torch.bool"),
        ([[0, 6]], r"must be a 1-D integer tensor, got torch.int64 of shape \[1, 2\]"),
        (6, r"must be a 1-D integer tensor, got torch.int64 of shape \[\]"),
        (torch.tensor(6), r"must be a 1-D integer tensor, got torch.int64 of shape \[\]"),
        ("06", "must be a 1-D integer tensor or a list of integers, got '06'"),
        ([0, None, 6], "must be a 1-D integer tensor or a list of integers"),
        ({0: 6}, "must be a 1-D integer tensor or a list of integers"),
        ([0, 2**70], "must be a 1-D integer tensor or a list of integers"),
        ([], r"must rise from 0, .* got \[\]"),
        (torch.tensor([0, -1, 6]), r"must rise from 0, .* got \[0, -1, 6\]"),
        (torch.tensor([0, 2**62]), "must end at time = 6, got 4611686018427387904"),
        ([0, 10**12], "must end at time = 6, got 1000000000000"),
        (torch.tensor([0, 6], device="meta"), "must have numbers to read, got a tensor on the meta device"),
        (torch.tensor([0, 6]).to_sparse(), "must have numbers to read, got a tensor torch.sparse_coo"),
    ],
)
def test_boundaries(boundaries: Any, message: str) -> None:
    refused(f"^cu_seqlens {message}", lambda: recurrence("gla", ROW, cu_seqlens=boundaries))


def test_boundaries_that_no_memory_holds() -> None:
    refused("must end at time = the number of tokens, got", lambda: Packing([0, 2**50]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint64])
def test_boundaries_of_any_integers(dtype: torch.dtype) -> None:
    bounds = torch.tensor([0, 9, 2, 9, 6], dtype=dtype)[::2]
    expected, _ = recurrence("gla", ROW, cu_seqlens=torch.tensor([0, 2, 6]))
    for mode in (False, True):
        with torch.inference_mode(mode):
            assert torch.equal(recurrence("gla", ROW, cu_seqlens=bounds)[0], expected)


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
@pytest.mark.parametrize("name", SPECS)
def test_inputs_that_share_memory_are_read_as_copies_are(name: str, backend: str) -> None:
    keys = torch.randn(1, 1, 1, 4).expand(2, 6, 2, 4)
    odd = {
        "q": keys,
        "k": keys,
        "v": torch.randn(2, 3, 2, 6).permute(0, 3, 2, 1),
        "initial_state": torch.randn(1, 1, 4, 3).expand(2, 2, 4, 3),
    }
    plain = {argument: x.contiguous() for argument, x in odd.items()}
    assert torch.equal(recurrence(name, backend=backend, **odd)[0], recurrence(name, backend=backend, **plain)[0])


@pytest.mark.parametrize("name", SPECS)
def test_transforms_of_torch_func_run_the_reference(name: str) -> None:
    op, inputs = SPECS[name].function, SPECS[name].inputs(CASE)

    def summed(q: Tensor, backend: str = "auto") -> Tensor:
        return op(**inputs | {"q": q}, backend=backend)[0].square().sum()

    q = inputs["q"].clone().requires_grad_()
    summed(q).backward()
    torch.testing.assert_close(torch.func.grad(summed)(inputs["q"]), q.grad)
    several = torch.stack([inputs["q"], 2 * inputs["q"]])
    torch.testing.assert_close(torch.vmap(summed)(several), torch.stack([summed(x) for x in several]))
    refused(f"^{name}: backend 'chunkwise' takes no transform of torch.func", lambda: torch.func.grad(summed)(inputs["q"], "chunkwise"))


@pytest.mark.parametrize("name", SPECS)
def test_gradients_of_gradients_are_those_of_the_reference_or_refused(name: str) -> None:
    """Never a part of them: `torch.autograd.grad` for single inputs passes by the error that torch's once_differentiable leaves."""
    inputs = SPECS[name].inputs(Case(batch=1, time=150, heads=2, key=4, value=3))

    def second(backend: str, first: str, then: str) -> Tensor:
        given = {argument: x.clone().requires_grad_() for argument, x in inputs.items() if isinstance(x, Tensor)}
        total = SPECS[name].function(**inputs | given, backend=backend)[0].square().sum()
        gradient = torch.autograd.grad(total, given[first], create_graph=True)[0]
        return torch.autograd.grad(gradient.square().sum(), given[then])[0]

    wrong, refusals = [], 0
    for first, then in itertools.product(("q", "k", "v", "log_decay"), repeat=2):
        expected = second("reference", first, then)
        try:
            close = torch.allclose(second("chunkwise", first, then), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
            wrong += [] if close else [(first, then)]
        except RuntimeError as error:
            refusals += "has no second derivative: leave out create_graph=True" in str(error)
    assert not wrong
    assert refusals > 0


def test_the_loss_by_pieces_has_no_second_derivative() -> None:
    model = make_model(backend="reference")
    ids = torch.randint(2, 258, (1, 20))

    def curvature(**options: Any) -> Tensor:
        loss = model(ids, labels=ids, **options).loss
        gradient = torch.autograd.grad(loss, model.model.norm.weight, create_graph=True)[0]
        return torch.autograd.grad(gradient.sum(), model.lm_head.weight)[0]

    assert curvature(skip_logits=False).abs().max() > 0
    with pytest.raises(RuntimeError, match="loss_gradient has no second derivative"):
        curvature(skip_logits=True)


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (None, {}, "state must be a tensor, got NoneType"),
        (STATE.long(), {}, "state must be float64, .* got torch.int64"),
        (STATE.to(EIGHT), {}, "state must be float64, .* got torch.float8"),
        (torch.zeros(1, 1, 4, 3).expand(2, 2, 4, 3), {}, "state is written to, its elements must not share memory"),
        (STATE, {"scale": NAN}, "scale must be a finite number, got nan"),
        (STATE, {"cu_seqlens": torch.tensor([0, 1])}, "it takes no cu_seqlens"),
    ],
)
def test_steps(state: Any, options: dict[str, Any], message: str) -> None:
    refused(f"^step: {message}", lambda: step(gla, *TERMS, state=state, **options))


def test_steps_without_inputs() -> None:
    refused("^step: give a recurrence", lambda: step(gla, state=STATE))
    refused("^step: give a recurrence", lambda: step("gla", *TERMS, state=STATE))  # type: ignore[arg-type]
    refused("^step: q must be", lambda: step(gla, TERMS[0][0], *TERMS[1:], state=STATE))


X, WEIGHT = torch.randn(2, 6, 2, 4), torch.randn(2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: head_gate(X.to(EIGHT), WEIGHT), "head_gate: x must be float64"),
        (lambda: head_gate(X.bool(), WEIGHT), "head_gate: x must be float64"),
        (lambda: head_gate(X, WEIGHT.to(EIGHT)), "head_gate: weight must be float64"),
        (lambda: head_gate(X, WEIGHT.to("meta")), "head_gate: weight must be on cpu, as the other inputs are, got meta"),
        (lambda: head_gate(X, WEIGHT, temperature=NAN), "head_gate: temperature must be a finite number, got nan"),
        (lambda: head_gate(X, WEIGHT, temperature=float("inf")), "head_gate: temperature must be a finite number, got inf"),
        (lambda: head_gate(X, WEIGHT, scale="heads"), "head_gate: scale must be a finite number, got 'heads'"),  # type: ignore[arg-type]
        (lambda: split_gates(torch.ones(2, 6, 4, dtype=torch.int64), 2), "split_gates: scores must be float64"),
        (lambda: split_gates("x", 2), "split_gates: scores must be a tensor, got str"),  # type: ignore[arg-type]
    ],
)
def test_gates(call: Callable[[], object], message: str) -> None:
    refused(f"^{message}", call)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


ONES = torch.ones(2, 9, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS.float()}, r"input_ids must be \[batch, time\] of torch.int64 or torch.int32, got \[2, 9\] of torch.float32"),
        ({"input_ids": IDS.bool()}, "input_ids must be .* of torch.bool"),
        ({"input_ids": IDS[0]}, r"input_ids must be .* got \[9\]"),
        ({"input_ids": IDS[None]}, r"input_ids must be .* got \[1, 2, 9\]"),
        ({"input_ids": IDS.tolist()}, "input_ids must be a tensor, got list"),
        ({"input_ids": IDS[:, :0]}, r"input_ids must have at least one sequence and one token, got \[2, 0\]"),
        ({"input_ids": IDS[:0]}, r"input_ids must have at least one sequence and one token, got \[0, 9\]"),
        ({"input_ids": IDS + 258}, "input_ids must be from 0 to 257, the vocabulary, got "),
        ({"input_ids": -IDS}, "input_ids must be from 0 to 257, the vocabulary, got -"),
        ({"inputs_embeds": torch.ones(2, 9, 32, dtype=torch.int64)}, "inputs_embeds must be floating .* of torch.int64"),
        ({"inputs_embeds": torch.ones(9, 32)}, r"inputs_embeds must be floating \[batch, time, hidden_size = 32\], got \[9, 32\]"),
        ({"inputs_embeds": torch.ones(2, 9, 33)}, r"inputs_embeds must be floating .* got \[2, 9, 33\]"),
        ({"attention_mask": torch.full((2, 9), NAN)}, r"attention_mask must be 1 where there is a token .* got \[nan"),
        (
            {"attention_mask": torch.zeros(2, 9).index_fill(1, torch.tensor(0), -torch.inf)},
            r"attention_mask must be 1 .* got \[-inf, 0.0\]",
        ),
        ({"attention_mask": 2 * ONES}, r"attention_mask must be 1 where there is a token and 0 where there is none, got \[2\]"),
        ({"attention_mask": -ONES}, r"attention_mask must be 1 .* got \[-1\]"),
        ({"attention_mask": [[1] * 9] * 2}, "attention_mask must be a tensor, got list"),
        ({"attention_mask": ONES.to("meta")}, "attention_mask must have values to read, got one on the meta device"),
        ({"position_ids": [0] * 9}, "position_ids must be a tensor, got list"),
        ({"position_ids": torch.arange(9.0)[None] * NAN}, "position_ids restart inside a row"),
        ({"labels": IDS.float()}, r"labels must be integers \[batch, time\] = \[2, 9\], got \[2, 9\] of torch.float32"),
        ({"labels": IDS[:1]}, r"labels must be integers .* got \[1, 9\]"),
        ({"labels": IDS.bool()}, "labels must be integers .* torch.bool"),
        ({"labels": IDS.tolist()}, "labels must be integers .* got list"),
        ({"labels": IDS + 1000}, "labels must be -100 or 0 to 257, the vocabulary"),
        ({"labels": -ONES}, "labels must be -100 or 0 to 257, the vocabulary"),
        ({"past_key_values": "x"}, "past_key_values must be a HeadmaxCache, got str"),
        ({"past_key_values": ((IDS, IDS),)}, "past_key_values must be a HeadmaxCache, got tuple"),
        ({"input_ids": IDS[:1], "cu_seqlens": [0, 4.5, 9]}, "cu_seqlens must be a 1-D integer tensor, got torch.float32"),
        ({"input_ids": IDS[:1], "cu_seqlens": torch.tensor([0, 10**12])}, "cu_seqlens must end at time = 9, got 1000000000000"),
    ],
)
def test_models(arguments: dict[str, Any], message: str, model: Any) -> None:
    refused(message, lambda: model(**({} if "inputs_embeds" in arguments else {"input_ids": IDS}) | arguments))


def test_labels_of_fewer_bits(model: Any) -> None:
    expected = model(IDS, labels=IDS % 100).loss
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(model(IDS.int(), labels=(IDS % 100).to(dtype)).loss, expected)


def test_weights_without_values(model: Any, tmp_path: Path) -> None:
    """PyTorch multiplies by whatever lies in memory where one of two matrices is on the meta device."""
    whole, last = copy.deepcopy(model).to("meta"), make_model(tie_word_embeddings=False)
    assert whole(IDS.to("meta")).logits.shape == (2, 9, 258)
    refused("the model is on the meta device", lambda: whole(IDS))
    last.lm_head.to("meta")
    refused("lm_head is on the meta device", lambda: last(IDS))
    refused("model has weights on the meta device", lambda: Engine(last))
    refused("the gates are on the meta device", lambda: save_gates(whole, tmp_path))


def test_states_of_other_models_and_batches(model: Any) -> None:
    others = {name: make_model(name) for name in ("gated_deltanet", "retnet", "hybrid")}
    with torch.no_grad():
        made = model(IDS, use_cache=True).past_key_values
        hybrid = others["hybrid"](IDS, use_cache=True).past_key_values
        for number in (1, 3, 20):
            ids = IDS.repeat(1, 3)[:, :number]
            refused("state", lambda ids=ids: model(ids[:1], past_key_values=copy.deepcopy(made)))
            refused("state must be a RecurrentState", lambda ids=ids: model(ids, past_key_values=copy.deepcopy(hybrid)))
            for name, other in others.items():
                words = {
                    "gated_deltanet": "state has the inputs of 0 short convolutions",
                    "hybrid": "Attention: state must be",
                    "retnet": "state",
                }
                refused(words[name], lambda ids=ids, other=other: other(ids, past_key_values=copy.deepcopy(made)))
        bare = tree_map_only(torch.Tensor, lambda x: x.to("meta"), copy.deepcopy(made))
        refused("state", lambda: model(IDS, past_key_values=bare))


@pytest.mark.parametrize("name", MODELS)
def test_models_and_what_they_remember_are_pickled(name: str) -> None:
    model = make_model(name)
    there = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        cache = model(IDS, use_cache=True).past_key_values
        expected = model(IDS[:, :3], past_key_values=copy.deepcopy(cache)).logits
        assert torch.equal(there(IDS[:, :3], past_key_values=pickle.loads(pickle.dumps(cache))).logits, expected)


def test_a_pickled_prefix_leaves_the_model_behind(model: Any) -> None:
    engine = Engine(model)
    prefix = engine.prefill([5, 6, 7])
    content = pickle.dumps(prefix)
    assert len(content) < sum(x.nbytes for x in model.parameters()) / 10
    for other in (pickle.loads(content), copy.deepcopy(prefix)):
        assert isinstance(other.model, str)
        assert engine.generate(Request([8], other, 3))[0].tokens == engine.generate(Request([8], prefix, 3))[0].tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"max_batch": number}, "max_batch must be an integer of at least 1, got") for number in (1.5, "8", NAN, True, -1)),
        *(({"prefill_chunk": number}, "prefill_chunk must be an integer of at least 1, got") for number in (0, 2.5)),
        *(({"max_length": number}, "max_length must be an integer of at least 1, got") for number in (-1, "x")),
        *(
            ({"state_dtype": dtype}, "state_dtype must be one of torch.float32, .* got")
            for dtype in ("float32", None, EIGHT, torch.complex64)
        ),
    ],
)
def test_engines(options: dict[str, Any], message: str, model: Any) -> None:
    refused(message, lambda: Engine(model, **options))


@pytest.fixture(scope="module")
def engine(model: Any) -> Engine:
    return Engine(model, max_batch=2, tokenizer=make_tokenizer())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"prompt": prompt}, "prompt must be") for prompt in (None, 5, [[1, 2]], ["a"], [1.5], [True], [2**70], b"abc", {"a": 1}, IDS)),
        ({"prompt": IDS[0].to("meta")}, "prompt must be one sequence of token ids"),
        ({"prompt": "\ud800"}, "text is not Unicode"),
        *(({"max_new_tokens": new}, "max_new_tokens must be an integer that is not negative") for new in (1.5, NAN, "3", None, True, -1)),
        *(({"stop_tokens": stops}, "stop_tokens must be a list of token ids") for stops in ([1.5], ["x"], None, "ab")),
        *(({"stop_strings": stops}, "stop_strings must be a list of strings") for stops in ([3], None, "ab")),
        *(({"sampling": sampling}, "sampling must be a Sampling") for sampling in (None, {"temperature": 0})),
        ({"prefix": "x"}, "prefix must be a PrefixState"),
    ],
)
def test_requests(fields: dict[str, Any], message: str, engine: Engine) -> None:
    refused(message, lambda: engine.generate(Request(**{"prompt": [5]} | fields)))


@pytest.mark.parametrize("given", ["hello", ["hello"], [None]])
def test_what_is_no_request(given: Any, engine: Engine) -> None:
    refused("requests must be Request objects", lambda: engine.generate(given))


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", ["hot", None, 1j, torch.tensor(1.0), NAN])
def test_sampling(name: str, value: Any) -> None:
    refused(f"^{name} must be", lambda: Sampling(**{name: value}))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([1, 2]), r"tokens must be an integer tensor \[batch, time\]"),
        (torch.tensor([[1.5, 2.0]]), r"tokens must be an integer tensor \[batch, time\]"),
        ([[1, 2]], r"tokens must be an integer tensor \[batch, time\]"),
        (torch.tensor([[1000, 2]]), "tokens must be from 0 to 257, got 2 to 1000"),
        (torch.tensor([[-1, 2]]), "tokens must be from 0 to 257, got -1 to 2"),
        (torch.tensor([[1], [2]]), "tokens must have 1 to max_batch = 2 rows, one for each of the 1 prefixes, got 2"),
    ],
)
def test_forced_tokens(tokens: Any, message: str, engine: Engine) -> None:
    refused(message, lambda: list(engine.forced([engine.prefill([5])], tokens)))


def test_an_engine_does_the_same_in_every_mode(engine: Engine, model: Any) -> None:
    request = Request([5, 6], max_new_tokens=3, sampling=Sampling(temperature=0))
    expected = engine.generate(request)[0].tokens
    with torch.inference_mode():
        inside = Engine(model)
        assert engine.generate(request)[0].tokens == expected
    assert inside.generate(request)[0].tokens == expected
    try:
        torch.set_default_dtype(torch.float64)
        assert engine.generate(request)[0].tokens == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_mixers() -> None:
    mixer, x = GLAConfig().build(32, 2), torch.randn(2, 5, 32)
    refused("mask must be .* = .2, 5., got .2, 4.", lambda: mixer(x, mask=torch.ones(2, 4)))
    refused("attention_mask must be 1", lambda: mixer(x, mask=torch.full((2, 5), -torch.inf)))
    refused("state must be a RecurrentState", lambda: mixer(x, state=torch.zeros(3)))
    refused("packing must be a Packing", lambda: mixer(x[:1], packing=torch.tensor([0, 2, 5])))


@pytest.mark.parametrize("given", [None, "gpt2", torch.nn.Linear])
def test_what_is_no_model(given: Any, tmp_path: Path) -> None:
    for name, function in (("softmaxify", softmaxify), ("accelerate", accelerate)):
        refused(f"^{name}: model must be a loaded model", lambda function=function: function(given))
    refused("^save_gates: model must be a loaded model", lambda: save_gates(given, tmp_path))
    refused("^load_gates: model must be a loaded model", lambda: load_gates(given, tmp_path))


def test_gates_that_cannot_be_loaded_are_not_saved(tmp_path: Path) -> None:
    model = make_model(head_gate=HeadGateConfig())
    model.model.layers[0].mixer.head_gate.read_weight.data.fill_(NAN)
    refused(r"save_gates: model.layers.0.mixer.head_gate.read_weight holds NaN", lambda: save_gates(model, tmp_path / "g"))
    assert not (tmp_path / "g").exists()
