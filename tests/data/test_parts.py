"""Parts that several jobs prepare: together they are what one process makes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headmax.data.dataset import TokenShards
from headmax.data.parts import Part, merge
from headmax.data.prepare import PrepareConfig, prepare
from headmax.data.shards import Index, verify
from tests.data.corpus import documents, write


def tokens(folder: Path, split: str) -> list[int]:
    return [n for shard in Index.read(folder).splits[split] for n in np.fromfile(folder / f"{shard.name}.tokens", np.uint16).tolist()]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five files, one of them long: whole, and as three parts."""
    folder, texts = tmp_path_factory.mktemp("parts"), documents(30)
    for n, (first, last) in enumerate(((0, 2), (2, 20), (20, 21), (21, 28), (28, 30))):
        write(folder / "in" / f"{n}.jsonl", texts[first:last])
    prepare(PrepareConfig((str(folder / "in"),), valid_fraction=0.2), folder / "whole", workers=1)
    for n in (1, 2, 3):
        config = PrepareConfig((str(folder / "in"),), valid_fraction=0.2, shard_tokens=2000, part=f"{n}/3")
        prepare(config, folder / f"part{n}", workers=1)
    return folder


def test_parts_together_are_what_one_process_makes(prepared: Path, tmp_path: Path) -> None:
    parts, out = [prepared / f"part{n}" for n in (2, 3, 1)], tmp_path / "merged"
    index = merge(parts, out)
    assert verify(out) == index
    for split in ("train", "valid"):
        assert tokens(out, split) == tokens(prepared / "whole", split)
        assert index.documents(split) == Index.read(prepared / "whole").documents(split)
    one, other = (TokenShards(folder, length=32, seed=0).batch(range(4)).input_ids for folder in (prepared / "whole", out))
    assert one.equal(other)
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert merge(parts, out) == index
    assert prepare(PrepareConfig((str(prepared / "in"),), valid_fraction=0.2, shard_tokens=2000), out, workers=1) == index
    assert before == {file: file.stat().st_mtime_ns for file in out.iterdir()}


def test_a_merge_that_was_interrupted_goes_on(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, links = [prepared / f"part{n}" for n in (1, 2, 3)], []

    def fail(source: Path, target: Path) -> None:
        links.append(target)
        raise OSError if len(links) < 4 else KeyboardInterrupt  # copies three, as on another file system

    monkeypatch.setattr("headmax.data.parts.os.link", fail)
    with pytest.raises(KeyboardInterrupt):
        merge(parts, tmp_path)
    with pytest.raises(ValueError, match="incomplete; rerun"):
        Index.read(tmp_path)
    monkeypatch.undo()
    assert merge(parts, tmp_path) == verify(tmp_path)


def test_parts_of_something_else_are_refused(prepared: Path, tmp_path: Path) -> None:
    one, two, three = (prepared / f"part{n}" for n in (1, 2, 3))
    for given, said in (
        ((one, three), "missing parts of 3: 2"),
        ((one, two, three, prepared / "whole"), "whole: not a part"),
    ):
        with pytest.raises(ValueError, match=said):
            merge(given, tmp_path / "out")
    other = PrepareConfig((str(prepared / "in"),), valid_fraction=0.3, shard_tokens=2000, part="2/3")
    prepare(other, tmp_path / "other", workers=1)
    with pytest.raises(ValueError, match="part 2 of 3 again, after"):
        merge((one, two, tmp_path / "other"), tmp_path / "out")
    with pytest.raises(ValueError, match="inputs, tokenizer or options differ from"):
        merge((one, tmp_path / "other", three), tmp_path / "out")
    with pytest.raises(ValueError, match="made with another part"):
        prepare(PrepareConfig((str(prepared / "in"),), valid_fraction=0.3, shard_tokens=2000), tmp_path / "other", workers=1)
    with pytest.raises(ValueError, match="5 files make at most 5 parts, got 6"):
        prepare(PrepareConfig((str(prepared / "in"),), part="1/6"), tmp_path / "six", workers=1)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "-1/2"])
def test_a_part_is_a_number_of_parts(text: str) -> None:
    with pytest.raises(ValueError, match="part must be number/parts"):
        Part.of(text)


def test_parts_share_out_the_bytes() -> None:
    class Sized:
        def __init__(self, size: int) -> None:
            self.size, self.where = size, "file"

    for sizes, parts in (([5, 1, 1, 1, 9], 3), ([0, 0, 0], 3), ([100, 1, 1], 2), ([1] * 10, 4), ([1, 1, 100], 3)):
        inputs = [Sized(size) for size in sizes]
        shares = [Part(n, parts).share(inputs) for n in range(1, parts + 1)]
        assert [source for share in shares for source in share] == inputs
        assert all(shares)


def test_what_a_merge_left_that_was_killed_at_its_end_goes_with_the_next(prepared: Path, tmp_path: Path) -> None:
    parts = [prepared / f"part{n}" for n in (1, 2, 3)]
    index = merge(parts, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "progress.json").write_bytes(index.dump())
    assert merge(parts, tmp_path) == index
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(({"part": part}, "part must be") for part in (2.1e16, [1.5, 2], [1], [1, 2, 3], [0, 3], [4, 3], [1, 2**60], "12", None)),
        ({"contents": 3}, "contents must be"),
        ({"valid_fraction": "x"}, "valid_fraction must be"),
        ({"valid inputs": None}, "valid inputs must be"),
    ],
    ids=str,
)
def test_an_index_that_is_not_of_a_part_is_refused(change: dict[str, Any], said: str, prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared / "part2", tmp_path / "part2")
    index = json.loads((tmp_path / "part2/index.json").read_text())
    (tmp_path / "part2/index.json").write_text(json.dumps(index | {"made_from": index["made_from"] | change}))
    with pytest.raises(ValueError, match=rf"part2/index\.json: not (the index of a part|an index of prepared data): {said}"):
        merge([prepared / "part1", tmp_path / "part2", prepared / "part3"], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
