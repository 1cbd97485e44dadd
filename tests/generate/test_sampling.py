"""From logits to tokens."""

import math

import pytest
import torch

from headmax.generate.sampling import GREEDY, NO_TOKEN, Features, Sampler, Sampling, mix, uniform

MASK = 2**64 - 1


def splitmix(x: int) -> int:
    """The published finish, on Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_bits_are_those_of_the_published_function() -> None:
    values = [0, 1, 2**31, 2**62 + 12345, 2**63 - 1]
    assert [int(x) & MASK for x in mix(torch.tensor(values))] == [splitmix(x) for x in values]


def test_uniform_numbers_are_uniform_and_do_not_repeat_between_seeds_or_positions() -> None:
    u = uniform(torch.arange(300)[:, None], torch.arange(300)[None])
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 100, 0, 1)
    assert ((counts - 900).square() / 900).sum() < 150  # chi-squared with 99 degrees of freedom
    assert u.flatten().unique().numel() > 0.99 * u.numel()
    for rows in (u, u.T):
        correlation = torch.corrcoef(rows)[~torch.eye(300, dtype=torch.bool)]
        assert correlation.abs().max() < 0.35


def sample(logits: torch.Tensor, requests: list[Sampling], position: int = 0, history: list[list[int]] | None = None) -> torch.Tensor:
    sampler = Sampler(len(requests), logits.shape[1], logits.device)
    features = Features.of(requests, logprobs=False)
    if features.penalized:
        sampler.remember()
    sampler.set(requests, [torch.tensor(h, dtype=torch.int64) for h in history or [[]] * len(requests)])
    return sampler(logits, torch.full((len(requests),), position), features)[0]


def draws(logits: torch.Tensor, count: int = 4000, **rules: float) -> torch.Tensor:
    """How often each token is drawn, one seed each."""
    requests = [Sampling(seed=seed, **rules) for seed in range(count)]  # type: ignore[arg-type]
    return torch.bincount(sample(logits.expand(count, -1), requests), minlength=logits.shape[-1]) / count


LOGITS = torch.log(torch.tensor([[0.05, 0.4, 0.0, 0.25, 0.1, 0.2]]))


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, [0, 1, 3, 4, 5]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 100}, [0, 1, 3, 4, 5]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.66}, [1, 3, 5]),
        ({"top_k": 3, "top_p": 0.5}, [1, 3]),
        ({"min_p": 0.3}, [1, 3, 5]),
        ({"top_k": 1}, [1]),
        ({"top_p": 1e-6}, [1]),
        ({"min_p": 1.0}, [1]),
    ],
)
def test_tokens_are_drawn_as_often_as_the_rules_say(rules: dict[str, float], kept: list[int]) -> None:
    wanted = torch.zeros(6)
    wanted[kept] = LOGITS[0].exp()[kept]
    wanted /= wanted.sum()
    seen = draws(LOGITS, **rules)
    assert (seen[wanted == 0] == 0).all()
    assert (seen - wanted).abs().max() < 0.025


def test_the_rules_cut_as_hugging_face_cuts() -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 2
    for rules, warper in (
        (Sampling(top_k=7), TopKLogitsWarper(7)),
        (Sampling(top_p=0.8), TopPLogitsWarper(0.8)),
        (Sampling(min_p=0.1), MinPLogitsWarper(0.1)),
    ):
        sampler = Sampler(1, 50, logits.device)
        sampler.set([rules], [])
        kept = sampler.truncate(logits.softmax(-1), Features.of([rules], logprobs=False)) > 0
        assert torch.equal(kept, warper(None, logits.clone()).isfinite())  # type: ignore[arg-type]
        assert 1 < kept.sum() < 50


def test_temperature_sharpens_and_zero_is_greedy() -> None:
    assert draws(LOGITS, temperature=0.5)[1] == pytest.approx(0.16 / (0.0025 + 0.16 + 0.0625 + 0.01 + 0.04), abs=0.025)
    assert draws(LOGITS, 50, temperature=0.0).tolist() == [0, 1, 0, 0, 0, 0]


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 200, generator=generator)
    requests = [
        Sampling(seed=5),
        Sampling(seed=5, top_k=20),
        GREEDY,
        Sampling(seed=9, top_p=0.7, temperature=1.3),
        Sampling(seed=7, repetition_penalty=1.4),
        Sampling(seed=1, min_p=0.05),
    ]
    history: list[list[int]] = [[], [], [], [], list(range(0, 200, 3)), []]
    for position in range(20):
        together = sample(logits, requests, position, history)
        alone = [sample(logits[n : n + 1], requests[n : n + 1], position, history[n : n + 1]) for n in range(6)]
        assert together.tolist() == torch.cat(alone).tolist()


def test_the_penalty_is_hugging_faces_and_counts_new_tokens_too() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1))
    order = logits[0].argsort(descending=True).tolist()
    history = order[:3]
    penalized = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([history]), logits.clone())
    rules = Sampling(temperature=0.0, repetition_penalty=3.0)
    assert sample(logits, [rules], history=[history]).tolist() == penalized.argmax(-1).tolist()
    sampler = Sampler(1, 40, torch.device("cpu"))
    sampler.remember()
    sampler.set([rules], [torch.empty(0, dtype=torch.int64)])
    equal = torch.zeros(1, 40) + 1.0
    chosen = [int(sampler(equal, torch.tensor([n]), Features.of([rules], False))[0]) for n in range(40)]
    assert sorted(chosen) == list(range(40))


def test_log_probabilities_are_the_models_own() -> None:
    sampler = Sampler(1, 6, torch.device("cpu"))
    sampler.set([Sampling(temperature=3.0, top_k=2)], [torch.empty(0, dtype=torch.int64)])
    token, value, _ = sampler(LOGITS + 7, torch.tensor([0]), Features.of([Sampling(top_k=2)], True))
    assert value is not None
    assert float(value) == pytest.approx(math.log(LOGITS[0].exp()[int(token)]), abs=1e-5)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": math.inf}, "temperature must be 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be positive"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty must be positive"),
        ({"seed": 1.5}, "seed must be in"),
        ({"top_k": 0}, "top_k must be at least 1 or None, got 0"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"min_p": 1.5}, "min_p must be in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"seed": -1}, "seed must be in"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sampling(**rules)  # type: ignore[arg-type]


@pytest.mark.parametrize("rules", [{"top_p": 1e-46}, {"top_p": 1e-46, "top_k": 3}, {"temperature": 1e-40}, {"min_p": 1.0}], ids=str)
def test_the_likeliest_token_survives_numbers_that_float32_does_not_hold(rules: dict[str, float]) -> None:
    logits = torch.tensor([[0.5, -1.0, 3.0, 2.9, 0.0]])
    assert {int(sample(logits, [Sampling(seed=seed, **rules)])) for seed in range(20)} == {2}  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_give_no_token(bad: float) -> None:
    logits = torch.zeros(3, 6)
    logits[1, 4] = bad
    logits[2] = -math.inf
    logits[2, 3] = 0.0  # some may be forbidden
    for rules in (GREEDY, Sampling(), Sampling(top_p=0.5, repetition_penalty=2.0)):
        assert (sample(logits, [rules] * 3, history=[[], [], []]) == NO_TOKEN).tolist() == [False, True, False]


def test_rules_of_one_request_change_no_bit_of_another() -> None:
    """A plain request beside ones with every rule: the same token and the same probabilities."""
    logits = torch.randn(1, 32000, generator=torch.Generator().manual_seed(0)) * 4
    plain = Sampling(seed=7)
    others = [plain, Sampling(top_k=5, top_p=0.5), Sampling(repetition_penalty=1.4, presence_penalty=1.0), Sampling(min_p=0.1)]
    features = Features.of(others, logprobs=False)
    sampler = Sampler(4, 32000, torch.device("cpu"))
    sampler.remember()
    sampler.set(others, [torch.arange(50)] * 4)
    probability = logits.softmax(-1)
    assert torch.equal(sampler.truncate(probability.repeat(4, 1), features)[0], probability[0])
    penalized = sampler._penalize(logits.expand(4, -1))
    assert torch.equal(penalized[0], logits[0])
    assert not torch.equal(penalized[2], logits[0])
