"""Our scores against lm-evaluation-harness's own Hugging Face class and against the model run plainly, request by request."""

import contextlib
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM
from headmax.eval.names import COMMONSENSE
from headmax.eval.plan import Limits, batches, families, split
from headmax.eval.requests import Request
from headmax.eval.run import Evaluation, Settings
from headmax.eval.scores import Score
from headmax.eval.scoring import Scorer
from headmax.train.parallel import World
from tests.eval.conftest import MODELS, make_model

HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
UNLIMITED = 100_000


def answer(model: HeadmaxForCausalLM, asked: list[Request], tokenizer: Any = None, batch_tokens: int = 16_384) -> dict[str, Score]:
    return Scorer(model, tokenizer, batch_tokens).answers(asked)


def ask(task: str, tokenizer: Any, model: HeadmaxForCausalLM, settings: Settings) -> tuple[list[Request], list[Any]]:
    """(our requests, the harness's instances)"""
    evaluation = Evaluation(model.config, tokenizer, settings)
    asked = evaluation.requests([task], lambda _: None)
    assert not evaluation.failures
    return asked[task], evaluation.instances(task)


def harness(model: HeadmaxForCausalLM, tokenizer: Any, instances: list[Any], batch_size: int, max_length: int = UNLIMITED) -> list[Any]:
    with contextlib.redirect_stderr(io.StringIO()):
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)
        return getattr(lm, instances[0].request_type)(instances)


def brute(model: HeadmaxForCausalLM, request: Request) -> float:
    """Without cache, packing or batch."""
    with torch.no_grad():
        logits = model(torch.tensor([request.context + request.targets[:-1]]), use_cache=False).logits[0, -len(request.targets) :]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(request.targets).unsqueeze(1)).sum())


@pytest.mark.parametrize("task", COMMONSENSE)
def test_log_likelihoods_are_those_of_the_harness(task: str, tokenizer: PreTrainedTokenizerFast, data_dir: Path) -> None:
    model = make_model("gla").double()
    asked, instances = ask(task, tokenizer, model, Settings(data_dir))
    scores = answer(model, asked, batch_tokens=1500)
    assert len(asked) >= 200 or task == "wikitext"
    for batch_size in (1, 16):
        for request, theirs in zip(asked, harness(model, tokenizer, instances, batch_size), strict=True):
            logprob, greedy = theirs if isinstance(theirs, tuple) else (theirs, None)
            assert abs(scores[request.id].logprob - logprob) < 1e-9
            assert greedy in (None, scores[request.id].hits == len(request.targets))
    for request in asked[::10]:
        assert abs(scores[request.id].logprob - brute(model, request)) < 1e-9


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_tokens", [40, 100_000])
def test_every_model_scores_as_if_read_plainly(name: str, batch_tokens: int, tokenizer: PreTrainedTokenizerFast, data_dir: Path) -> None:
    """Short batches cut documents and contexts into pieces; long ones hold everything."""
    model = make_model(name).double()
    for task in ("hellaswag", "winogrande", "wikitext"):
        asked, _ = ask(task, tokenizer, model, Settings(data_dir, limit=6))
        scores = answer(model, asked, batch_tokens=batch_tokens)
        assert max(abs(scores[request.id].logprob - brute(model, request)) for request in asked) < 1e-9


@pytest.mark.parametrize("task", ["hellaswag", "lambada_openai", "wikitext"])
def test_float32_changes_nothing_that_matters(task: str, tokenizer: PreTrainedTokenizerFast, data_dir: Path) -> None:
    model = make_model("gla")
    asked, instances = ask(task, tokenizer, model, Settings(data_dir))
    scores = answer(model, asked)
    theirs = harness(model, tokenizer, instances, 16)
    if task == "hellaswag":
        ours = torch.tensor([scores[request.id].logprob for request in asked]).view(-1, 4)
        other = torch.tensor([logprob for logprob, _ in theirs]).view(-1, 4)
        near = other.sort(descending=True).values.diff(dim=1)[:, 0].abs() < 1e-3
        assert ((ours.argmax(1) == other.argmax(1)) | near).all()
        assert near.sum() < 5
    else:
        other = sum(x[0] if isinstance(x, tuple) else x for x in theirs)
        mean = sum(scores[request.id].logprob for request in asked) - other
        assert abs(math.expm1(mean / sum(len(request.targets) for request in asked))) < 1e-4


@pytest.mark.parametrize(
    ("name", "task"), [("gla", "squad_completion"), ("retnet", "swde"), ("gated_deltanet", "fda"), ("attention", "swde")]
)
def test_generated_texts_are_those_of_the_harness(name: str, task: str, tokenizer: PreTrainedTokenizerFast, data_dir: Path) -> None:
    model = make_model(name).double()
    asked, instances = ask(task, tokenizer, model, Settings(data_dir, limit=5))
    scores = answer(model, asked, tokenizer, batch_tokens=700)
    tokenizer.pad_token = tokenizer.eos_token
    theirs = harness(model, tokenizer, instances, 1, max_length=4096)
    assert [scores[request.id].text for request in asked] == theirs


def test_length_limits_cut_as_the_harness_does_and_are_counted(tokenizer: PreTrainedTokenizerFast, data_dir: Path) -> None:
    model = make_model("gla").double()
    for task in ("lambada_openai", "wikitext"):
        asked, instances = ask(task, tokenizer, model, Settings(data_dir, limit=20, max_length=24))
        scores = answer(model, asked)
        assert all(len(request.context) + len(request.targets) <= 25 for request in asked)
        theirs = harness(model, tokenizer, instances, 4, max_length=24)
        if task == "wikitext":
            assert abs(sum(scores[request.id].logprob for request in asked) - sum(theirs)) < 1e-9
            assert len(asked) > len(instances)
        else:
            whole, _ = ask(task, tokenizer, model, Settings(data_dir, limit=20))
            for request, full, (logprob, _) in zip(asked, whole, theirs, strict=True):
                assert abs(scores[request.id].logprob - logprob) < 1e-9
                assert request.cut == len(full.context) - len(request.context)
            assert any(request.cut for request in asked)
            assert not any(request.cut for request in whole)


def test_a_context_is_read_once(tokenizer: PreTrainedTokenizerFast, data_dir: Path) -> None:
    model = make_model("gla")
    asked, _ = ask("hellaswag", tokenizer, model, Settings(data_dir, limit=10))
    read: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].numel()))
    answer(model, asked)
    contexts = {request.context for request in asked}
    assert sum(read) - 1 <= sum(map(len, contexts)) + sum(len(request.targets) - 1 for request in asked)  # the first read is of one token


@pytest.mark.parametrize("name", ["gla", "hybrid"])
def test_ranks_share_out_the_batches_of_one_process(
    name: str, tokenizer: PreTrainedTokenizerFast, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is answered by one rank, and a log-probability has the very bits that one process gives it."""
    model = make_model(name)
    asked = [r for task in ("piqa", "squad_completion") for r in ask(task, tokenizer, model, Settings(data_dir, limit=8))[0]]
    monkeypatch.setattr(World, "gather", lambda self, rows: [rows, rows])
    shares = []
    for rank in range(3):
        scorer = Scorer(model, tokenizer, batch_tokens=200)
        scorer.share_with(World(rank, 3, torch.device("cpu"), None))
        shares.append(scorer.answers(asked))
    assert all(shares)
    assert sum(map(len, shares)) == len({request.id for request in asked})
    one = answer(model, asked, tokenizer, batch_tokens=200)
    assert shares[0] | shares[1] | shares[2] == one


def test_contexts_with_a_common_beginning_are_one_family() -> None:
    start = tuple(range(100))
    alike = [(*start, 200, 201), (*start, 300), (*start, 200, 202, 203)]
    other = [tuple(range(500, 560)), (1, 2, 3)]
    found = {prefix: sorted(members) for prefix, members in families([*alike, *other])}
    assert found[start] == sorted(alike)
    made = list(batches([*alike, *other], Limits(1000, 2, 512)))
    assert sorted(context for batch in made for context in batch.contexts) == sorted([*alike, *other])
    assert all(len(batch.contexts) <= 2 for batch in made)
    for batch in made:
        if batch.prefixes:
            assert batch.contexts == [batch.prefixes[n] + ending for n, ending in zip(batch.owner, batch.endings, strict=True)]


def test_split_keeps_to_its_limits() -> None:
    lengths = [9, 7, 7, 3, 2, 2, 1]
    assert [list(group) for group in split(lengths, Limits(10, 3, 512))] == [[0], [1], [2, 3], [4, 5, 6]]
    assert [list(group) for group in split(lengths, Limits(14, 9, 512), padded=True)] == [[0], [1, 2], [3, 4, 5, 6]]
    assert list(split([], Limits(10, 3, 512))) == []


@pytest.mark.slow
def test_multiple_choice_is_twice_as_fast_as_the_harness(tokenizer: PreTrainedTokenizerFast, data_dir: Path) -> None:
    """In one run, on one thread, against the better of two batch sizes."""
    from headmax.eval.speed import compare

    torch.manual_seed(0)
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", hidden_size=256, num_hidden_layers=4, num_heads=4, head_gate=HeadGateConfig()))
    for task in ("hellaswag", "arc_easy"):
        measured = list(compare(model.eval(), tokenizer, Settings(data_dir), [task], (1, 16), 3, lambda _: None))
        assert min(record.extra["headmax as fast"] for record in measured if record.impl != "headmax") >= 2
        assert max(record.extra["largest difference"] for record in measured) < 1e-3


def test_recall_counts_right_answers() -> None:
    model = make_model("retnet", 40).double()
    request = Request("recall", tuple(range(12)), (3, 4, 5))
    with torch.no_grad():
        expected = model(torch.tensor([request.context])).logits[0, -3:].argmax(-1)
    right = Request("recall", request.context, (int(expected[0]), (int(expected[1]) + 1) % 40, int(expected[2])))
    assert answer(model, [right])[right.id].hits == 2
