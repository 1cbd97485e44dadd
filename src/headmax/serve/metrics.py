"""What the server counts, for Prometheus."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from headmax.serve.cache import PrefixCache
    from headmax.serve.scheduler import Scheduler

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One server's, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"headmax_{name}", about, labels, registry=self.registry)

        def seconds(name: str, about: str) -> Histogram:
            return Histogram(f"headmax_{name}_seconds", about, buckets=SECONDS, registry=self.registry)

        self.requests = counter("requests", "HTTP requests by path and status.", "path", "status")
        self.read = counter("prompt_tokens", "Tokens of prompts that were read.")
        self.cached = counter("cached_tokens", "Tokens of prompts whose states were in the prefix cache.")
        self.generated = counter("generated_tokens", "Tokens generated; rate() of it is tokens per second.")
        self.hits = counter("prefix_cache_hits", "Prompts that went on from a state in the prefix cache.")
        self.misses = counter("prefix_cache_misses", "Prompts that were read from their start.")
        self.first = seconds("time_to_first_token", "From a request's arrival to its first token.")
        self.between = seconds("inter_token_latency", "Between a choice's tokens.")
        self.whole = seconds("request", "From a request's arrival to the end of its last choice.")

    def watch(self, scheduler: Scheduler, cache: PrefixCache | None) -> None:
        """Adds what is read off at the moment it is asked for."""

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"headmax_{name}", about, registry=self.registry)

        gauge("queue", "Requests that wait for a slot.").set_function(lambda: len(scheduler.waiting))
        gauge("reading", "Prompts that are being read.").set_function(lambda: len(scheduler.prompts.reading))
        gauge("batch", "Choices that are being generated.").set_function(lambda: len(scheduler.running))
        if cache is None:
            return
        used = Gauge("headmax_prefix_cache_bytes", "Memory of the states in the prefix cache.", ["place"], registry=self.registry)
        for tier in cache.tiers:
            used.labels(str(tier.device)).set_function(functools.partial(getattr, tier, "used"))
        if cache.folder is not None:
            used.labels("folder").set_function(functools.partial(getattr, cache.folder, "nbytes"))
        for name in ("stores", "evictions", "failed"):
            gauge(f"prefix_cache_{name}", f"Prefix cache: {name} so far.").set_function(functools.partial(cache.counts.__getitem__, name))

    def text(self) -> bytes:
        return generate_latest(self.registry)
