"""The stage between requests and metrics, on a machine that may have torch and transformers alone.

python -m headmax.eval.score CHECKPOINT WORK --device cuda
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from headmax.eval import requests
from headmax.eval.requests import Request
from headmax.eval.scores import ScoreFile
from headmax.eval.scoring import Scorer
from headmax.train.faults import DeviceLost, check_device
from headmax.train.loading import has_tokenizer, load_model, load_tokenizer
from headmax.train.parallel import World, join

REQUESTS, SCORES = "requests.jsonl", "scores.jsonl"
"""The files in a work folder; while several processes score, those after the first have scores-1.jsonl, scores-2.jsonl, ..."""


def score(
    scorer: Scorer,
    asked: Mapping[str, Sequence[Request]],
    file: ScoreFile,
    say: Callable[[str, int, int], None],
    own: ScoreFile | None = None,
) -> list[str]:
    """Answers what has no answer in `file`, task by task, each batch on disk before the next begins; one line for each task that failed.

    `own` takes the answers, where others write to the file.
    DeviceLost ends it at once: no task after it could be scored.
    """
    own = file if own is None else own
    own.begin(scorer.source)
    failures, known = [], set(file.scores)
    for task, wanted in asked.items():
        missing = {request.id: request for request in wanted if request.id not in known}
        known |= set(missing)
        done, total = 0, len(missing)
        say(task, done, total)
        try:
            for scores in scorer(missing.values()):
                own.add(scores)
                done += len(scores)
                say(task, min(done * scorer.ranks, total), total)
            say(task, total, total)
        except (ValueError, RuntimeError) as error:  # such as no memory left for this task's lengths
            check_device(scorer.model.device, f"task {task}")
            failures.append(f"task {task}: {str(error).splitlines()[0]}")
    return failures


def score_folder(
    world: World,
    checkpoint: str | Path,
    tokenizer: str | Path,
    work: Path,
    dtype: str | None,
    batch_tokens: int | None,
    say: Callable[[str, int, int], None],
) -> list[str]:
    """scores.jsonl beside requests.jsonl in a work folder; `say` hears of a task, requests done and requests to do.

    Ranks take turns with batches and write files of their own, which become one at the end, or when an interrupted evaluation goes on.
    """
    world.first(lambda: collect(work))
    asked, file = requests.read(work / REQUESTS), ScoreFile(work / SCORES)
    model = load_model(checkpoint, world.device, getattr(torch, dtype) if dtype else None)
    scorer = Scorer(model, find_tokenizer(tokenizer), batch_tokens)
    scorer.share_with(world)  # all have read the file now
    failures = score(scorer, asked, file, say, None if world.main else ScoreFile(part(work, world.rank)))
    failures = list(dict.fromkeys(line for lines in world.gather(failures) for line in lines))
    world.first(lambda: collect(work))
    return failures


def part(work: Path, rank: int | str) -> Path:
    """Where a rank after the first writes its scores."""
    return work / f"{SCORES.removesuffix('.jsonl')}-{rank}.jsonl"


def collect(work: Path) -> None:
    """The scores of all ranks in one file."""
    for path in sorted(work.glob(part(work, "*").name)):
        file, more = ScoreFile(work / SCORES), ScoreFile(path)
        if more.source is not None:
            file.begin(more.source)
            file.add(score for score in more.scores.values() if score.id not in file.scores)
        path.unlink()


def find_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder. Recall needs none, and what needs one says so."""
    return load_tokenizer(folder) if has_tokenizer(folder) else None


def main() -> None:
    parser = argparse.ArgumentParser("headmax.eval.score", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder with config.json, safetensors files and a tokenizer")
    parser.add_argument("work", type=Path, help="folder with requests.jsonl; scores.jsonl is written there, or continued")
    parser.add_argument("--tokenizer", type=Path, help="folder with the tokenizer, if it is not beside the model")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"], help="of the weights")
    parser.add_argument("--batch-tokens", type=int, help="most tokens in one forward pass; 65,536 on a GPU, 16,384 on a CPU unless given")
    given = parser.parse_args()

    def say(task: str, done: int, total: int) -> None:
        print(f"\r{task}: {done:,} of {total:,} scored", end="\n" if done == total else "", file=sys.stderr, flush=True)

    try:
        place = (given.checkpoint, given.tokenizer or given.checkpoint, given.work)
        with join(given.device) as world, world.sole_user(given.work):
            shown = say if world.main else lambda task, done, total: None
            failures = score_folder(world, *place, given.dtype, given.batch_tokens, shown)
    except (ValueError, OSError) as error:
        failures = [str(error)]
    except DeviceLost as error:
        print(f"headmax: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    for line in failures:
        print(f"headmax: {line}", file=sys.stderr)
    sys.exit(2 if failures else 0)


if __name__ == "__main__":
    main()
