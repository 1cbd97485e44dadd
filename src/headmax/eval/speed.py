"""Evaluation speed, compared with lm-evaluation-harness's Hugging Face class with the same model on the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerBase

from headmax.eval.harness import TokenLM
from headmax.eval.run import Evaluation, Settings, silence
from headmax.eval.scoring import Scorer
from headmax.models import HeadmaxForCausalLM
from headmax.records import Record, Recorder


@dataclass
class Timing:
    """Rounds of one model."""

    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    """Unlike seconds, not affected by other processes."""
    answers: Sequence[tuple[float, bool]] = ()

    def run(self, lm: Any, instances: Sequence[Any]) -> None:
        start, processor_start = time.perf_counter(), time.process_time()
        with silence():
            self.answers = lm.loglikelihood(instances)
        self.seconds.append(time.perf_counter() - start)
        self.processor_seconds.append(time.process_time() - processor_start)


def compare(
    model: HeadmaxForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    tasks: Sequence[str],
    batch_sizes: Sequence[int],
    rounds: int,
    say: Callable[[str], object],
) -> Iterator[Record]:
    """Seconds from texts to scores for all requests of a task: medians of interleaved rounds; hf at each batch size."""
    make = Recorder("eval speed", model.device)
    lms: dict[str, Any] = {"headmax": TokenLM(tokenizer, Scorer(model, tokenizer).answers)}
    with silence():
        lms |= {f"hf, batch {n}": HFLM(pretrained=model, tokenizer=tokenizer, batch_size=n, max_length=10**6) for n in batch_sizes}
    for task in tasks:
        evaluation = Evaluation(model.config, tokenizer, settings)
        evaluation.requests([task], say)
        if evaluation.failures:
            raise ValueError(evaluation.failures[0])
        instances = evaluation.instances(task)
        if instances[0].request_type != "loglikelihood":
            raise ValueError(f"task {task} asks for {instances[0].request_type}; choose a task with log-likelihoods")
        timings = {name: Timing() for name in lms}
        for turn in range(rounds):
            for name, lm in lms.items():
                say(f"{task}, round {turn + 1} of {rounds}: {name}")
                timings[name].run(lm, instances)
        ours = timings["headmax"]
        for name, timing in timings.items():
            extra: dict[str, Any] = {
                "headmax as fast": median(timing.seconds) / median(ours.seconds),
                "largest difference": max(abs(a - b) for (a, _), (b, _) in zip(ours.answers, timing.answers, strict=True)),
                "requests": len(instances),
                "rounds": rounds,
                "processor seconds": median(timing.processor_seconds),
                "limit": settings.limit,
                "mixer": model.config.mixer,
                "parameters": model.num_parameters(),
            }
            yield make(task, name, "seconds", median(timing.seconds), "s", **extra)
