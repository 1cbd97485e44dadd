"""The harness's tasks, with data from the hub or local files; prompts, metrics and standard errors are the harness's in both cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks._yaml_loader import load_yaml

from headmax.data.niah import ANSWER_TOKENS, Needles, generated_prose, sentences
from headmax.eval import local
from headmax.eval.names import NIAH

FOLDERS = {"lambada_openai": "lambada", "arc_easy": "arc", "arc_challenge": "arc"}
"""The harness's folders of tasks, if not named like the task."""
ESSAYS = "baber/paul_graham_essays"
"""RULER's haystack, on the hub."""
GENERATED = "generated"
"""Name of the haystack of `data.niah.generated_prose`."""


def _settings(name: str) -> dict[str, Any]:
    folder = Path(lm_eval.tasks.__file__).parent / FOLDERS.get(name, name)
    files = [folder / f"{name}.yaml", folder / "default.yaml"]
    settings = load_yaml(next(file for file in files if file.is_file()), resolve_func=True)
    return {key: value for key, value in settings.items() if key not in ("tag", "group")}


def build(name: str, folder: Path | None) -> tuple[Task, str]:
    """(a task of the harness, source of its data): the hub, or files in a folder."""
    settings = _settings(name)
    kind: type[ConfigurableTask] = settings.pop("class", ConfigurableTask)
    if folder is None:
        try:
            task = kind(config=settings)
        except Exception as error:  # the hub's libraries raise many types
            raise ValueError(f"cannot be loaded from the hub ({_line(error)}); give its files with --data-dir") from error
        task.config.task = name
        return task, "hub"
    rows, source = local.rows(name, folder)
    split = settings.get("test_split") or settings.get("validation_split") or "validation"

    class Local(kind):
        def download(self, *_: Any, **__: Any) -> None:
            self.dataset = datasets.DatasetDict({split: datasets.Dataset.from_list(rows)})

        def process_results(self, doc: dict, results: Sequence[Any]) -> dict:
            if "answers" not in doc:
                return super().process_results(doc, results)
            metrics = (super(Local, self).process_results(doc | {"value": answer}, results) for answer in doc["answers"])
            return max(metrics, key=lambda one: one["contains"])

    if kind is ConfigurableTask:  # files have a single split, and contexts in one part
        settings |= {key: None for key in ("training_split", "validation_split", "test_split") if settings.get(key) != split}
        settings |= {"process_docs": None} if name == "hellaswag" else {}
    task = Local(config=settings)
    task.config.task = name
    return task, source


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


class NeedleTask(ConfigurableTask):
    """S-NIAH as a task: matches generated text as RULER does, and also takes the log-probability of the answer."""

    def __init__(self, name: str, needles: Needles, number: int, count_tokens: Callable[[str], int], seed: int) -> None:
        self.rows = [vars(sample) for sample in needles.samples(number, count_tokens, seed)]
        super().__init__(
            config={
                "task": name,
                "output_type": "generate_until",
                "test_split": "test",
                "doc_to_text": "prompt",
                "doc_to_target": "value",
                "generation_kwargs": {"until": [], "max_gen_toks": ANSWER_TOKENS, "do_sample": False},
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
                "metadata": {"version": 1.0},
            }
        )

    def download(self, *_: Any, **__: Any) -> None:
        self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_list(self.rows)})

    def construct_requests(self, doc: dict, ctx: str, **kwargs: Any) -> list[Instance]:
        metadata = kwargs["metadata"]
        return [
            Instance("generate_until", doc, (ctx, self.config.generation_kwargs), 0, metadata=metadata),
            Instance("loglikelihood", doc, (ctx, f" {doc['value']}"), 1, metadata=metadata),
        ]

    def process_results(self, doc: dict, results: Sequence[Any]) -> dict[str, float]:
        text, (logprob, _) = results
        return {"acc": float(doc["value"].lower() in text.lower()), "answer_logprob": logprob}

    def aggregation(self) -> dict:
        return {"acc": mean, "answer_logprob": mean}

    def higher_is_better(self) -> dict:
        return {"acc": True, "answer_logprob": True}


def prose(haystack: str | None) -> tuple[list[str], str]:
    """(sentences of a haystack, their source): a file, `GENERATED`, or RULER's essays if None."""
    if haystack == GENERATED:
        return generated_prose(), f"{GENERATED} sentences"
    if haystack is not None:
        return sentences(local.read_text(Path(haystack))[: 2**20]), Path(haystack).name.removesuffix(".xz")
    try:
        return sentences(" ".join(datasets.load_dataset(ESSAYS, split="train")["text"])), ESSAYS
    except Exception as error:
        hint = f"give a text file with --haystack, or use --haystack {GENERATED}"
        raise ValueError(f"haystack {ESSAYS} cannot be loaded from the hub ({_line(error)}); {hint}") from error


def build_needles(name: str, haystack: str | None, number: int, count_tokens: Callable[[str], int], seed: int) -> tuple[Task, str]:
    """(an S-NIAH task, source of its haystack)."""
    kind, length = NIAH[name]
    text, source = ([], "noise sentence") if kind == 1 else prose(haystack)
    return NeedleTask(name, Needles(kind, length, text), number, count_tokens, seed), source
