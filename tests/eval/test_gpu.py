"""Scores on a GPU: kernels, packed rows and forked states there against the plain model on the CPU."""

import random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM
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
    alike = [shared + tokens(9) for _ in range(4)]
    made += [Request("loglikelihood", context, tokens(3)) for context in alike for _ in range(2)]
    return [*made, Request("loglikelihood", tokens(1), tokens(3000)), Request("recall", tokens(90), tokens(30))]


def logprobs(scorer: Scorer, asked: list[Request]) -> torch.Tensor:
    """Of each request, over the square root of its targets, as errors grow."""
    scores = scorer.answers(asked)
    return torch.tensor([(scores[request.id].logprob or 0.0) / len(request.targets) ** 0.5 for request in asked])


@pytest.mark.parametrize("batch_tokens", [1000, None])
@pytest.mark.parametrize("name", MODELS)
def test_scores_on_a_gpu_are_those_of_the_cpu(name: str, batch_tokens: int | None) -> None:
    asked = questions()
    expected = logprobs(Scorer(make_model(name).double()), asked)
    found = logprobs(Scorer(make_model(name).cuda(), batch_tokens=batch_tokens), asked)
    assert (found - expected).abs().max() < 0.01


def test_bfloat16_at_a_real_width_stays_near_float32() -> None:
    """Forked and packed, as near as the same model read plainly, request by request."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "num_heads": 4, "vocab_size": 400}
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", head_gate=HeadGateConfig(), **sizes)).cuda().eval()
    asked = questions()
    expected = logprobs(Scorer(model), asked)
    found = logprobs(Scorer(model.bfloat16()), asked)
    plain = torch.cat([logprobs(Scorer(model), [request]) for request in asked])
    assert (found - expected).abs().max() <= 2 * (plain - expected).abs().max() + 1e-3


def test_texts_on_a_gpu(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model("gla", 400)
    asked = [Request("generate", request.context, (), ("\n",), 16) for request in questions()[:20]]
    here, there = (Scorer(m, tokenizer).answers(asked) for m in (model, make_model("gla", 400).cuda()))
    same = sum(here[request.id].text == there[request.id].text for request in asked)
    assert same >= 0.8 * len(asked)  # greedy choices between near-equal tokens may fall either way
