"""Scores on a GPU: kernels, packed rows and forked states there against the plain model on the CPU."""

import random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from headmax.eval.requests import Request
from headmax.eval.scoring import Scorer
from tests.eval.conftest import MODELS, make_model

pytestmark = pytest.mark.gpu


def questions() -> list[Request]:
    """Contexts with one and with several continuations, a long text, and contexts that begin alike."""
    rng = random.Random(0)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, 358) for _ in range(number))

    contexts = [tokens(rng.randint(1, 90)) for _ in range(40)]
    made = [Request("loglikelihood", context, tokens(rng.randint(1, 30))) for context in contexts for _ in range(rng.choice([1, 4]))]
    shared = tokens(200)
    made += [Request("loglikelihood", shared + tokens(9), tokens(3)) for _ in range(4) for _ in range(2)]
    return [*made, Request("loglikelihood", tokens(1), tokens(3000)), Request("recall", tokens(90), tokens(30))]


@pytest.mark.parametrize("name", MODELS)
def test_scores_on_a_gpu_are_those_of_the_cpu(name: str) -> None:
    model, asked = make_model(name), questions()
    expected = {score.id: score for scores in Scorer(model.double())(asked) for score in scores}
    fast = Scorer(make_model(name).cuda(), batch_tokens=1000)
    found = {score.id: score for scores in fast(asked) for score in scores}
    assert set(found) == set(expected)
    for request in asked:
        a, b = found[request.id].logprob, expected[request.id].logprob
        assert a is not None
        assert b is not None
        assert abs(a - b) < 0.01 * len(request.targets) ** 0.5


def test_texts_on_a_gpu(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model("gla", 400)
    asked = [Request("generate", request.context, (), ("\n",), 16) for request in questions()[:20]]
    texts = [{s.id: s.text for scores in Scorer(m, tokenizer)(asked) for s in scores} for m in (model, make_model("gla", 400).cuda())]
    same = sum(texts[0][request.id] == texts[1][request.id] for request in asked)
    assert same >= 0.8 * len(asked)  # greedy choices between near-equal tokens may fall either way
    assert torch.cuda.is_available()
