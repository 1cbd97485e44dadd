"""On a GPU: the study's path, in small."""

import math
from pathlib import Path

import pytest

from lab.study.session import Options, Session, recorded
from tests.lab.test_session import carried, small, study_data

pytestmark = pytest.mark.gpu
__all__ = ["carried", "small", "study_data"]


@pytest.mark.parametrize(("part", "number"), [("language", 8), ("recall", 2)])
def test_trials_are_recorded(part: str, number: int, study_data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    session = Session(study_data, tmp_path / "work", tmp_path / "study.jsonl", "cuda", math.inf, options=Options(), say=said.append)
    assert session.run(part, number) == number, said
    assert all("error" not in record.extra for record in recorded(tmp_path / "study.jsonl").values())
