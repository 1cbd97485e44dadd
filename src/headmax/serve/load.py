"""`headmax bench serve`: a trace of requests, played against whatever answers them, and how long the answers took."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx2
import numpy as np

from headmax.records import Record, Recorder
from headmax.serve.client import Lines, address_of, explained, read_event

WORDS = "the of and to in is was for on as with by at from that it his were are which this be or had not her one their has its"
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Trace:
    """Conversations that begin at random, each over one of some shared documents if there are any."""

    conversations: int
    rate: float
    """How many begin in a second, as a Poisson process; infinite for all at once."""
    turns: int
    prompt: int
    """Tokens, or words, that a turn adds."""
    new: int
    """Tokens of each answer."""
    documents: int
    document: int
    """Tokens, or words, of a document."""
    vocabulary: int | None
    """Prompts are ids below this; without it they are words."""
    seed: int = 0

    def text(self, count: int, seed: int) -> Any:
        """Random ids, or words."""
        chance = random.Random(seed)
        if self.vocabulary is None:
            return "".join(f" {word}" for word in chance.choices(WORDS.split(), k=count))
        return [chance.randrange(3, self.vocabulary) for _ in range(count)]

    def starts(self) -> Iterator[float]:
        """When each conversation begins, in seconds."""
        chance = random.Random(self.seed)
        gaps = (0.0 if math.isinf(self.rate) else chance.expovariate(self.rate) for _ in range(self.conversations))
        return itertools.accumulate(gaps)

    def __str__(self) -> str:
        shared = f", {self.documents} documents of {self.document}" if self.documents else ""
        pace = "all at once" if math.isinf(self.rate) else f"{self.rate:g} a second"
        return f"{self.conversations} x {self.turns} turns, {pace}, {self.prompt} in {self.new} out{shared}"


@dataclass
class Timing:
    """One request."""

    sent: float
    arrived: list[float] = field(default_factory=list)
    """When each part of the answer came."""
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        return self.arrived[0] - self.sent

    @property
    def per_token(self) -> float:
        """Between tokens, on average."""
        return (self.arrived[-1] - self.arrived[0]) / max(1, self.tokens - 1)


class Answerer(Protocol):
    async def ask(self, prompt: Any, new: int, seed: int, timing: Timing) -> Any:
        """The continuation of a prompt, as ids or text as the prompt is; notes in `timing` when its parts come."""


class Endpoint:
    """A server with an OpenAI-compatible API. With ids, it must know vLLM's fields `ignore_eos` and `return_token_ids`, as headmax does."""

    def __init__(self, http: httpx2.AsyncClient, model: str) -> None:
        self.http, self.model = http, model

    @classmethod
    def client(cls, address: str, key: str | None) -> httpx2.AsyncClient:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        limits = httpx2.Limits(max_connections=None)
        return httpx2.AsyncClient(base_url=address_of(address), headers=headers, limits=limits, timeout=httpx2.Timeout(30, read=600))

    async def ask(self, prompt: Any, new: int, seed: int, timing: Timing) -> Any:
        body = {"model": self.model, "prompt": prompt, "max_tokens": new, "seed": seed, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        exact = not isinstance(prompt, str)
        body |= {"ignore_eos": True, "return_token_ids": True} if exact else {}
        answer: Any = [] if exact else ""
        async with self.http.stream("POST", "completions", json=body) as response:
            if response.is_error:
                raise ValueError(explained(await response.aread()))
            lines = Lines()
            async for text in response.aiter_text():
                for event in map(read_event, lines.push(text)):
                    answer += self._take(event, exact, timing)
        return answer

    @staticmethod
    def _take(event: dict[str, Any], exact: bool, timing: Timing) -> Any:
        """What an event adds to the answer."""
        if usage := event.get("usage"):
            timing.tokens, timing.prompt = usage["completion_tokens"], usage["prompt_tokens"]
            timing.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        parts = [choice["token_ids"] if exact else choice["text"] for choice in event.get("choices", [])]
        part = parts[0] if parts else [] if exact else ""
        if part:
            timing.arrived.append(time.perf_counter())
            timing.tokens += len(part) if exact else 1
        return part


async def play(trace: Trace, answerer: Answerer) -> list[Timing]:
    """All requests of a trace; a conversation ends where a request fails."""
    begin, timings = time.perf_counter(), []

    async def conversation(number: int, start: float) -> None:
        await asyncio.sleep(start - (time.perf_counter() - begin))
        text = trace.text(trace.document, 10**6 + trace.seed + number % trace.documents) if trace.documents else trace.text(0, 0)
        for turn in range(trace.turns):
            text = text + trace.text(trace.prompt, hash((trace.seed, number, turn)))
            timing = Timing(time.perf_counter())
            timings.append(timing)
            try:
                text = text + await answerer.ask(text, trace.new, number, timing)
            except (httpx2.HTTPError, ValueError) as error:
                timing.error = f"{type(error).__name__}: {error}"
                return

    await asyncio.gather(*(conversation(number, start) for number, start in enumerate(trace.starts())))
    return timings


def play_over_http(trace: Trace, address: str, key: str | None = None, model: str | None = None) -> list[Timing]:
    """`play` against a server; without a `model` against the first it has."""

    async def run() -> list[Timing]:
        async with Endpoint.client(address, key) as http:
            name = model
            if name is None:
                answer = await http.get("models")
                if answer.is_error:
                    raise ValueError(f"{address}: {explained(answer.content)}")
                name = answer.json()["data"][0]["id"]
            return await play(trace, Endpoint(http, name))

    try:
        return asyncio.run(run())
    except httpx2.HTTPError as error:
        raise ValueError(f"{address}: {error}") from None


@dataclass(frozen=True)
class Goal:
    """What a request must keep to count as goodput, in seconds."""

    first: float
    per_token: float

    def met(self, timing: Timing) -> bool:
        return timing.first <= self.first and timing.per_token <= self.per_token


def summary(trace: Trace, timings: list[Timing], goal: Goal, impl: str, make: Recorder, **extra: Any) -> Iterator[Record]:
    """Percentiles of latencies, rates over the time from the first request to the last answer, and how many failed."""
    case = str(trace)
    whole = [timing for timing in timings if timing.error is None and timing.arrived]
    yield make(
        case, impl, "failed", len(timings) - len(whole), "requests", trace.seed, errors=sorted({t.error for t in timings if t.error})[:5]
    )
    if not whole:
        return
    latencies = {
        "time to first token": [timing.first for timing in whole],
        "inter-token latency": [b - a for timing in whole for a, b in itertools.pairwise(timing.arrived)],
        "time per output token": [timing.per_token for timing in whole if timing.tokens > 1],
        "request": [timing.arrived[-1] - timing.sent for timing in whole],
    }
    for name, seconds in latencies.items():
        for percentile, value in zip(PERCENTILES, np.percentile(seconds, PERCENTILES) if seconds else (), strict=False):
            yield make(case, impl, f"{name} p{percentile}", 1e3 * float(value), "ms", trace.seed, **extra)
    taken = max(timing.arrived[-1] for timing in whole) - min(timing.sent for timing in timings)
    good = sum(map(goal.met, whole))
    limits = {"first token within s": goal.first, "per token within s": goal.per_token, "of requests": good / len(timings)}
    yield make(case, impl, "tokens per second", sum(timing.tokens for timing in whole) / taken, "tokens/s", trace.seed, **extra)
    yield make(case, impl, "requests per second", len(whole) / taken, "requests/s", trace.seed, **extra)
    yield make(case, impl, "goodput", good / taken, "requests/s", trace.seed, **limits, **extra)
    read = sum(timing.prompt for timing in whole)
    yield make(case, impl, "prompt tokens cached", sum(timing.cached for timing in whole) / max(1, read), "share", trace.seed, **extra)
