"""Documents out of every kind of file and out of hub datasets, and what is said of a bad one."""

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headmax.data import documents as module
from headmax.data.documents import HubInput, Options, Text, find
from tests.data.corpus import documents, write

datasets, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
TEXTS = documents(30)


def whole(texts: Iterator[Text]) -> list[str]:
    """The documents, with parts joined."""
    made: list[str] = []
    for text in texts:
        made = [*made, text.text] if text.starts else [*made[:-1], made[-1] + text.text]
    return made


@pytest.mark.parametrize("packed", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".parquet"])
def test_every_kind_gives_its_documents_and_goes_on_from_any(kind: str, packed: str, tmp_path: Path) -> None:
    (source,) = find([str(write(tmp_path / f"a{kind}{packed}", TEXTS))], Options())
    texts = list(source.read())
    assert [text.text for text in texts] == TEXTS
    assert source.size == texts[-1].position == (tmp_path / f"a{kind}{packed}").stat().st_size
    for number in (1, 17, 30):
        state = json.loads(json.dumps(texts[number - 1].state))
        assert list(source.read(state)) == texts[number:]


def test_documents_of_a_txt(tmp_path: Path) -> None:
    def read(content: str, separator: str = "<|doc|>") -> list[str]:
        (tmp_path / "a.txt").write_bytes(content.encode())
        (source,) = find([str(tmp_path / "a.txt")], Options(separator=separator))
        return whole(source.read())

    assert read("one\n\nstill one") == ["one\n\nstill one"]
    assert read("<|doc|>\none\n<|doc|>\n\n\n<|doc|>\ntwo\n<|doc|>") == ["one", "two"]
    assert read("one <|doc|>\n<|doc|> two\n") == ["one <|doc|>\n<|doc|> two"]
    assert read("one\r\nline\r\n<|doc|>\r\ntwo\r\n") == ["one\nline", "two"]
    assert read("one\n---\ntwo", separator="---") == ["one", "two"]
    assert read("") == read("\n \n") == []


@pytest.mark.parametrize("content", ["line of text\n\n" * 3000, "no end of line " * 3000, "\n" * 9000 + "x" * 9000 + "\n" * 9000 + "y\n"])
def test_a_document_too_long_to_hold_comes_in_parts(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEXT", 2000)
    (tmp_path / "a.txt").write_text(f"{content}\n<|doc|>\nшорт")
    (source,) = find([str(tmp_path / "a.txt")], Options())
    texts = list(source.read())
    assert len(texts) > 3
    assert max(len(text.text) for text in texts) <= 4001
    assert whole(iter(texts))[1:] == ["шорт"]
    if not content.startswith("\n"):  # parts of nothing but newlines are left out
        assert whole(iter(texts))[0] == content.strip("\n")
    assert list(source.read(texts[2].state)) == texts[3:]


def test_a_folder_gives_its_files_by_name(tmp_path: Path) -> None:
    for name in ("b/2.jsonl.gz", "a.txt", "b/1.parquet"):
        write(tmp_path / name, [f"in {name}"])
    (tmp_path / "README.md").write_text("not read")
    found = find([str(tmp_path)], Options())
    assert [source.identity["name"] for source in found] == ["a.txt", "b/1.parquet", "b/2.jsonl.gz"]
    assert [text.text for source in found for text in source.read()] == ["in a.txt", "in b/1.parquet", "in b/2.jsonl.gz"]


def cut_short(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    """Its documents would be among those to train on and those to validate on."""
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder/a.jsonl", TEXTS)
    (tmp_path / "folder/b.jsonl").hardlink_to(tmp_path / "folder/a.jsonl")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "folder/a.jsonl")
    one = str(tmp_path / "folder/a.jsonl")
    for names in ([one, one], [one, str(tmp_path / "c.jsonl")], [str(tmp_path / "folder")]):
        with pytest.raises(ValueError, match=r"the same file as .*a\.jsonl; give it once"):
            find(names, Options())


def test_what_leads_nowhere_is_not_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "not mounted")
    with pytest.raises(ValueError, match=r"b\.jsonl: not a regular file, or a link that leads to none"):
        find([str(tmp_path)], Options())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n{"body": "x", "id": 3}\n', r"a\.jsonl:3: no field 'text'; it has 'body', 'id'"),
        ("a.jsonl", b'{"text": null}\n', r"a\.jsonl:1: the text must be a string, got NoneType"),
        ("a.jsonl", b'["x"]\n', r"a\.jsonl:1: not a JSON object but list"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: not Unicode: half a surrogate pair at character 0"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', r"a\.jsonl:2: not UTF-8: byte 0xff"),
        ("a.txt", b"one\ntwo\xe4", r"a\.txt:2: not UTF-8: byte 0xe4"),
        ("a.jsonl.gz", cut_short(gzip.compress(LINES)), r"a\.jsonl\.gz: line \d+: cannot be read: Compressed file ended"),
        ("a.jsonl.gz", damaged(gzip.compress(LINES)), r"a\.jsonl\.gz(: line |:)\d+: "),
        ("a.jsonl.gz", LINES, r"a\.jsonl\.gz: line 1: cannot be read: Not a gzipped file"),
        ("a.jsonl.xz", cut_short(lzma.compress(LINES)), r"a\.jsonl\.xz: line \d+: cannot be read: Compressed file ended"),
        ("a.jsonl.xz", damaged(lzma.compress(LINES)), r"a\.jsonl\.xz: line \d+: cannot be read: "),
        ("a.jsonl.zst", cut_short(pa.compress(LINES, "zstd", asbytes=True)), r"a\.jsonl\.zst: line \d+: cannot be read: Truncated"),
        ("a.jsonl.zst", LINES, r"a\.jsonl\.zst: line 1: cannot be read: ZSTD decompress failed"),
        ("a.parquet", LINES, r"a\.parquet: not a Parquet file: "),
        ("a.parquet.xz", LINES, r"a\.parquet\.xz: cannot be decompressed: "),
    ],
)
def test_a_bad_input_is_named_with_its_line(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (source,) = find([str(tmp_path / name)], Options())
    with pytest.raises(ValueError, match=said) as raised:
        list(source.read())
    assert len(str(raised.value).splitlines()) == 1


def test_a_table_without_the_column(tmp_path: Path) -> None:
    (source,) = find([str(write(tmp_path / "a.parquet", TEXTS, key="content"))], Options())
    with pytest.raises(ValueError, match="no column 'text'; it has id, content"):
        list(source.read())
    (source,) = find([str(tmp_path / "a.parquet")], Options(text_key="content"))
    assert [text.text for text in source.read()] == TEXTS


def test_names_that_stand_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").touch()
    for name, said in (("a.pdf", "must end in one of .txt, .jsonl, .parquet"), (".", "no .txt, .jsonl, .parquet in this folder")):
        with pytest.raises(ValueError, match=said):
            find([str(tmp_path / name)], Options())
    for name in ("corpus/part.txt", "missing", "/a/b/c"):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            find([name], Options())


@pytest.fixture(params=["parquet", "json"])
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """`datasets.load_dataset` of any name streams three local files; the calls it got."""
    suffix = {"parquet": "parquet", "json": "jsonl"}[request.param]
    files = [str(write(tmp_path / f"{n}.{suffix}", TEXTS[10 * n : 10 * n + 10])) for n in range(3)]
    calls, load = [], datasets.load_dataset

    def local(name: str, configuration: str | None, *, split: str, streaming: bool) -> Any:
        calls.append((name, configuration, split, streaming))
        return load(request.param, data_files=files, split="train", streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", local)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return calls


def test_a_hub_dataset_is_streamed_and_goes_on_from_any_document(hub: list[tuple[Any, ...]]) -> None:
    (source,) = find(["hf:owner/name:small@validation"], Options())
    texts = list(source.read())
    assert hub == [("owner/name", "small", "validation", True)]
    assert [text.text for text in texts] == TEXTS
    assert source.size is None
    for number in (1, 10, 17, 29):
        again = [text.text for text in source.read(json.loads(json.dumps(texts[number - 1].state)))]
        assert again == TEXTS[number:]
    (plain,) = find(["cerebras/SlimPajama-627B"], Options())
    assert isinstance(plain, HubInput)
    next(plain.read())
    assert hub[-1] == ("cerebras/SlimPajama-627B", None, "train", True)
    with pytest.raises(ValueError, match="hf:owner/name: no field 'body'; it has id, text"):
        list(HubInput("owner/name", Options(text_key="body")).read())


@pytest.mark.parametrize(
    "raises", [ConnectionError("Couldn't reach it\nat all"), FileNotFoundError("no such dataset"), ValueError("bad split")]
)
def test_a_hub_that_cannot_be_reached(raises: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> Callable:
        raise raises

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match="hf:owner/name: cannot be streamed from the Hugging Face hub: ") as raised:
        list(HubInput("owner/name", Options()).read())
    assert len(str(raised.value).splitlines()) == 1
