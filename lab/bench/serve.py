"""What our own pages show of serving: the scheduler beside the static engine, prefix hits, and decoding while others read."""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headmax.bench.decode import ours, random_tokens
from headmax.generate import Engine, Request, Sampling
from headmax.models import HeadmaxForCausalLM
from headmax.records import Record, Recorder
from headmax.serve.config import ServerConfig
from headmax.serve.job import Ended, Event, Failed, Job, NewToken
from headmax.serve.load import Trace, play_over_http
from headmax.serve.process import server_process
from headmax.serve.scheduler import Scheduler
from headmax.serve.server import make_scheduler

STEPS, LONG = 2048, 4096
"""Tokens of the texts that are generated while others are read, and of those."""


@dataclass(frozen=True)
class Plan:
    recipe: str
    batches: Sequence[int]
    prompt: int
    new: int
    waves: int
    """Requests of a saturated run, in batches."""
    piece: int
    hit: int
    """Tokens that a prompt shares with an earlier one."""
    device: str
    dtype: torch.dtype

    def config(self, batch: int, deterministic: bool = False) -> ServerConfig:
        return ServerConfig(
            "bench",
            max_batch=batch,
            max_length=2 * self.hit,
            queue=10**6,
            piece=self.piece,
            prefix_cache=8 * 2**30,
            deterministic=deterministic,
        )


@dataclass
class Caller:
    """Notes when its tokens come."""

    times: list[float] = field(default_factory=list)
    sent: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, NewToken):
            self.times.append(time.perf_counter())
        elif isinstance(event, Failed):
            self.error = event.error
            self.over.set()
        elif isinstance(event, Ended):
            self.over.set()

    def wait(self) -> Caller:
        self.over.wait()
        if self.error is not None:
            raise self.error
        return self


def submit(scheduler: Scheduler, prompts: Sequence[list[int]], new: int) -> list[Caller]:
    """All at once."""
    callers = [Caller(sent=time.perf_counter()) for _ in prompts]
    pairs = enumerate(zip(prompts, callers, strict=True))
    scheduler.submit(*(Job(torch.tensor(prompt), [Sampling(seed=n)], new, caller) for n, (prompt, caller) in pairs))
    return callers


def prompts(model: HeadmaxForCausalLM, count: int, length: int, seed: int) -> list[list[int]]:
    return [random_tokens(model, length, seed * 10**6 + n) for n in range(count)]


def static(plan: Plan, model: HeadmaxForCausalLM, batch: int) -> float:
    """Tokens per second of the engine on a batch that the caller assembles, prompts included; the second of two runs."""
    engine = Engine(model, max_batch=batch)
    taken = 0.0
    for run in range(2):
        requests = [Request(prompt, max_new_tokens=plan.new, sampling=Sampling()) for prompt in prompts(model, batch, plan.prompt, run)]
        begin = time.perf_counter()
        engine.generate(requests)
        taken = time.perf_counter() - begin
    return batch * plan.new / taken


def saturated(plan: Plan, model: HeadmaxForCausalLM, batch: int, deterministic: bool) -> float:
    """Tokens per second of the scheduler while more requests wait than it has slots; after a first wave that is not counted."""
    scheduler = make_scheduler(model, plan.config(batch, deterministic)).start()
    try:
        for caller in submit(scheduler, prompts(model, batch, plan.prompt, 1), 32):
            caller.wait()
        callers = submit(scheduler, prompts(model, batch * plan.waves, plan.prompt, 2), plan.new)
        last = max(caller.wait().times[-1] for caller in callers)
        return sum(len(caller.times) for caller in callers) / (last - callers[0].sent)
    finally:
        scheduler.close(timeout=60)


def over_http(plan: Plan, model: HeadmaxForCausalLM, batch: int) -> tuple[float, int]:
    """The same through HTTP and streams, to one client process; and how many requests failed."""
    trace = Trace(batch * plan.waves, math.inf, 1, plan.prompt, plan.new, 0, 0, model.config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options = ["--max-batch", batch, "--queue", 10**5, "--piece", plan.piece, "--device", plan.device.partition(":")[0]]
        options += ["--dtype", str(plan.dtype).removeprefix("torch.")]
        with server_process(folder, *options) as (_, address):
            play_over_http(Trace(batch, math.inf, 1, plan.prompt, 32, 0, 0, model.config.vocab_size, seed=1), address)
            timings = play_over_http(trace, address)
    whole = [timing for timing in timings if timing.arrived]
    taken = max(timing.arrived[-1] for timing in whole) - min(timing.sent for timing in timings)
    return sum(timing.tokens for timing in whole) / taken, sum(timing.error is not None for timing in timings)


def after_hit(plan: Plan, model: HeadmaxForCausalLM, tail: int, rounds: int = 20) -> list[float]:
    """Seconds from token ids to the first token of prompts whose first `plan.hit` tokens were read before, `tail` others after them."""
    scheduler = make_scheduler(model, plan.config(8)).start()
    shared = random_tokens(model, plan.hit, 7)
    try:
        submit(scheduler, [shared + random_tokens(model, tail, 99)], 2)[0].wait()
        found = []
        for n in range(rounds + 3):
            (caller,) = submit(scheduler, [shared + random_tokens(model, tail, 100 + n)], 2)
            found.append(caller.wait().times[0] - caller.sent)
        return found[3:]
    finally:
        scheduler.close(timeout=60)


def beside_prefill(plan: Plan, model: HeadmaxForCausalLM, batch: int) -> tuple[list[float], list[float]]:
    """Seconds between tokens of `batch` texts, alone and while prompts are read without a pause."""
    scheduler = make_scheduler(model, plan.config(batch + 2)).start()
    try:
        callers = submit(scheduler, prompts(model, batch, plan.prompt, 3), STEPS)
        while min(len(caller.times) for caller in callers) < STEPS // 4:
            time.sleep(0.01)
        begin = time.perf_counter()
        for n in itertools.count():
            for caller in submit(scheduler, prompts(model, 2, LONG, 10 + n), 1):
                caller.wait()
            if max(len(caller.times) for caller in callers) > STEPS * 3 // 4:
                break
        end = time.perf_counter()
        gaps = [(b, b - a) for caller in callers for a, b in itertools.pairwise(caller.times[STEPS // 16 :])]
        return [gap for at, gap in gaps if at < begin], [gap for at, gap in gaps if begin < at < end]
    finally:
        scheduler.close(timeout=60)


@torch.no_grad()
def measure(plan: Plan, parts: Sequence[str]) -> Iterator[Record]:
    make, model = Recorder("serve", plan.device), ours(plan.recipe, plan.device, plan.dtype)
    for batch in plan.batches:
        case = f"{plan.recipe} batch {batch}, {plan.prompt} in {plan.new} out"
        rates: dict[str, float] = {}
        if "static" in parts:
            rates["static engine"] = static(plan, model, batch)
        if "scheduler" in parts:
            rates["scheduler"] = saturated(plan, model, batch, False)
        if "deterministic" in parts:
            rates["scheduler, deterministic"] = saturated(plan, model, batch, True)
        failed = 0
        if "http" in parts:
            rates["HTTP and SSE"], failed = over_http(plan, model, batch)
        base = rates.get("static engine")
        for name, rate in rates.items():
            extra: dict[str, Any] = {} if base is None else {"of the static engine": rate / base}
            extra |= {"failed": failed} if name == "HTTP and SSE" else {}
            yield make(case, "headmax", f"{name}/tokens per second", rate, "tokens/s", piece=plan.piece, waves=plan.waves, **extra)
    for tail in (1, 16, 128) if "hit" in parts else ():
        found = [1e3 * x for x in after_hit(plan, model, tail)]
        case = f"{plan.recipe} hit of {plan.hit}, {tail} new"
        yield make(case, "headmax", "time to first token", statistics.median(found), "ms", most=max(found), rounds=len(found))
    if "prefill" in parts:
        batch = plan.batches[0]
        alone, beside = ([1e3 * x for x in gaps] for gaps in beside_prefill(plan, model, batch))
        median, case = statistics.median(alone), f"{plan.recipe} batch {batch}"
        yield make(case, "headmax", "inter-token latency, alone p50", median, "ms", p99=float(np.percentile(alone, 99)))
        p99 = float(np.percentile(beside, 99))
        yield make(case, "headmax", "inter-token latency, others read p99", p99, "ms", times=p99 / median, piece=plan.piece)
