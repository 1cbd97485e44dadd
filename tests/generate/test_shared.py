"""An engine that others call from threads, from inside a call, with damaged weights, with text that means harm."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from headmax.data.encoder import Encoder
from headmax.data.tokenizer import load, mistral
from headmax.generate import GREEDY, Engine, Request, Sampling
from tests.data.corpus import byte_level

from .checkpoint import make_model, make_tokenizer, tokens


def test_threads_on_one_engine_wait_for_each_other() -> None:
    engine = Engine(make_model(), max_batch=2)
    requests = [
        Request(tokens(20 + n, seed=n), None, 25, rule) for n, rule in enumerate([GREEDY, Sampling(seed=1), GREEDY, Sampling(seed=2)])
    ]
    alone = [engine.generate(request)[0].tokens for request in requests]
    together = threading.Barrier(len(requests))

    def call(request: Request) -> list[list[int]]:
        together.wait()
        return [engine.generate(request, on_token=lambda *_: None)[0].tokens for _ in range(3)]

    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(call, requests)) == [[expected] * 3 for expected in alone]


def test_a_call_from_inside_a_call_is_refused_and_the_outer_one_whole() -> None:
    engine = Engine(make_model(), max_batch=2)
    request, said = Request(tokens(9), None, 6, GREEDY), []
    expected = engine.generate(request)[0].tokens

    def inner(*_: object) -> None:
        with pytest.raises(RuntimeError, match="engine is busy"):
            engine.generate(Request(tokens(30, seed=4), None, 6))
        with pytest.raises(RuntimeError, match="engine is busy"):
            next(engine.forced([engine.prefill(tokens(3))], torch.tensor([[3]])))  # prefill touches nothing that is shared
        said.append(True)

    assert engine.generate(request, on_token=inner)[0].tokens == expected
    assert len(said) == 6
    steps = engine.forced([engine.prefill(tokens(3))], torch.tensor([[3, 4]]))
    next(steps)
    with pytest.raises(RuntimeError, match="engine is busy"):
        engine.generate(request)
    steps.close()
    assert engine.generate(request)[0].tokens == expected


@pytest.mark.parametrize("rule", [GREEDY, Sampling(top_p=0.9, repetition_penalty=1.2)], ids=str)
def test_damaged_weights_raise(rule: Sampling, tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    engine = Engine(model, tokenizer=make_tokenizer())
    with pytest.raises(ValueError, match="logits are not finite after 0 new tokens of request 0: its weights hold NaN or infinity"):
        engine.generate(Request("Hello", None, 5, rule))
    with pytest.raises(ValueError, match="prefix is of no use"):
        engine.prefill("Hello").save(tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_weights_that_go_wrong_later_raise_then() -> None:
    model = make_model()
    engine = Engine(model)
    second = engine.generate(Request([5], None, 2, GREEDY))[0].tokens[1]
    with torch.no_grad():
        model.model.embed_tokens.weight[second] = torch.inf
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone().nan_to_num(0, 0, 0))
    with pytest.raises(ValueError, match=r"not finite after \d+ new tokens of request 1"):
        engine.generate([Request([6], None, 0), Request([second], None, 6, GREEDY)])


@pytest.mark.parametrize("kind", ["mistral", "byte-level"])
def test_a_prompt_has_the_ids_that_prepared_text_has(kind: str, tmp_path: Path) -> None:
    if kind == "mistral":
        pytest.importorskip("mistral_common")
        mistral().save(tmp_path)
    else:
        byte_level(tmp_path / "tokenizer.json")
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>"}')
    loaded = load(str(tmp_path))
    engine = Engine(make_model(vocab_size=loaded.vocab_size), tokenizer=AutoTokenizer.from_pretrained(tmp_path))
    prepared, start = Encoder(loaded.tokenizer, 1, "uint16"), [1] if kind == "mistral" else []
    for text in ("a</s> <s>b", "<s>", "</s> x", " a", "a<|endoftext|>b<|endoftext|>", "<unk>\n<s>\n", "plain text"):
        (ids, _), _ = prepared.encode([(text, True, 0)])
        assert engine.encode(text, start=False).tolist() == ids.tolist()[1:]
        assert engine.encode(text).tolist() == start + ids.tolist()[1:]


def test_a_prefix_file_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    engine, path = Engine(make_model("hybrid"), max_length=100), tmp_path / "p.safetensors"
    engine.prefill(tokens(9)).save(path)
    whole = load_file(path)
    metadata = {"format": "headmax prefix 1", "model": engine.fingerprint, "layers": "2"}
    wrong = torch.zeros(1, 3, 2)
    for changes, about, said in (
        ({}, {"layers": "many"}, "not a whole prefix"),
        ({"0.recurrent": None}, {}, "not a whole prefix: '0.recurrent' is missing"),
        ({}, {"layers": "1000000000"}, "not a whole prefix"),
        ({}, {"layers": "1"}, "states are of 1 layers, the model has 2"),
        ({"0.recurrent": wrong}, {}, "state of layer 0 is"),
        ({"1.keys": wrong, "1.values": wrong.clone()}, {}, "state of layer 1 is"),
        ({"tokens": torch.tensor([2**40])}, {}, "tokens must be one sequence of ids of a vocabulary of 258"),
        ({"tokens": torch.zeros(2, 2)}, {}, "tokens must be one sequence"),
        ({"logits": wrong}, {}, "logits must be 258 of torch.float32"),
    ):
        save_file({name: x for name, x in (whole | changes).items() if x is not None}, path, metadata=metadata | about)
        with pytest.raises(ValueError, match=r"p\.safetensors: ") as caught:
            engine.load_prefix(path)
        assert said in str(caught.value)
    path.write_bytes(b"\xff" * 5000)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        engine.load_prefix(path)
