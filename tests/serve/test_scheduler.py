"""The scheduler: jobs that come and go at any time, each with the answer it has alone."""

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headmax.generate import GREEDY, Sampling
from headmax.serve.batch import FirstTokens, SharedBatch
from headmax.serve.job import Closed, Full, Job
from headmax.serve.reading import Piece
from headmax.serve.scheduler import Scheduler
from tests.generate.checkpoint import MODELS, make_model, tokens

from .calling import Alone, job, scheduling, soon, submit

everywhere = pytest.mark.parametrize("name", MODELS)


@everywhere
@pytest.mark.parametrize("ahead", [0, 1])
def test_jobs_at_any_time_give_what_each_gives_alone(name: str, ahead: int) -> None:
    """More jobs than slots, of all lengths, submitted while others run, with and without a step under way beside the host."""
    model, chance = make_model(name), random.Random(ahead)
    alone = Alone(make_model(name))
    rules = [Sampling(seed=n, temperature=0.0 if n % 3 == 0 else 1.0) for n in range(14)]
    prompts = [tokens(chance.choice([1, 7, 40, 128, 129, 300]), seed=n) for n in range(14)]
    with scheduling(model, ahead=ahead) as scheduler:
        callers = []
        for n, (prompt, rule) in enumerate(zip(prompts, rules, strict=True)):
            callers += submit(scheduler, job(prompt, chance.randint(1, 30), (rule.seed,), temperature=rule.temperature, logprobs=True))
            if n % 4 == 0:
                callers[-1].wait(tokens=1)
        for caller, prompt, rule in zip(callers, prompts, rules, strict=True):
            got = caller.wait()
            expected = alone(prompt, got.job.max_new_tokens, rule, eos=False)
            assert alone.tied(prompt, expected.tokens, got.tokens[0], rule)
            if expected.tokens == got.tokens[0]:
                assert got.logprobs[0] == pytest.approx(expected.logprobs, abs=1e-3)
        assert soon(lambda: not scheduler.decoding.running and scheduler.decoding.batch.free() == 4)


@everywhere
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_end_of_a_prompt_can_be_read_by_steps(name: str, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a prefix hit, of one choice or several, at once beside others; not where the sampler must know what was sampled."""
    alone, document = Alone(make_model(name)), tokens(256, seed=5)
    with scheduling(make_model(name), ahead=ahead, tail=8, max_batch=6, start=False) as scheduler:
        steps = Steps(scheduler, monkeypatch)
        scheduler.start()
        submit(scheduler, job([*document, 9], 1))[0].wait()
        before = len(steps.events)
        tails = [tokens(count, seed=count) for count in (1, 3, 8, 9)]
        callers = submit(scheduler, *(job(document + tail, 1 + 9 * (n % 2), (3, 4), logprobs=True) for n, tail in enumerate(tails)))
        penalized = submit(scheduler, job([*document, 7, 8], 10, (3,), repetition_penalty=1.3))[0]
        for caller in (*callers, penalized):
            assert caller.wait().cached == 256
        for tail, caller in zip(tails, callers, strict=True):
            for choice, seed in enumerate((3, 4)):
                rules = Sampling(seed=seed)
                expected = alone(document + tail, caller.job.max_new_tokens, rules, eos=False)
                assert alone.tied(document + tail, expected.tokens, caller.tokens[choice], rules)
                if expected.tokens == caller.tokens[choice]:
                    assert caller.logprobs[choice] == pytest.approx(expected.logprobs, abs=1e-3)
        expected = alone([*document, 7, 8], 10, Sampling(seed=3, repetition_penalty=1.3), eos=False)
        assert penalized.tokens[0] == expected.tokens
    assert sorted(count for kind, count in steps.events[before:] if kind == "read") == [2, 9]


def test_every_rule_is_kept_beside_others() -> None:
    """Penalties, truncation and stop tokens of one choice leave the others alone; slots are used again and again."""
    alone, prompt = Alone(), tokens(20)
    rules: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"repetition_penalty": 1.5},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3, "temperature": 0.7},
        {"presence_penalty": 1.5, "temperature": 0.0},
        {"frequency_penalty": 2.0, "temperature": 0.0},
    ]
    with scheduling(max_batch=3) as scheduler:
        callers = [submit(scheduler, job(prompt, 25, (5,), **rule))[0] for rule in rules]
        for caller, rule in zip(callers, rules, strict=True):
            expected = alone(prompt, 25, Sampling(seed=5, **rule), eos=False).tokens
            assert caller.wait().tokens[0] == expected
            assert caller.ends == {0: "length"}
        stop = alone(prompt, 25, GREEDY, eos=False).tokens[7]
        (caller,) = submit(scheduler, job(prompt, 25, stop_tokens=frozenset([stop]), temperature=0.0))
        assert caller.wait().tokens[0][-1] == stop
        assert caller.ends == {0: "stop"}


def test_frequency_and_presence_penalties_are_those_of_openai() -> None:
    """logit - count * frequency - (count > 0) * presence, over what was generated, not over the prompt."""
    model, prompt = make_model(), tokens(6)
    with scheduling(model) as scheduler:
        got = submit(scheduler, job(prompt, 30, temperature=0.0, presence_penalty=0.7, frequency_penalty=0.4))[0].wait().tokens[0]
    with torch.no_grad():
        for n in range(30):
            logits = model(torch.tensor([prompt + got[:n]])).logits[0, -1]
            counts = torch.bincount(torch.tensor(got[:n], dtype=torch.int64), minlength=len(logits))
            assert int((logits - counts * 0.4 - (counts > 0) * 0.7).argmax()) == got[n]


def test_choices_share_a_prompt_and_the_prompt_can_be_scored() -> None:
    model, prompt = make_model(), tokens(150)
    alone = Alone()
    with scheduling(model, max_batch=2) as scheduler:
        (caller,) = submit(scheduler, job(prompt, 6, seeds=(1, 2, 3, 4, 5), logprobs=True, likeliest=True, scored=True))
        caller.wait()
        for choice in range(5):
            assert caller.tokens[choice] == alone(prompt, 6, Sampling(seed=choice + 1), eos=False).tokens
        (nothing,) = submit(scheduler, job(prompt, 0, scored=True))
        assert nothing.wait().tokens == {}
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert caller.scores is not None
    assert [score.token for score in caller.scores] == prompt[1:]
    wanted = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert [score.logprob for score in caller.scores] == pytest.approx(wanted, abs=1e-3)
    assert caller.scores[9].likeliest is not None
    assert [token for token, _ in caller.scores[9].likeliest] == logprobs[9].topk(20).indices.tolist()


def test_cancelling_frees_the_slot_and_leaves_the_others_alone() -> None:
    alone = Alone()
    with scheduling(max_batch=2, max_length=10**6) as scheduler:
        endless = submit(scheduler, *(job(tokens(5, seed=n), 10**5) for n in range(2)))
        waits = submit(scheduler, job(tokens(9), 5, temperature=0.0))[0]
        endless[0].wait(tokens=3)
        assert waits.cached is None
        scheduler.cancel(endless[0].job)
        assert waits.wait().tokens[0] == alone(tokens(9), 5, GREEDY, eos=False).tokens
        before = len(endless[1].wait(tokens=50).tokens[0])
        assert before >= 50
        several = submit(scheduler, job(tokens(5), 10**5, seeds=(0, 1)))[0]
        several.wait(tokens=2)
        scheduler.cancel(several.job, 0)
        scheduler.cancel(several.job, 0)
        later = submit(scheduler, job(tokens(5), 10**5))[0]
        scheduler.cancel(later.job)
        scheduler.cancel(several.job)
        scheduler.cancel(endless[1].job)
        assert soon(lambda: not scheduler.decoding.running and not scheduler.waiting and scheduler.decoding.batch.free() == 2)


def test_jobs_are_taken_in_order_and_refused_when_too_many_wait() -> None:
    with scheduling(max_batch=1, queue=3, start=False) as scheduler:
        callers = [job(tokens(5, seed=n), 3) for n in range(3)]
        order: list[int] = []
        for n, caller in enumerate(callers):
            caller.job.listen = lambda event, n=n, caller=caller: (order.append(n), caller.events.put(event))
        submit(scheduler, *callers)
        with pytest.raises(Full, match="3 requests wait already, at most 3 may"):
            submit(scheduler, job(tokens(5)))
        scheduler.start()
        for caller in callers:
            caller.wait()
        assert order == sorted(order)
        with pytest.raises(Full):
            submit(scheduler, *(job(tokens(5)) for _ in range(4)))
        assert submit(scheduler, job(tokens(5), 2))[0].wait().ends == {0: "length"}


class Steps:
    """Notes what the scheduler does in its turns, as `events`."""

    def __init__(self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        read, run = scheduler.prompts.read, scheduler.decoding.batch.run

        def noted_read(blocks: int) -> Piece | None:
            if (piece := read(blocks)) is not None:
                self.events.append(("read", sum(reading.position for reading in piece.group) - sum(piece.starts)))
            return piece

        def noted_run(wanted: Any) -> Any:
            self.events.append(("step", len(wanted)))
            return run(wanted)

        monkeypatch.setattr(scheduler.prompts, "read", noted_read)
        monkeypatch.setattr(scheduler.decoding.batch, "run", noted_run)


LAYERS = 8


class Simulated:
    """A clock for the scheduler's own measurements: a step takes a second, and a block over so many tokens of a prompt `cost(tokens)`."""

    def __init__(self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, cost: Callable[[int], float]) -> None:
        self.time = 0.0
        self.steps: list[float] = []
        """When each ended."""
        self.pieces: list[tuple[float, int, int]] = []
        """When each ended, where in its text, and how many tokens it had."""
        run, read, scheduler.pace.now = scheduler.decoding.batch.run, scheduler.prompts._run, lambda: self.time

        def timed_run(wanted: Any) -> Any:
            self.time += 1.0
            self.steps.append(self.time)
            return run(wanted)

        def timed_read(piece: Piece, blocks: int) -> torch.Tensor | None:
            self.time += blocks * cost(piece.tokens)
            hidden = read(piece, blocks)
            if hidden is not None:
                self.pieces.append((self.time, piece.starts[0] + piece.count, piece.tokens))
            return hidden

        monkeypatch.setattr(scheduler.decoding.batch, "run", timed_run)
        monkeypatch.setattr(scheduler.prompts, "_run", timed_read)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("cost", "size"),
    [
        (lambda count: 0.2, 1024),
        (lambda count: count / 400, 256),
        (lambda count: 0.05 + count / 2000, 1024),
        (lambda count: 0.5 + count / 500, 128),
    ],
    ids=["launches", "arithmetic", "both", "slow"],
)
def test_who_generates_waits_for_twice_a_step_at_most(
    exact: bool, cost: Callable[[int], float], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While prompts of 3,000 tokens come in; and a short one overtakes them. Pieces are as large as that allows, on whole chunks."""
    with scheduling(
        make_model(num_hidden_layers=LAYERS), piece=1024, max_length=5000, deterministic=exact, cache=0, start=False
    ) as scheduler:
        clock = Simulated(scheduler, monkeypatch, cost)
        scheduler.start()
        (first,) = submit(scheduler, job(tokens(3), 600))
        first.wait(tokens=2)
        long = submit(scheduler, *(job(tokens(3000, seed=n), 2) for n in range(2)))
        (short,) = submit(scheduler, job(tokens(10, seed=9), 2))
        short.wait()
        assert all(caller.events.empty() for caller in long)
        for caller in (*long, first):
            caller.wait()
    ended = [when for when, _, _ in clock.pieces]
    gaps = [b - a for a, b in itertools.pairwise(clock.steps) if ended[0] < a < ended[-1]]
    learning = 2 * LAYERS if size > 128 and not exact else 0  # blocks of a size that turns out to take longer
    assert sorted(gaps)[: len(gaps) - learning][-1] <= 2
    assert len([gap for gap in gaps if gap > 1]) > 0.9 * len(gaps), "some of each gap is used"
    assert all(end % 128 == 0 or end in (3, 10, 3000) for _, end, _ in clock.pieces)
    sizes = [count for _, _, count in clock.pieces]
    assert max(sizes) <= (128 if exact else 1024)
    assert exact or statistics.mode(count for count in sizes if count % 128 == 0) == size


def test_gaps_are_bounded_by_real_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by the processor time of a model on this machine: half of the gaps beside a long prompt are about two steps at most."""
    model = make_model(num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=256)
    with scheduling(model, piece=1024, max_length=5000, cache=0, start=False) as scheduler:
        scheduler.pace.now = time.thread_time
        ended: list[float] = []
        during: list[bool] = []
        run = scheduler.decoding.batch.run

        def timed(wanted: Any) -> Any:
            result = run(wanted)
            ended.append(time.thread_time())
            during.append(bool(scheduler.prompts.reading))
            return result

        monkeypatch.setattr(scheduler.decoding.batch, "run", timed)
        scheduler.start()
        (first,) = submit(scheduler, job(tokens(3), 300))
        first.wait(tokens=100)
        submit(scheduler, job(tokens(4000), 1))[0].wait()
        scheduler.cancel(first.job)
    gaps = [b - a for a, b in itertools.pairwise(ended)]
    alone, beside = ([gap for gap, read in zip(gaps, during[1:], strict=True) if read is which] for which in (False, True))
    assert statistics.median(beside) < 2.5 * statistics.median(alone)
    assert len(beside) > 20


def test_short_prompts_are_read_together_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with scheduling(piece=256, max_batch=8, start=False) as scheduler:
        steps = Steps(scheduler, monkeypatch)
        scheduler.pace.now = lambda: 0.0
        callers = submit(scheduler, *(job(tokens(50, seed=n), 3) for n in range(7)))
        scheduler.start()
        for caller in callers:
            caller.wait()
    assert steps.events == [("read", 250), ("step", 5), ("read", 100), ("step", 5), ("step", 2), ("step", 2)]


def test_prompts_that_cannot_be_read_together_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too long, too short beside the others, scored, or when the pass over several fails."""
    alone = Alone()
    lengths = [100, 90, 20, 60, 300, 129]
    with scheduling(piece=1000, max_batch=8, tail=0, start=False) as scheduler:
        steps, groups = Steps(scheduler, monkeypatch), []
        run = scheduler.prompts._run

        def failing(piece: Piece, blocks: int) -> torch.Tensor | None:
            groups.append(sorted(len(reading.tokens) for reading in piece.group))
            if len(groups) == 1:
                raise torch.OutOfMemoryError("once")
            return run(piece, blocks)

        monkeypatch.setattr(scheduler.prompts, "_run", failing)
        callers = [job(tokens(length, seed=length), 5, temperature=0.0) for length in lengths]
        submit(scheduler, *callers, job(tokens(95), 1, scored=True))
        scheduler.start()
        for caller, length in zip(callers, lengths, strict=True):
            assert caller.wait().tokens[0] == alone(tokens(length, seed=length), 5, GREEDY, eos=False).tokens
    assert groups[0] == [60, 90, 100]
    assert all(len(group) == 1 for group in groups[1:])
    assert sum(count for name, count in steps.events if name == "read") == sum(lengths) + 95


def test_a_step_or_a_prompt_that_fails_takes_no_one_else_along(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone()
    with scheduling(max_batch=2, start=False) as scheduler:
        run, read, fail = scheduler.decoding.batch.run, scheduler.prompts._run, {"run": 0, "read": 0}

        def failing(name: str, function: Any) -> Any:
            def call(*arguments: Any) -> Any:
                fail[name] -= 1
                if fail[name] == 0:
                    raise torch.OutOfMemoryError(name)
                return function(*arguments)

            return call

        monkeypatch.setattr(scheduler.decoding.batch, "run", failing("run", run))
        monkeypatch.setattr(scheduler.prompts, "_run", failing("read", read))
        scheduler.start()
        expected = alone(tokens(9), 8, GREEDY, eos=False).tokens
        for name in ("read", "run"):
            fail[name] = 1
            broken, whole = job(tokens(7), 8), job(tokens(9), 8, temperature=0.0)
            submit(scheduler, broken)
            with pytest.raises(torch.OutOfMemoryError, match=name):
                broken.wait()
            assert submit(scheduler, whole)[0].wait().tokens[0] == expected
            assert soon(lambda: scheduler.decoding.batch.free() == 2)
        assert scheduler.broken is None


def test_steps_that_fail_again_and_again_end_it_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with scheduling(start=False) as scheduler:

        def lost(wanted: Any) -> Any:
            raise RuntimeError("device lost")

        monkeypatch.setattr(scheduler.decoding.batch, "run", lost)
        scheduler.start()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="device lost"):
                submit(scheduler, job(tokens(3)))[0].wait()
        assert soon(lambda: not scheduler.thread.is_alive())
        with pytest.raises(Closed, match="the server has failed: device lost"):
            submit(scheduler, job(tokens(3)))


@pytest.mark.parametrize("what", ["read", "first"])
def test_a_device_that_fails_for_good_is_noticed_whatever_met_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a CUDA error no call works any more: who waits is told so, and nobody is taken in."""
    with scheduling(max_batch=1, start=False) as scheduler:

        def lost(*arguments: Any) -> Any:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(*((FirstTokens, "__call__") if what == "first" else (scheduler.prompts, "_run")), lost)
        monkeypatch.setattr(scheduler, "check_device", lost)
        callers = submit(scheduler, job(tokens(3)), job(tokens(3)))
        scheduler.start()
        for caller in callers:
            with pytest.raises(RuntimeError, match="illegal memory access"):
                caller.wait()
        assert soon(lambda: not scheduler.thread.is_alive())
        with pytest.raises(Closed, match="the server has failed: an illegal memory access"):
            submit(scheduler, job(tokens(3)))


def test_logits_that_are_not_finite_fail_one_job_and_leave_nothing_behind() -> None:
    """A token whose embedding is infinite: whoever has it in the prompt fails, also after another has used its slot's memory."""
    model = make_model("hybrid")
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.model.embed_tokens.weight[77] = torch.inf
    good = [t for t in tokens(30) if t != 77]
    with scheduling(model, max_batch=1) as scheduler:
        expected = submit(scheduler, job(good, 20, stop_tokens=frozenset([77])))[0].wait().tokens
        with pytest.raises(ValueError, match="logits are not finite after 0 new tokens"):
            submit(scheduler, job([*good, 77], 5))[0].wait()
        assert submit(scheduler, job(good, 20, stop_tokens=frozenset([77])))[0].wait().tokens == expected


def test_memory_of_a_slot_that_held_nan_does_not_reach_its_next_sequence() -> None:
    model = make_model("hybrid")
    lanes = SharedBatch(model, 1, torch.float32, 50)
    with scheduling(model, max_length=50) as clean:
        expected = submit(clean, job(tokens(5), 20))[0].wait().tokens
    for slots in lanes.step.memory:
        for x in slots[:2]:
            if x is not None:
                x.fill_(torch.nan)
    with scheduling(model, max_length=50, start=False) as scheduler:
        scheduler.decoding.batch = lanes
        scheduler.start()
        assert submit(scheduler, job(tokens(5), 20))[0].wait().tokens == expected


def test_closing_ends_everyone_draining_lets_them_finish() -> None:
    with scheduling(max_batch=1) as scheduler:
        running, waiting = submit(scheduler, job(tokens(3), 1500), job(tokens(3), 5))
        running.wait(tokens=1)
        assert scheduler.close(timeout=30)
        for caller in (running, waiting):
            with pytest.raises(Closed):
                caller.wait()
        with pytest.raises(Closed, match="shutting down"):
            submit(scheduler, job(tokens(3)))
    with scheduling(max_batch=1) as scheduler:
        callers = submit(scheduler, job(tokens(3), 50), job(tokens(3), 5))
        assert scheduler.close(drain=True, timeout=30)
        assert [caller.wait().ends for caller in callers] == [{0: "length"}] * 2


def test_a_listener_that_fails_is_dropped() -> None:
    with scheduling(max_batch=1) as scheduler:

        def listen(event: object) -> None:
            raise RuntimeError("event loop is closed")

        scheduler.submit(Job(torch.tensor(tokens(3)), [Sampling()], 1500, listen))
        assert submit(scheduler, job(tokens(4), 5))[0].wait().ends == {0: "length"}


def test_many_threads_at_once() -> None:
    """Submitting, cancelling and waiting from 24 threads; every answer that comes is the right one."""
    prompts = [tokens(3 + n % 9, seed=n) for n in range(24)]
    alone = Alone()
    expected = [alone(prompt, 12, GREEDY, eos=False).tokens for prompt in prompts]
    wrong: list[object] = []
    with scheduling(max_batch=5) as scheduler:

        def call(n: int) -> None:
            chance = random.Random(n)
            try:
                for _ in range(6):
                    (caller,) = submit(scheduler, job(prompts[n], 12, temperature=0.0))
                    if chance.random() < 0.3:
                        time.sleep(chance.random() * 0.02)
                        scheduler.cancel(caller.job)
                    elif caller.wait().tokens[0] != expected[n]:
                        wrong.append((n, caller.tokens))
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=call, args=(n,)) for n in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert soon(lambda: not scheduler.decoding.running and scheduler.decoding.batch.free() == 5)


def test_nothing_comes_after_the_end_of_a_choice_whose_next_step_is_under_way() -> None:
    prompt = tokens(20)
    free = Alone()(prompt, 25, GREEDY, eos=False).tokens
    stop = frozenset([free[7]])
    with scheduling(ahead=1) as scheduler:
        (caller,) = submit(scheduler, job(prompt, 25, (0, 1), temperature=0.0, stop_tokens=stop))
        caller.wait()
        submit(scheduler, job(tokens(5), 5))[0].wait()
        assert caller.events.empty()
        assert caller.tokens == {n: free[: free.index(free[7]) + 1] for n in range(2)}


def test_events_come_in_order() -> None:
    with scheduling() as scheduler:
        (caller,) = submit(scheduler, job(tokens(3), 4))
        kinds = [type(caller.events.get(timeout=30)).__name__ for _ in range(6)]
        assert kinds == ["Read", *["NewToken"] * 4, "Ended"]
