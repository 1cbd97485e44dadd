"""Schedulers and servers around the small model of tests/generate, and what each request should give."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import torch
from openai import OpenAI

from headmax import HeadmaxForCausalLM
from headmax.generate import Completion, Engine, Request, Sampling
from headmax.generate.sampling import uniform
from headmax.serve.cache import PrefixCache
from headmax.serve.config import ServerConfig
from headmax.serve.job import Ended, Event, Failed, Job, NewToken, Read
from headmax.serve.process import server_process
from headmax.serve.reading import Pieces
from headmax.serve.scheduler import Scheduler
from headmax.serve.server import Server, listen, make_batch, make_server, make_service
from headmax.serve.service import Service
from tests.generate.checkpoint import make_model, make_tokenizer

SECONDS = 60.0
"""Nothing here takes that long, unless it hangs."""
ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"


@dataclass
class Caller:
    """A job and what has come of it."""

    job: Job
    events: queue.Queue[Event] = field(default_factory=queue.Queue)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float | None]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    cached: int | None = None
    scores: list[NewToken] | None = None

    def wait(self, tokens: int | None = None) -> Caller:
        """Until all choices have ended, or that many tokens have come."""
        deadline = time.monotonic() + SECONDS
        while len(self.ends) < len(self.job.rules) and (tokens is None or sum(map(len, self.tokens.values())) < tokens):
            event = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Read):
                self.cached, self.scores = event.cached, event.scores
            elif isinstance(event, Ended):
                self.ends[event.choice] = event.reason
            elif isinstance(event, NewToken):
                self.tokens.setdefault(event.choice, []).append(event.token)
                self.logprobs.setdefault(event.choice, []).append(event.logprob)
        return self


def job(prompt: list[int], new: int = 10, seeds: tuple[int, ...] = (0,), **options: Any) -> Caller:
    """A job whose events are kept; `options` are the job's, or `Sampling`'s."""
    rules = {name: options.pop(name) for name in list(options) if name in Sampling.__dataclass_fields__}
    caller = Caller(None)  # type: ignore[arg-type]
    caller.job = Job(torch.tensor(prompt), [Sampling(seed=seed, **rules) for seed in seeds], new, caller.events.put, **options)
    return caller


def kept(scheduler: Scheduler, text: list[int]) -> bool:
    """Whether the prefix cache has the states after a text."""
    return scheduler.cache is not None and scheduler.cache.has(torch.tensor(text))


def submit(scheduler: Scheduler, *callers: Caller) -> tuple[Caller, ...]:
    scheduler.submit(*(caller.job for caller in callers))
    return callers


@contextlib.contextmanager
def scheduling(
    model: HeadmaxForCausalLM | None = None, cache: PrefixCache | int = 10**8, start: bool = True, **changes: Any
) -> Iterator[Scheduler]:
    """A scheduler in chunks of 128; `changes` are those of a server's configuration, or of `Scheduler`."""
    model = make_model() if model is None else model
    options = {name: changes.pop(name) for name in ("ahead", "queue", "tail") if name in changes}
    config = ServerConfig(**{"name": "tiny", "chunk": 128, "piece": 128, "max_batch": 4, "max_length": 2000} | changes)
    kept = (PrefixCache(config.chunk, {"cpu": cache}) if cache else None) if isinstance(cache, int) else cache
    pieces = Pieces(config.chunk, config.piece, config.deterministic)
    scheduler = Scheduler(model, make_batch(model, config), pieces=pieces, cache=kept, **options)
    try:
        yield scheduler.start() if start else scheduler
    finally:
        assert scheduler.close(timeout=SECONDS)


@dataclass
class Running:
    """A server in this process."""

    url: str
    service: Service
    server: Server
    client: openai.OpenAI

    @property
    def scheduler(self) -> Scheduler:
        return self.service.scheduler

    def idle(self) -> bool:
        """Whether nothing is left of any request, after a moment's patience."""
        own = self.scheduler
        return soon(lambda: not (own.waiting or own.prompts.reading or own.decoding.entering or own.decoding.running))


def openai_client(url: str, key: str = "none") -> openai.OpenAI:
    """One that talks to this address alone, whatever proxies the environment names, and never tries again."""
    http = httpx2.Client(trust_env=False, timeout=SECONDS, limits=httpx2.Limits(max_connections=None))
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http)


def soon(condition: Any, seconds: float = SECONDS) -> bool:
    """Whether it comes to be; the time is for machines that are busy."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


@contextlib.contextmanager
def serving(model: HeadmaxForCausalLM | None = None, template: str | None = TEMPLATE, **changes: Any) -> Iterator[Running]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    config = ServerConfig(**{"name": "tiny", "chunk": 128, "piece": 256, "max_batch": 8, "max_length": 4000, "drain": 5} | changes)
    service = make_service(make_model() if model is None else model, config, tokenizer)
    address = listen("127.0.0.1", 0)
    server = make_server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address]})
    thread.start()
    try:
        assert soon(lambda: server.started)
        url = f"http://127.0.0.1:{address.getsockname()[1]}"
        with openai_client(url) as client:
            yield Running(url, service, server, client)
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert service.scheduler.close(timeout=SECONDS)
        assert not thread.is_alive()


@contextlib.contextmanager
def process(folder: Path, *options: object) -> Iterator[tuple[subprocess.Popen, str]]:
    """`headmax serve` as a user starts it: the process and its address."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
    with server_process(folder, "--name", "tiny", *options, environment=environment) as (server, url):
        yield server, url


class Alone:
    """What the engine gives for a request by itself."""

    def __init__(self, model: HeadmaxForCausalLM | None = None, length: int = 4000) -> None:
        self.engine = Engine(make_model() if model is None else model, max_batch=1, max_length=length, tokenizer=make_tokenizer())
        ends = self.engine.model.generation_config.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends or [])

    def __call__(self, prompt: str | list[int], new: int, rules: Sampling, stop: tuple[str, ...] = (), eos: bool = True) -> Completion:
        ends = self.ends if eos else []
        return self.engine.generate(Request(prompt, None, new, rules, ends, stop), logprobs=True)[0]

    def tied(self, prompt: list[int], tokens: list[int], other: list[int], rules: Sampling, within: float = 1e-4) -> bool:
        """Whether two continuations by plain rules are equal up to a draw that rounding may decide."""
        differing = [n for n, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b]
        if not differing:
            return len(tokens) == len(other)
        n = differing[0]
        logits = self.engine.prefill(prompt + tokens[:n]).logits
        if rules.temperature == 0:
            return bool(logits.max() - logits[other[n]] < within)
        total = (logits / rules.temperature).softmax(-1).cumsum(-1)
        u = uniform(torch.tensor(rules.seed), torch.tensor(len(prompt) + n))
        before = total[other[n] - 1] if other[n] else torch.tensor(0.0)
        return bool(before - within < u < total[other[n]] + within)
