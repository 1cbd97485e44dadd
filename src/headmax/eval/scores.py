"""Scores of requests, in a file that grows batch by batch and can be resumed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headmax import durable, fields

FORMAT = "headmax scores 1"


@dataclass(frozen=True)
class Score:
    id: str
    """The request's."""
    logprob: float | None = None
    """Sum over all targets, in nats."""
    hits: int | None = None
    """Targets that were the model's most likely token."""
    text: str | None = None
    tokens: list[int] | None = None
    """Generated."""


@dataclass(frozen=True)
class Source:
    """Origin of scores; a file has scores of one origin."""

    checkpoint: str
    """Fingerprint of the model, its weights and their dtype."""
    dtype: str
    device: str
    commit: str
    state_bytes: int
    """Bytes of state per sequence, or per token with attention layers."""


class ScoreFile:
    """Scores of one model by request. The first line is the `Source`; an incomplete last line is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source: Source | None = None
        self.scores: dict[str, Score] = {}
        self.complete_bytes = 0
        """Bytes in complete lines."""
        if not path.is_file():
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._add_row(durable.parse_json(line))
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: not a score: {error}") from error
                self.complete_bytes += len(line)

    def _add_row(self, row: Any) -> None:
        if self.source is not None:
            score = fields.build(Score, row)
            if score.logprob is not None and not math.isfinite(score.logprob):
                raise ValueError(f"logprob is {score.logprob}; remove the file and score again")
            self.scores[score.id] = score
        elif isinstance(row, dict) and row.pop("format", None) == FORMAT:
            self.source = fields.build(Source, row)
        else:
            raise ValueError("the first line must name the source of the scores")

    def begin(self, source: Source) -> None:
        """Starts the file, or resumes it if it has the same checkpoint."""
        if self.source is not None and self.source.checkpoint != source.checkpoint:
            raise ValueError(
                f"{self.path}: scores of another checkpoint or dtype ({self.source.checkpoint}); "
                f"this one is {source.checkpoint}: remove the file, or give another folder with --work"
            )
        if self.path.is_file():
            os.truncate(self.path, self.complete_bytes)
        if self.source is None:
            self.source = source
            self._append([{"format": FORMAT} | asdict(source)])

    def add(self, scores: Iterable[Score]) -> None:
        """Appends scores and waits until they are on disk."""
        scores = list(scores)
        self._append([{name: value for name, value in asdict(score).items() if value is not None} for score in scores])
        self.scores |= {score.id: score for score in scores}

    def _append(self, rows: Iterable[dict]) -> None:
        durable.append(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())
