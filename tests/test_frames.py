"""The way of a trained token from the command line to its first kernel, as docs/how-it-works.md lists it."""

import re
import traceback
from pathlib import Path

import pytest

import headmax
from headmax_cli import main

SOURCE, PAGE = Path(headmax.__file__).parent, Path(__file__).parents[1] / "docs" / "how-it-works.md"


class Reached(BaseException):
    """The first launch: nothing need run after it."""


def test_few_functions_lie_between_command_and_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from headmax.ops.kernels import channel

    frames: list[tuple[str, str]] = []

    def launch(*_: object) -> None:
        stack = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()]
        frames.extend((name, str(path.relative_to(SOURCE))) for path, name in stack if path.is_relative_to(SOURCE))
        raise Reached

    monkeypatch.setattr(channel, "launch", launch)
    options = "--device cpu --model.fused --model.backend triton --batch-tokens 49 --compute.micro-batch 1"
    with pytest.raises(Reached):
        main(["train", "mqar-softmax-gla", "--out", str(tmp_path), *options.split()])
    listed = re.findall(r"^\| (\w+) \| (\S+\.py) \|", PAGE.read_text().replace("\\_", "_"), re.MULTILINE)
    assert frames == listed
    assert len(frames) <= 12
