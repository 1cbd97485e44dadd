"""What a machine without texts, tasks and network needs to examine models: requests and needles, beside the tokens to train on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from headmax.data.dataset import TokenShards
from headmax.data.niah import sentences
from headmax.data.shards import Index
from headmax.eval import names, requests
from headmax.eval.run import Evaluation, Settings
from headmax.eval.score import REQUESTS
from headmax.models import HeadmaxConfig
from headmax.train.loading import load_tokenizer
from lab.study import needles, runs

NEEDLE_SAMPLES = 40
TASKS: dict[str, int | None] = {
    **dict.fromkeys(names.COMMONSENSE),
    "hellaswag": 2500,
    "squad_completion": 400,
    **{name: NEEDLE_SAMPLES for name, (_, length) in names.NIAH.items() if length <= 4096},
}
"""Tasks and how many of their first documents; None: all."""
HAYSTACK = 100
"""Sequences of the training tokens that needles to train on lie in."""


def evaluations(data: Path, eval_data: Path, haystack: Path) -> dict[str, Evaluation]:
    """How each task is asked and answered; the same for requests and metrics."""
    config, tokenizer = HeadmaxConfig(vocab_size=Index.read(data).vocab_size), load_tokenizer(data)
    by_limit = {limit: Evaluation(config, tokenizer, Settings(eval_data, limit, haystack=str(haystack))) for limit in set(TASKS.values())}
    return {task: by_limit[limit] for task, limit in TASKS.items()}


def prepare(data: Path, eval_data: Path, haystack: Path, say: Callable[[str], object]) -> None:
    """Writes requests.jsonl and needles.npz into a folder that `headmax data prepare` wrote."""
    made: dict[str, list[requests.Request]] = {}
    for task, evaluation in evaluations(data, eval_data, haystack).items():
        made |= evaluation.requests([task], say)
        if evaluation.failures:
            raise ValueError(evaluation.failures[0])
    requests.write(data / REQUESTS, made)
    say("needles")
    tokenizer = load_tokenizer(data)
    text = TokenShards(data, length=runs.LENGTH, seed=needles.SEED).batch(range(HAYSTACK)).input_ids
    training_text = sentences(tokenizer.decode(np.ravel(text), skip_special_tokens=True))
    needles.write(data / needles.NEEDLES, runs.NEEDLE_STEPS * runs.BATCH, runs.LENGTH, training_text, tokenizer)
