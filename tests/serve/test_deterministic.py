"""--deterministic: the same bits alone, in any batch, after a prefix hit or not, and as the engine gives them."""

import random

import pytest
import torch

from headmax.generate import Sampling
from headmax.serve.reading import Pieces, Reading
from headmax.serve.scheduler import Scheduler
from tests.generate.checkpoint import MODELS, make_model, tokens

from .calling import Alone, Caller, job, kept, scheduling, soon, submit

ODD = {"hidden_size": 36, "num_heads": 3, "intermediate_size": 50}
"""Widths that no vector register divides: rows of a batch then lie differently in memory."""


def answer(caller: Caller) -> tuple:
    caller.wait()
    return caller.tokens, caller.logprobs, caller.ends, caller.scores


def requests(chance: random.Random, number: int) -> list[dict]:
    """Prompts over two documents, with rules of all kinds."""
    documents = [tokens(chance.randint(100, 500), seed=n) for n in range(2)]
    rules: list[dict] = [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 5, "repetition_penalty": 1.3}, {"frequency_penalty": 0.5}]
    made = []
    for n in range(number):
        prompt = chance.choice([*documents, []]) + tokens(chance.randint(1, 300), seed=100 + n)
        more = {"logprobs": True, "likeliest": chance.random() < 0.3, "scored": chance.random() < 0.1}
        made.append({"prompt": prompt, "new": chance.randint(1, 25), "seeds": (n,), **chance.choice(rules), **more})
    return made


def submit_at_random(scheduler: Scheduler, asked: list[dict], chance: random.Random) -> list[tuple]:
    callers = [job(**options) for options in asked]
    for n, caller in enumerate(callers):
        submit(scheduler, caller)
        if chance.random() < 0.3:
            callers[chance.randint(0, n)].wait(tokens=chance.randint(1, 5))
        if chance.random() < 0.2:
            (passing,) = submit(scheduler, job(tokens(50, seed=n), 300))
            passing.wait(tokens=3)
            scheduler.cancel(passing.job)
    return [answer(caller) for caller in callers]


@pytest.mark.parametrize(("name", "odd"), [*((name, True) for name in MODELS), ("gla", False)])
def test_random_mixes_give_the_bits_of_each_request_alone(name: str, odd: bool) -> None:
    """Alone: one slot, no cache, one request after the other. Mixed: in any order, in 1 to 6 slots, with a cache, some of it too small."""
    changes = (ODD | ({"num_v_heads": 3} if name == "gated_deltanet" else {})) if odd else {}
    model, chance = make_model(name, **changes), random.Random(name)
    asked = requests(chance, 7)
    with scheduling(model, cache=0, max_batch=1, deterministic=True) as scheduler:
        expected = [answer(submit(scheduler, job(**options))[0]) for options in asked]
    for slots, cache in ((6, 10**8), (3, 10**5))[: 2 if name in ("gla", "hybrid") else 1]:
        with scheduling(make_model(name, **changes), cache=cache, max_batch=slots, deterministic=True) as scheduler:
            for _ in range(2 if cache == 10**8 else 1):
                order = list(range(len(asked)))
                chance.shuffle(order)
                mixed = submit_at_random(scheduler, [asked[n] for n in order], chance)
                assert mixed == [expected[n] for n in order]


def test_short_prompts_give_the_bits_of_the_engine_alone() -> None:
    alone = Alone()
    with scheduling(make_model(), deterministic=True) as scheduler:
        callers = submit(scheduler, *(job(tokens(1 + 20 * n, seed=n), 12, (n,), logprobs=True) for n in range(6)))
        for n, caller in enumerate(callers):
            expected = alone(tokens(1 + 20 * n, seed=n), 12, Sampling(seed=n), eos=False)
            assert (caller.wait().tokens[0], caller.logprobs[0]) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize("name", MODELS)
def test_a_turn_kept_for_later_has_the_bits_of_a_prompt(name: str) -> None:
    """States over generated tokens are computed in chunk form; those that decoding leaves differ from them."""
    with scheduling(make_model(name), deterministic=True) as scheduler:
        (turn,) = submit(scheduler, job(tokens(100), 200))
        text = tokens(100) + turn.wait().tokens[0]
        assert soon(lambda: kept(scheduler, text[:256]))
        (hit,) = submit(scheduler, job(text, 30, logprobs=True))
        hit.wait()
        assert hit.cached == 256
    with scheduling(make_model(name), cache=0, deterministic=True) as scheduler:
        (miss,) = submit(scheduler, job(text, 30, logprobs=True))
        assert answer(miss)[:2] == answer(hit)[:2]


def test_without_it_the_same_prompt_has_other_bits() -> None:
    """The tests above can fail: in batches, and after states that decoding left, rounding differs."""
    model, prompts = make_model(**ODD), [tokens(40 + n, seed=n) for n in range(5)]
    with scheduling(model, cache=0, max_batch=1) as scheduler:
        alone = [answer(submit(scheduler, job(prompt, 20, logprobs=True))[0])[1] for prompt in prompts]
    with scheduling(model, cache=0, max_batch=5) as scheduler:
        callers = submit(scheduler, *(job(prompt, 20, logprobs=True) for prompt in prompts))
        together = [answer(caller)[1] for caller in callers]
    assert alone != together
    assert torch.tensor([x[0] for x in alone]) == pytest.approx(torch.tensor([x[0] for x in together]), abs=1e-3)


def test_pieces_do_not_depend_on_where_reading_begins() -> None:
    with scheduling(start=False, deterministic=True) as scheduler:
        prompts = scheduler.prompts
        assert prompts.pieces == Pieces(128, 128, True)
        for length in (1, 127, 128, 129, 256, 700):
            for past in range(0, length, 128):
                reading = Reading(torch.tensor(tokens(length)))
                prompts._start(reading, 0, ())
                assert reading.reader is not None
                reading.reader.position, ends = past, []
                while reading.left:
                    reading.reader.position += prompts._size(reading, 128)
                    ends.append(reading.position)
                assert ends == [end for end in [*range(128, length, 128), length] if end > past]


def test_more_turns_may_end_than_can_be_kept_for_later() -> None:
    """The text under way is not dropped for newer ones."""
    with scheduling(deterministic=True, start=False) as scheduler:
        prompts, texts = scheduler.prompts, [torch.tensor(tokens(130, seed=n)) for n in range(70)]
        prompts.recompute(texts[0], 100)
        assert prompts.next(128, 128) is not None
        assert prompts.read(1) is None, "a block of two"
        for text in texts[1:]:
            prompts.recompute(text, 100)
        scheduler.start()
        assert soon(lambda: scheduler.cache is not None and scheduler.cache.counts["stores"] == 64)
        assert [kept(scheduler, text[:128].tolist()) for text in texts] == [True] + [False] * 6 + [True] * 63
        assert scheduler.broken is None
