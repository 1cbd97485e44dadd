"""What a model answered: a file that grows batch by batch and is continued after an interruption."""

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
    """Of the request."""
    logprob: float | None = None
    """Of all targets together, in nats."""
    hits: int | None = None
    """Targets that the model found likeliest."""
    text: str | None = None
    tokens: list[int] | None = None
    """Generated."""


@dataclass(frozen=True)
class Source:
    """Who answered; scores of two sources never share a file."""

    checkpoint: str
    """The fingerprint of the model, its weights and their dtype."""
    dtype: str
    device: str
    commit: str
    state_bytes: int
    """What one sequence leaves behind: per sequence, or per token where there is attention."""


class ScoreFile:
    """Scores of one model by request. The first line says which; a line that an interruption tore is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source: Source | None = None
        self.scores: dict[str, Score] = {}
        self.whole = 0
        """Bytes of the file that are whole lines."""
        if not path.is_file():
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._take(durable.parse_json(line))
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: not a score: {error}") from error
                self.whole += len(line)

    def _take(self, row: Any) -> None:
        if self.source is not None:
            score = fields.build(Score, row)
            if score.logprob is not None and not math.isfinite(score.logprob):
                raise ValueError(f"logprob is {score.logprob}; remove the file and score again")
            self.scores[score.id] = score
        elif isinstance(row, dict) and row.pop("format", None) == FORMAT:
            self.source = fields.build(Source, row)
        else:
            raise ValueError("the first line must say whose scores these are")

    def begin(self, source: Source) -> None:
        """Continues the file if it is of the same checkpoint, or starts it."""
        if self.source is not None and self.source.checkpoint != source.checkpoint:
            raise ValueError(
                f"{self.path}: scores of another checkpoint ({self.source.checkpoint}), or of the same in another dtype; "
                f"this one is {source.checkpoint}: remove the file or name another folder with --work"
            )
        if self.path.is_file():
            os.truncate(self.path, self.whole)
        if self.source is None:
            self.source = source
            self._append([{"format": FORMAT} | asdict(source)])

    def add(self, scores: Iterable[Score]) -> None:
        """On disk when this returns."""
        scores = list(scores)
        self._append([{name: value for name, value in asdict(score).items() if value is not None} for score in scores])
        self.scores |= {score.id: score for score in scores}

    def _append(self, rows: Iterable[dict]) -> None:
        durable.append(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())
