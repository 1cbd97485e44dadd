"""Evaluation speed, compared with lm-evaluation-harness's Hugging Face class with the same model on the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerBase

from headmax.eval.harness import TokenLM
from headmax.eval.run import Evaluation, Settings, silence
from headmax.eval.scoring import Scorer
from headmax.models import HeadmaxForCausalLM
from headmax.records import Record, Recorder


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
        seconds: dict[str, list[float]] = {name: [] for name in lms}
        processor: dict[str, list[float]] = {name: [] for name in lms}
        answers = {}
        for turn in range(rounds):
            for name, lm in lms.items():
                say(f"{task}, round {turn + 1} of {rounds}: {name}")
                start, before = time.perf_counter(), time.process_time()
                with silence():
                    answers[name] = lm.loglikelihood(instances)
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - before)
        for name, times in seconds.items():
            largest = max(abs(a - b) for (a, _), (b, _) in zip(answers["headmax"], answers[name], strict=True))
            ratio = median(times) / median(seconds["headmax"])
            extra: dict[str, Any] = {
                "headmax as fast": ratio,
                "largest difference": largest,
                "requests": len(instances),
                "rounds": rounds,
            }
            extra["processor seconds"] = median(processor[name])  # unlike seconds, not affected by other processes
            extra |= {"limit": settings.limit, "mixer": model.config.mixer, "parameters": model.num_parameters()}
            yield make(task, name, "seconds", median(times), "s", **extra)
