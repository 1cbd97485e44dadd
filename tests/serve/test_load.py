"""`headmax bench serve`: the trace, what is measured of it, and the two ways to be measured."""

import asyncio
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headmax.cli.bench_serve import of_generate, serve
from headmax.records import Recorder
from headmax.serve.load import Goal, Timing, Trace, play, play_over_http, summary
from headmax.serve.peer import Generate
from tests.generate.checkpoint import VOCABULARY, make_model, save

from .calling import serving

TRACE = Trace(conversations=6, rate=200.0, turns=3, prompt=20, new=7, documents=2, document=300, vocabulary=VOCABULARY)


class Echo:
    """Answers with a number; notes what it was asked."""

    def __init__(self, fail: int | None = None) -> None:
        self.asked: list[tuple[int, Any]] = []
        self.fail = fail

    async def ask(self, prompt: Any, new: int, seed: int, timing: Timing) -> Any:
        if seed == self.fail:
            raise ValueError("no")
        self.asked.append((seed, prompt))
        timing.arrived, timing.tokens = [timing.sent + 1.0, timing.sent + 3.0], 3
        return [0] * new if isinstance(prompt, list) else " so"


def test_turns_add_to_what_came_before_and_documents_are_shared() -> None:
    echo = Echo()
    timings = asyncio.run(play(TRACE, echo))
    assert len(timings) == 18
    for number in range(6):
        prompts = [prompt for seed, prompt in echo.asked if seed == number]
        assert [len(prompt) for prompt in prompts] == [320, 347, 374]
        assert prompts[0][:300] == TRACE.text(300, 10**6 + number % 2)
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before) + 7] == [*before, *[0] * 7]
    assert all(3 <= token < VOCABULARY for _, prompt in echo.asked for token in prompt[:300])
    text = Echo()
    asyncio.run(play(replace(TRACE, vocabulary=None, documents=0), text))
    assert all(isinstance(prompt, str) and len(prompt.split()) in (20, 41, 62) for _, prompt in text.asked)
    again = Echo()
    asyncio.run(play(TRACE, again))
    assert sorted(again.asked) == sorted(echo.asked), "the same trace each time"


def test_moments_are_those_of_a_poisson_process() -> None:
    starts = list(replace(TRACE, conversations=20_000, rate=5.0).starts())
    gaps = torch.tensor(starts).diff()
    assert starts == sorted(starts)
    assert float(gaps.mean()) == pytest.approx(0.2, rel=0.03)
    assert float(gaps.std()) == pytest.approx(0.2, rel=0.05)
    assert set(replace(TRACE, rate=math.inf).starts()) == {0.0}


def test_what_is_told_of_timings() -> None:
    """Three requests by hand: one slow to begin, one slow to go on, and one that fails."""
    timings = [
        Timing(0.0, [0.1, 0.2, 0.3], tokens=3, prompt=10, cached=5),
        Timing(0.0, [1.0, 1.1, 1.2], tokens=3, prompt=10, cached=0),
        Timing(0.0, [0.1, 1.1, 2.0], tokens=3, prompt=20, cached=15),
        Timing(0.0, error="ValueError: no"),
    ]
    found = {r.metric: r for r in summary(TRACE, timings, Goal(0.5, 0.15), "headmax", Recorder("serve", "cpu"))}
    assert found["failed"].value == 1
    assert found["failed"].extra["errors"] == ["ValueError: no"]
    assert found["time to first token p50"].value == pytest.approx(100)
    assert found["inter-token latency p50"].value == pytest.approx(100)
    assert found["request p50"].value == pytest.approx(1200)
    assert found["tokens per second"].value == pytest.approx(9 / 2)
    assert found["goodput"].value == pytest.approx(1 / 2)
    assert found["goodput"].extra["of requests"] == 1 / 4
    assert found["prompt tokens cached"].value == 0.5
    only = list(summary(TRACE, timings[3:], Goal(1, 1), "headmax", Recorder("serve", "cpu")))
    assert [record.metric for record in only] == ["failed"]


def test_a_request_that_fails_ends_its_conversation_alone() -> None:
    timings = asyncio.run(play(TRACE, Echo(fail=2)))
    assert len(timings) == 16
    assert [timing.error for timing in timings if timing.error] == ["ValueError: no"]


@pytest.mark.parametrize("words", [False, True])
def test_a_server_by_its_address(words: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    extent = {"conversations": 4, "turns": 2, "prompt": 10, "new_tokens": 6, "documents": 1, "document": 200, "rate": math.inf}
    with serving(api_key="sesame") as server:
        serve(server.url, vocabulary=VOCABULARY, words=words, api_key="sesame", out=tmp_path / "out.jsonl", **extent)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="the API key is missing or wrong"):
            serve(server.url, **extent)  # type: ignore[arg-type]
        timings = play_over_http(replace(TRACE, vocabulary=VOCABULARY + 5, document=2000), server.url, "sesame")
    found = {line["metric"]: line for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert found["failed"]["value"] == 0
    assert found["prompt tokens cached"]["value"] > 0.3
    assert found["tokens per second"]["value"] > 0
    assert "time to first token p99" in capsys.readouterr().out
    assert any(timing.error is not None and "ids must be from 0 to 257" in timing.error for timing in timings)


def test_generate_answers_in_batches() -> None:
    sizes = []

    class Noted(Generate):
        def _generate(self, batch: Any) -> list[list[int]]:
            sizes.append(len(batch))
            return super()._generate(batch)

    with Noted(make_model(), 4).running() as answerer:
        timings = asyncio.run(play(replace(TRACE, turns=1, conversations=9, rate=math.inf), answerer))
    assert sum(sizes) == 9
    assert max(sizes) == 4
    assert all(len(timing.arrived) == timing.tokens == 7 and timing.arrived == sorted(timing.arrived) for timing in timings)

    class Broken(Generate):
        def _generate(self, batch: Any) -> list[list[int]]:
            raise RuntimeError("out of memory")

    with Broken(make_model(), 4).running() as answerer:
        timings = asyncio.run(play(TRACE, answerer))
    assert {timing.error for timing in timings} == {"ValueError: generate: out of memory"}


def test_a_checkpoint_beside_its_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    save(tmp_path / "tiny")
    extent = {"conversations": 3, "prompt": 10, "new_tokens": 5, "rate": 50.0, "max_batch": 2}
    serve(str(tmp_path / "tiny"), peer="hf", device="cpu", out=tmp_path / "out.jsonl", **extent)  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for impl in ("headmax", "hf"):
        found = {line["metric"]: line["value"] for line in lines if line["impl"] == impl}
        assert found["failed"] == 0
        assert found["requests per second"] > 0
    assert len(of_generate(replace(TRACE, turns=1, conversations=1), str(tmp_path / "tiny"), "cpu", None, 2)) == 1
    for changes, said in (({"words": True}, "--peer takes a checkpoint"), ({"rate": 0.0}, "--rate must be positive")):
        with pytest.raises(ValueError, match=said):
            serve(str(tmp_path / "tiny"), peer="hf", **changes)  # type: ignore[arg-type]
