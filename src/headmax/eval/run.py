"""The stages on the harness's side: requests before, metrics after. A task that fails is named, and the others go on."""

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
"""Draws for the standard errors that the harness bootstraps: those of perplexities."""
NEEDLE_SAMPLES = 500
RECALL_SAMPLES = 256
UNITS = {"acc": "fraction", "acc_norm": "fraction", "contains": "fraction", "answer_logprob": "nats", "bits_per_byte": "bits"}


@dataclass(frozen=True)
class Settings:
    """What is asked, the same for the stages that make requests and metrics."""

    data_dir: Path | None = None
    """Files; the hub without."""
    limit: int | None = None
    """The first so many documents of each task."""
    max_length: int | None = None
    """Most tokens that a model reads at a time; none, but for retrieval tasks, which are cut to 4K tokens."""
    seed: int = 42
    """Of needles and recall sequences."""
    haystack: str | None = None
    """The text that needles are hidden in: a file, "generated", or None for RULER's essays from the hub."""

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
    """Tasks for one checkpoint. `failures` collects one line for each that could not be done."""

    config: HeadmaxConfig
    tokenizer: PreTrainedTokenizerBase | None
    settings: Settings
    failures: list[str] = field(default_factory=list)
    _built: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def requests(self, tasks: Sequence[str], say: Callable[[str], object]) -> dict[str, list[Request]]:
        """Stage 1: what each task asks."""
        made = {}
        for task in tasks:
            with self._guard(task):
                say(f"requests: {task}")
                made[task] = self._recall(task)[0] if task in names.MQAR else self._asked(task)
        return made

    def metrics(self, tasks: Sequence[str], scores: Mapping[str, Score], say: Callable[[str], object]) -> dict[str, list[Metric]]:
        """Stage 3: metrics of each task, from scores."""
        made = {}
        for task in tasks:
            with self._guard(task):
                say(f"metrics: {task}")
                made[task] = self._recalled(task, scores) if task in names.MQAR else self._evaluated(task, scores)
        return made

    @contextlib.contextmanager
    def _guard(self, task: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            self.failures.append(f"task {task}: {error}")
        except ImportError as missing:
            self.failures.append(f"task {task}: needs {missing.name}: pip install '.[eval]' in a checkout of headmax")
        except Exception as error:  # from inside the harness, where one task's trouble must not cost the others
            self.failures.append(f"task {task}: {type(error).__name__}: {' '.join(str(error).split())}")

    def _task(self, name: str) -> tuple[Any, str]:
        """(the harness's task, where its data are from)"""
        from headmax.eval import tasks

        if name not in self._built:
            with harness():
                if name in names.NIAH:
                    number = min(NEEDLE_SAMPLES, self.settings.limit or NEEDLE_SAMPLES)
                    count = self._lm(name, _refuse).tok_encode
                    made = tasks.build_needles(name, self.settings.haystack, number, lambda text: len(count(text)), self.settings.seed)
                else:
                    made = tasks.build(name, self.settings.data_dir)
            self._built[name] = made
        return self._built[name]

    def _lm(self, task: str, answer: Any) -> Any:
        from headmax.eval.harness import TokenLM

        if self.tokenizer is None:
            raise ValueError("texts need a tokenizer: put one beside the model or name it with --tokenizer")
        return TokenLM(self.tokenizer, answer, self.settings.length(task))

    def _asked(self, name: str) -> list[Request]:
        made: list[Request] = []

        def record(asked: Sequence[Request]) -> Mapping[str, Score]:
            made.extend(asked)
            return defaultdict(lambda: Score("", 0.0, 0, ""))

        lm = self._lm(name, record)
        task, _ = self._task(name)
        with harness():
            task.build_all_requests(limit=self.settings.limit, rank=0, world_size=1)
            for kind in sorted({instance.request_type for instance in task.instances}):
                getattr(lm, kind)([instance for instance in task.instances if instance.request_type == kind])
        return made

    def instances(self, name: str) -> list[Any]:
        """What the harness's task made of its documents, once there are requests."""
        return self._task(name)[0].instances

    def _evaluated(self, name: str, scores: Mapping[str, Score]) -> list[Metric]:
        from lm_eval.evaluator import evaluate

        def look_up(asked: Sequence[Request]) -> Mapping[str, Score]:
            if missing := [request for request in asked if request.id not in scores]:
                hint = "score them first, with the same --data-dir, --limit, --max-length and tokenizer"
                raise ValueError(f"{len(missing)} of {len(asked)} requests have no score; {hint}")
            return scores

        task, _ = self._task(name)
        with harness():
            found = evaluate(
                self._lm(name, look_up),
                {"tasks": {name: task}, "groups": {}, "group_map": {}},
                limit=self.settings.limit,
                bootstrap_iters=BOOTSTRAP,
                log_samples=False,
            )
        results = found["results"][name]
        metrics = []
        for key, value in results.items():
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr"):
                error, n = results.get(f"{metric}_stderr,{kind}"), found["n-samples"][name]["effective"]
                if metric == "contains" and n > 1:  # a mean of zeros and ones, of which the harness does not know that
                    error = math.sqrt(value * (1 - value) / (n - 1))
                if not math.isfinite(value):
                    raise ValueError(f"{metric} is {value}: the scores are beyond what it can be computed from")
                metrics.append(Metric(metric, float(value), error if isinstance(error, float) and math.isfinite(error) else None, n))
        return metrics

    def _recall(self, name: str) -> tuple[list[Request], MQAR]:
        task = MQAR(names.MQAR[name], self.config.vocab_size)
        number = min(RECALL_SAMPLES, self.settings.limit or RECALL_SAMPLES)
        batch, n = task.held_out(self.settings.seed).batch(range(number)), task.num_pairs
        rows = zip(batch.input_ids[:, : 3 * n].tolist(), batch.labels[:, 2 * n + 1 :].tolist(), strict=True)
        return [Request("recall", tuple(tokens), tuple(answers)) for tokens, answers in rows], task

    def _recalled(self, name: str, scores: Mapping[str, Score]) -> list[Metric]:
        asked, task = self._recall(name)
        if missing := [request for request in asked if request.id not in scores]:
            raise ValueError(f"{len(missing)} of {len(asked)} requests have no score; score them first, with the same --limit and --seed")
        shares = torch.tensor([scores[r.id].hits / task.num_pairs for r in asked], dtype=torch.float64)  # type: ignore[operator]
        error = float(shares.std() / len(shares) ** 0.5) if len(shares) > 1 else None
        return [Metric("acc", float(shares.mean()), error, len(asked))]

    def records(
        self, metrics: Mapping[str, Sequence[Metric]], asked: Mapping[str, Sequence[Request]], source: Source, model: str
    ) -> list[Record]:
        make = Recorder("eval", "cpu")
        make.device, make.commit = source.device, source.commit  # where and by what the scores were made
        made = []
        for task, found in metrics.items():
            about: dict[str, Any] = {"model": model, "checkpoint": source.checkpoint, "dtype": source.dtype}
            about |= {"limit": self.settings.limit, "max_length": self.settings.length(task), "cut": requests.cut(asked[task])}
            if task in names.MQAR:
                recall = MQAR(names.MQAR[task], self.config.vocab_size)
                about |= {"pairs": recall.num_pairs, "state_bytes": source.state_bytes, "chance": recall.chance}
            else:
                about["data"] = self._task(task)[1]
            for metric in found:
                unit = UNITS.get(metric.name, "perplexity")
                seed = self.settings.seed if task in (*names.NIAH, *names.MQAR) else None
                extra = about | {"stderr": metric.stderr, "n": metric.n}
                made.append(make(task, "headmax", metric.name, metric.value, unit, seed, **extra))
        return made


def model_name(config: HeadmaxConfig, fallback: str) -> str:
    """The recipe that a model is of, or another name."""
    fields = ("mixer", "hidden_size", "num_hidden_layers", "num_heads", "vocab_size", "head_gate", "head_k_dim", "head_v_dim")
    for name in recipe_names():
        recipe = get_recipe(name).model
        if all(getattr(recipe, field) == getattr(config, field) for field in fields):
            return name
    return fallback


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Without the harness's progress bars and notes."""
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
    """The harness in silence, without forks of this process to bootstrap, and with each template compiled once.

    It compiles a task's template anew for every document otherwise, which is most of the time that requests and metrics take.
    """
    from lm_eval.utils import env

    cached = functools.lru_cache(env.from_string)
    with silence(), mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"), mock.patch.object(env, "from_string", cached):
        yield


def _refuse(asked: Sequence[Request]) -> Mapping[str, Score]:
    raise TypeError("this one only counts tokens")
