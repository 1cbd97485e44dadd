"""What the server counts, for Prometheus."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from headmax.serve.cache import PrefixCache
    from headmax.serve.scheduler import Scheduler

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
COUNTS = {
    "stores": "States that were kept.",
    "evictions": "States that were dropped from memory for others.",
    "failed_reads": "Files of the folder that were gone or damaged when they were needed.",
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counts(Collector):
    """What a prefix cache counts by itself."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache

    def collect(self) -> Iterator[Metric]:
        for name, about in COUNTS.items():
            yield CounterMetricFamily(f"headmax_prefix_cache_{name}", about, self.cache.counts[name])


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
        gauge("batch", "Choices that are being generated.").set_function(lambda: len(scheduler.decoding.running))
        if cache is None:
            return
        self.registry.register(Counts(cache))
        used = Gauge("headmax_prefix_cache_bytes", "Memory of the states in the prefix cache.", ["place"], registry=self.registry)
        for tier in cache.tiers:
            used.labels(str(tier.device)).set_function(functools.partial(getattr, tier, "used"))
        if cache.folder is not None:
            used.labels("folder").set_function(functools.partial(getattr, cache.folder, "nbytes"))

    def text(self) -> bytes:
        return generate_latest(self.registry)
