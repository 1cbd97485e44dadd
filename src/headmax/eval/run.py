"""Stages that need the harness: requests and metrics. A task that fails is reported, and the others continue."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedTokenizerBase

from headmax.data.mqar import MQAR
from headmax.eval import names, requests
from headmax.eval.requests import Request
from headmax.eval.scores import Score, Source
from headmax.models import HeadmaxConfig
from headmax.recipes import get as get_recipe
from headmax.recipes import names as recipe_names
from headmax.records import Record, Recorder

BOOTSTRAP = 1000
"""Resamples for the standard errors of perplexities, which the harness bootstraps."""
NEEDLE_SAMPLES = 500
RECALL_SAMPLES = 256
UNITS = {"acc": "fraction", "acc_norm": "fraction", "contains": "fraction", "answer_logprob": "nats", "bits_per_byte": "bits"}


@dataclass(frozen=True)
class Settings:
    """Settings of tasks, the same for the stages requests and metrics."""

    data_dir: Path | None = None
    """Folder of local files; the hub if None."""
    limit: int | None = None
    """Use only the first documents of each task."""
    max_length: int | None = None
    """Most tokens that a model reads at a time; unlimited if None, except for retrieval tasks with 4K tokens."""
    seed: int = 42
    """For needles and recall sequences."""
    haystack: str | None = None
    """Text to hide needles in: a file, "generated", or None for RULER's essays from the hub."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit must be at least 1, got {self.limit}")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"--max-length must be at least 1, got {self.max_length}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be in [0, 2^63), got {self.seed}")

    def length(self, task: str) -> int | None:
        limits = [self.max_length, names.RETRIEVAL_LENGTH if task in names.RETRIEVAL else None]
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass
class Metric:
    name: str
    value: float
    stderr: float | None
    n: int


@dataclass
class Evaluation:
    """Tasks for one checkpoint. `failures` has a line for each task that failed."""

    config: HeadmaxConfig
    tokenizer: PreTrainedTokenizerBase | None
    settings: Settings
    failures: list[str] = field(default_factory=list)
    _built: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def requests(self, tasks: Sequence[str], say: Callable[[str], object]) -> dict[str, list[Request]]:
        """Stage 1: the requests of each task."""
        by_task = {}
        for task in tasks:
            with self._report_failure(task):
                say(f"requests: {task}")
                by_task[task] = self._recall(task)[0] if task in names.MQAR else self._harness_requests(task)
        return by_task

    def metrics(self, tasks: Sequence[str], scores: Mapping[str, Score], say: Callable[[str], object]) -> dict[str, list[Metric]]:
        """Stage 3: the metrics of each task, from scores."""
        by_task = {}
        for task in tasks:
            with self._report_failure(task):
                say(f"metrics: {task}")
                by_task[task] = self._recall_metrics(task, scores) if task in names.MQAR else self._harness_metrics(task, scores)
        return by_task

    @contextlib.contextmanager
    def _report_failure(self, task: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            self.failures.append(f"task {task}: {error}")
        except ImportError as missing:
            self.failures.append(f"task {task}: needs {missing.name}: pip install '.[eval]' in a checkout of headmax")
        except Exception as error:  # anything inside the harness; other tasks must not fail with this one
            self.failures.append(f"task {task}: {type(error).__name__}: {' '.join(str(error).split())}")

    def _task(self, name: str) -> tuple[Any, str]:
        """(the harness's task, source of its data)"""
        from headmax.eval import tasks

        if name not in self._built:
            with harness():
                if name in names.NIAH:
                    number = min(NEEDLE_SAMPLES, self.settings.limit or NEEDLE_SAMPLES)
                    count = self._lm(name, _refuse).tok_encode
                    built = tasks.build_needles(name, self.settings.haystack, number, lambda text: len(count(text)), self.settings.seed)
                else:
                    built = tasks.build(name, self.settings.data_dir)
            self._built[name] = built
        return self._built[name]

    def _lm(self, task: str, answer: Any) -> Any:
        from headmax.eval.harness import TokenLM

        if self.tokenizer is None:
            raise ValueError("tasks with texts need a tokenizer: add one to the model's folder, or give --tokenizer")
        return TokenLM(self.tokenizer, answer, self.settings.length(task))

    def _harness_requests(self, name: str) -> list[Request]:
        recorded: list[Request] = []

        def record(requests: Sequence[Request]) -> Mapping[str, Score]:
            recorded.extend(requests)
            return defaultdict(lambda: Score("", 0.0, 0, ""))

        lm = self._lm(name, record)
        task, _ = self._task(name)
        with harness():
            task.build_all_requests(limit=self.settings.limit, rank=0, world_size=1)
            for kind in sorted({instance.request_type for instance in task.instances}):
                getattr(lm, kind)([instance for instance in task.instances if instance.request_type == kind])
        return recorded

    def instances(self, name: str) -> list[Any]:
        """The harness's instances of a task, after `requests`."""
        return self._task(name)[0].instances

    def _harness_metrics(self, name: str, scores: Mapping[str, Score]) -> list[Metric]:
        from lm_eval.evaluator import evaluate

        def look_up(requests: Sequence[Request]) -> Mapping[str, Score]:
            _check_scored(requests, scores, "--data-dir, --limit, --max-length and tokenizer")
            return scores

        task, _ = self._task(name)
        with harness():
            evaluation = evaluate(
                self._lm(name, look_up),
                {"tasks": {name: task}, "groups": {}, "group_map": {}},
                limit=self.settings.limit,
                bootstrap_iters=BOOTSTRAP,
                log_samples=False,
            )
        results = evaluation["results"][name]
        metrics = []
        for key, value in results.items():
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr"):
                error, n = results.get(f"{metric}_stderr,{kind}"), evaluation["n-samples"][name]["effective"]
                if metric == "contains" and n > 1:  # the mean of zeros and ones, which the harness does not know
                    error = math.sqrt(value * (1 - value) / (n - 1))
                if not math.isfinite(value):
                    raise ValueError(f"{metric} is {value}: it cannot be computed from these scores")
                metrics.append(Metric(metric, float(value), error if isinstance(error, float) and math.isfinite(error) else None, n))
        return metrics

    def _recall(self, name: str) -> tuple[list[Request], MQAR]:
        task = MQAR(names.MQAR[name], self.config.vocab_size)
        number = min(RECALL_SAMPLES, self.settings.limit or RECALL_SAMPLES)
        batch, n = task.held_out(self.settings.seed).batch(range(number)), task.num_pairs
        rows = zip(batch.input_ids[:, : 3 * n].tolist(), batch.labels[:, 2 * n + 1 :].tolist(), strict=True)
        return [Request("recall", tuple(tokens), tuple(answers)) for tokens, answers in rows], task

    def _recall_metrics(self, name: str, scores: Mapping[str, Score]) -> list[Metric]:
        requests, task = self._recall(name)
        _check_scored(requests, scores, "--limit and --seed")
        accuracies = torch.tensor([scores[r.id].hits / task.num_pairs for r in requests], dtype=torch.float64)  # type: ignore[operator]
        error = float(accuracies.std() / len(accuracies) ** 0.5) if len(accuracies) > 1 else None
        return [Metric("acc", float(accuracies.mean()), error, len(requests))]

    def records(
        self, metrics: Mapping[str, Sequence[Metric]], asked: Mapping[str, Sequence[Request]], source: Source, model: str
    ) -> list[Record]:
        make = Recorder("eval", "cpu")
        make.device, make.commit = source.device, source.commit  # of the scores, not of this process
        results = []
        for task, measured in metrics.items():
            about: dict[str, Any] = {"model": model, "checkpoint": source.checkpoint, "dtype": source.dtype}
            about |= {"limit": self.settings.limit, "max_length": self.settings.length(task), "cut": requests.cut(asked[task])}
            if task in names.MQAR:
                recall = MQAR(names.MQAR[task], self.config.vocab_size)
                about |= {"pairs": recall.num_pairs, "state_bytes": source.state_bytes, "chance": recall.chance}
            else:
                about["data"] = self._task(task)[1]
            for metric in measured:
                unit = UNITS.get(metric.name, "perplexity")
                seed = self.settings.seed if task in (*names.NIAH, *names.MQAR) else None
                extra = about | {"stderr": metric.stderr, "n": metric.n}
                results.append(make(task, "headmax", metric.name, metric.value, unit, seed, **extra))
        return results


def model_name(config: HeadmaxConfig, fallback: str) -> str:
    """The recipe with this model, or `fallback`."""
    fields = ("mixer", "hidden_size", "num_hidden_layers", "num_heads", "vocab_size", "head_gate", "head_k_dim", "head_v_dim")
    for name in recipe_names():
        recipe = get_recipe(name).model
        if all(getattr(recipe, field) == getattr(config, field) for field in fields):
            return name
    return fallback


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppresses the harness's progress bars and messages."""
    loggers = {logging.getLogger(name): logging.getLogger(name).level for name in ("lm_eval", "datasets", "evaluate")}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


@contextlib.contextmanager
def harness() -> Iterator[None]:
    """Silences the harness, keeps it from forking this process to bootstrap, and caches its compiled templates.

    Otherwise it compiles a task's template for every document, which takes most of the time of requests and metrics.
    """
    from lm_eval.utils import env

    cached = functools.lru_cache(env.from_string)
    with silence(), mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"), mock.patch.object(env, "from_string", cached):
        yield


def _check_scored(requests: Sequence[Request], scores: Mapping[str, Score], options: str) -> None:
    if missing := [request for request in requests if request.id not in scores]:
        raise ValueError(f"{len(missing)} of {len(requests)} requests have no score; score them first, with the same {options}")


def _refuse(requests: Sequence[Request]) -> Mapping[str, Score]:
    raise TypeError("this TokenLM only counts tokens")
