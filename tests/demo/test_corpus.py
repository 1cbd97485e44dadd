"""Reading the corpus: which files count, which are held out, and the checksum."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headmax.demo.corpus import SKIPPED, Document, is_held_out, read, standard_library, to_json_lines
from tests.demo.small import make_corpus

SPLIT = {"os.py": False, "json/decoder.py": False, "argparse.py": True, "asyncio/locks.py": True}
"""Fixed for good: recorded results depend on the split."""


def write_modules(folder: Path, count: int = 10) -> set[str]:
    """The names of what it wrote."""
    names = {"argparse.py", *(f"module_{n}.py" for n in range(count))}
    for name in names:
        (folder / name).write_text(f"name = {name!r}\n")
    return names


def test_only_the_source_of_the_library_is_read(tmp_path: Path) -> None:
    names = write_modules(tmp_path)
    (tmp_path / "json").mkdir()
    (tmp_path / "json/decoder.py").write_bytes("s = '🙂'\r\n".encode())
    for folder in ("test", "json/tests", "site-packages/torch", "dist-packages", "__pycache__", "ensurepip/_bundled"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "skipped.py").write_text("skipped = 1\n")
    (tmp_path / "_sysconfigdata__linux.py").write_text("build_time_vars = {}\n")
    (tmp_path / "latin.py").write_bytes(b"s = '\xe9'\n")
    (tmp_path / "empty.py").write_text(" \n")
    (tmp_path / "module.pyc").write_bytes(b"\0")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    corpus = read(tmp_path, "Python 0")
    documents = {document.name: document.text for document in (*corpus.train, *corpus.valid)}
    assert set(documents) == {"json/decoder.py", *names}
    assert documents["json/decoder.py"] == "s = '🙂'\r\n"
    for part in (corpus.train, corpus.valid):
        assert [document.name for document in part] == sorted(document.name for document in part)
        assert all(is_held_out(document.name) is (part is corpus.valid) for document in part)


def test_a_file_stays_on_its_side_of_the_split(tmp_path: Path) -> None:
    assert {name: is_held_out(name) for name in SPLIT} == SPLIT
    write_modules(tmp_path)
    before = read(tmp_path, "Python 0")
    write_modules(tmp_path, 90)
    after = read(tmp_path, "Python 0")
    assert set(before.train) < set(after.train)
    assert set(before.valid) <= set(after.valid)


def test_the_checksum_is_that_of_names_and_texts(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write_modules(tmp_path / name)
    here, there = (read(tmp_path / name, "Python 0") for name in ("here", "there"))
    assert here.sha256 == there.sha256
    (tmp_path / "there/module_0.py").write_text("x = 1\n")
    assert here.sha256 != read(tmp_path / "there", "Python 0").sha256
    renamed = replace(here, train=(Document("other.py", here.train[0].text), *here.train[1:]))
    assert here.sha256 != renamed.sha256


def test_documents_survive_as_json_lines(tmp_path: Path) -> None:
    corpus = make_corpus()
    corpus.write(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "valid.jsonl").read_text().splitlines()]
    assert [Document(**line) for line in lines] == list(corpus.valid)
    odd = Document("odd.py", "\x00\x1b\u2028🙂\r\n")
    assert Document(**json.loads(to_json_lines([odd]))) == odd


def test_a_python_without_source_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "python311.zip"):
        with pytest.raises(ValueError, match="0 files of Python source, too few for the demo; use a Python whose standard library"):
            read(folder, "Python 0")


def test_this_python_has_its_library() -> None:
    corpus = standard_library()
    names = {document.name for document in (*corpus.train, *corpus.valid)}
    assert {"os.py", "json/decoder.py"} <= names
    assert not any(SKIPPED.intersection(name.split("/")) for name in names)
