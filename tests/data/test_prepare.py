"""Preparation: the right tokens, the same ones after any interruption, and no folder that is not what it seems."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from headmax import durable
from headmax.data import documents as documents_module
from headmax.data import encoder
from headmax.data import prepare as module
from headmax.data.documents import Options
from headmax.data.folder import FolderWriter, ShardWriter
from headmax.data.prepare import Done, PrepareConfig, prepare
from headmax.data.shards import Index, verify
from headmax.data.tokenizer import mistral
from tests.data.corpus import byte_level, documents, write

TEXTS = documents(40)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 5000)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    tokenizer = mistral().tokenizer
    tokenizer.encode_special_tokens = True
    return {text: [1, *tokenizer.encode(text, add_special_tokens=False).ids] for text in TEXTS}


def tokens(folder: Path, split: str = "train") -> list[int]:
    return [n for shard in Index.read(folder).splits[split] for n in np.fromfile(folder / f"{shard.name}.tokens", np.uint16).tolist()]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_folder_holds_every_document_with_its_beginning(tmp_path: Path, expected: dict[str, list[int]]) -> None:
    names = ("in/a.jsonl.zst", "in/b.txt", "c.parquet")
    inputs = [write(tmp_path / name, TEXTS[start : start + 15]) for name, start in zip(names, (0, 15, 30), strict=True)]
    told: list[Done] = []
    out = tmp_path / "out"
    index = prepare(PrepareConfig((str(tmp_path / "in"), str(inputs[2])), shard_tokens=4000), out, workers=2, report=told.append)
    assert tokens(out) == [n for text in TEXTS for n in expected[text]]
    assert index == Index.read(out) == verify(out)
    assert len(index.splits["train"]) > 2
    assert all(shard.tokens >= 4000 for shard in index.splits["train"][:-1])
    for shard in index.splits["train"]:
        starts, made = (np.fromfile(out / f"{shard.name}.{part}", t) for part, t in (("documents", np.int64), ("tokens", np.uint16)))
        assert starts.tolist() == np.flatnonzero(made == 1).tolist()
    assert (index.dtype, index.vocab_size, index.document_token, index.documents("train")) == ("uint16", 32_000, 1, len(TEXTS))
    assert told[-1] == (sum(path.stat().st_size for path in inputs), told[-1].bytes, index.tokens("train"), len(TEXTS), 0)
    assert AutoTokenizer.from_pretrained(out)(TEXTS[0])["input_ids"][:3] == expected[TEXTS[0]][:3]
    assert {file.suffix for file in out.iterdir()} == {".json", ".tokens", ".documents"}
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert prepare(PrepareConfig((str(tmp_path / "in"), str(inputs[2])), shard_tokens=4000), out) == index
    assert before == {file: file.stat().st_mtime_ns for file in out.iterdir()}


def test_a_document_read_in_parts_has_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = documents(1, lines=2000)[0]
    whole, parts = (PrepareConfig((str(write(tmp_path / "a.txt", [text, "short"])),), shard_tokens=9000) for _ in range(2))
    prepare(whole, tmp_path / "whole", workers=1)
    monkeypatch.setattr(documents_module, "MAX_TEXT", 20_000)
    prepare(parts, tmp_path / "parts", workers=1)
    assert tokens(tmp_path / "whole") == tokens(tmp_path / "parts")
    assert len(Index.read(tmp_path / "parts").splits["train"]) > len(Index.read(tmp_path / "whole").splits["train"])
    assert Index.read(tmp_path / "parts").documents("train") == 2


def test_another_tokenizer_and_wide_ids(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json")
    definition = json.loads(path.read_text())
    definition["model"]["vocab"] |= {f"<{n}>": n for n in range(400, 2**16 + 1)}
    path.write_text(json.dumps(definition))
    write(tmp_path / "a.txt", TEXTS[:3])
    config = PrepareConfig((str(tmp_path / "a.txt"),), tokenizer=str(path), document_token="<|endoftext|>")
    with pytest.raises(ValueError, match="document_token: the tokenizer puts no token"):
        prepare(replace(config, document_token=None), tmp_path / "out")
    index = prepare(config, tmp_path / "out", workers=1)
    assert (index.dtype, index.document_token) == ("uint32", 0)
    assert index.vocab_size == 1 + max(AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab().values())
    assert (tmp_path / "out/train-00000.tokens").stat().st_size == 4 * index.tokens("train")


def test_held_out_documents(tmp_path: Path, expected: dict[str, list[int]]) -> None:
    many = write(tmp_path / "a.jsonl", TEXTS * 2)
    prepare(PrepareConfig((str(many),), valid_fraction=0.3, shard_tokens=3000), tmp_path / "share", workers=2)
    train, valid = (
        {text for text in TEXTS if str(expected[text])[1:-1] in str(tokens(tmp_path / "share", split))} for split in ("train", "valid")
    )
    assert len(train) + len(valid) == len(TEXTS)
    assert not train & valid
    assert 4 < len(valid) < 20
    prepare(PrepareConfig((str(many),), valid=(str(write(tmp_path / "v.txt", TEXTS[:2])),)), tmp_path / "other", workers=1)
    assert tokens(tmp_path / "other", "valid") == [n for text in TEXTS[:2] for n in expected[text]]
    assert Index.read(tmp_path / "other").documents("train") == 80


def test_it_stops_at_a_number_of_tokens_and_does_not_go_on_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PrepareConfig((str(write(tmp_path / "a.jsonl", TEXTS)),), max_tokens=5000)
    index = prepare(config, tmp_path / "out", workers=2)
    assert 5000 <= index.tokens("train") < 8500

    def killed(self: FolderWriter) -> Index:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FolderWriter, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, tmp_path / "again", workers=1)
    assert prepare(config, tmp_path / "again", workers=1) == index


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": ()}, "name at least one"),
        ({"valid_fraction": 1.0}, "valid_fraction must be at least 0 and below 1, got 1.0"),
        ({"valid_fraction": 0.1, "valid": ("b",)}, "exclude each other"),
        ({"shard_tokens": 0}, "shard_tokens must be at least 1, got 0"),
        ({"options": Options(separator=" ")}, "separator and text_key must not be empty"),
    ],
)
def test_a_recipe_that_cannot_be(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(PrepareConfig(("a.txt",)), **change)


def test_workers_are_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        prepare(PrepareConfig((str(write(tmp_path / "a.txt", TEXTS)),)), tmp_path / "out", workers=0)


def test_nothing_to_train_or_to_validate_on(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    one = str(write(tmp_path / "one.txt", ["one"]))
    with pytest.raises(ValueError, match="no documents for training in"):
        prepare(PrepareConfig((str(tmp_path / "empty.txt"),)), tmp_path / "out", workers=1)
    with pytest.raises(ValueError, match="no documents for validation in"):
        prepare(PrepareConfig((one,), valid_fraction=1e-9), tmp_path / "out", workers=1)
    with pytest.raises(ValueError, match=r"one\.txt: given for training and for validation; choose one"):
        prepare(PrepareConfig((one,), valid=(one,)), tmp_path / "out", workers=1)
    assert prepare(PrepareConfig((one,)), tmp_path / "out", workers=1).documents("train") == 1


def interrupt(config: PrepareConfig, out: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Prepares until the third shard is begun."""
    with monkeypatch.context() as patch:
        add = ShardWriter.add

        def fail(self: ShardWriter, *arguments: np.ndarray) -> None:
            add(self, *arguments)
            if self.name == "train-00002":
                raise error

        patch.setattr(ShardWriter, "add", fail)
        prepare(config, out, workers=1)


def test_a_full_disk_is_said_and_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PrepareConfig((str(write(tmp_path / "a.jsonl", TEXTS)),), valid_fraction=0.1, shard_tokens=3000)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="out: cannot be written to: No space left on device; complete shards are kept, rerun to resume"):
        interrupt(config, out, monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(ValueError, match="incomplete; rerun the same `headmax data prepare`"):
        Index.read(out)
    first = (out / "train-00000.tokens").stat().st_mtime_ns
    told: list[Done] = []
    prepare(config, out, workers=2, report=told.append)
    assert told[0].tokens > told[0].earlier > 6000
    assert (out / "train-00000.tokens").stat().st_mtime_ns == first
    prepare(config, tmp_path / "undisturbed", workers=1)
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_a_folder_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PrepareConfig((str(write(tmp_path / "a.jsonl", TEXTS)),), shard_tokens=3000)
    half, done = tmp_path / "half", tmp_path / "done"
    with pytest.raises(KeyboardInterrupt):
        interrupt(config, half, monkeypatch, KeyboardInterrupt())
    prepare(config, done, workers=2)
    others = {
        "inputs": replace(config, inputs=(str(write(tmp_path / "b.jsonl", TEXTS)),)),
        "tokenizer, document token": replace(config, tokenizer=str(byte_level(tmp_path / "t.json")), document_token="<|endoftext|>"),
        "document token": replace(config, document_token="</s>"),
        "text key": replace(config, options=Options(text_key="body")),
        "valid fraction, shard tokens": replace(config, valid_fraction=0.5, shard_tokens=1000),
    }
    for folder in (half, done):
        before = contents(folder)
        for name, other in others.items():
            with pytest.raises(ValueError, match=f"made with another {name}; restore it, or choose another folder"):
                prepare(other, folder)
        assert contents(folder) == before
    (half / "train-00000.tokens").unlink()
    with pytest.raises(ValueError, match=r"train-00000\.tokens: missing, the index says"):
        prepare(config, half)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="mine: holds other files; choose a new or empty folder"):
        prepare(config, tmp_path / "mine")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file: a file, where a folder is to be written"):
        prepare(config, tmp_path / "file")


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    config = PrepareConfig((str(write(tmp_path / "a.jsonl", TEXTS)),))
    with durable.sole_user(tmp_path / "out"), pytest.raises(ValueError, match="out: another process is writing to it"):
        prepare(config, tmp_path / "out")


def test_where_there_are_no_locks_it_warns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(durable.fcntl, "flock", no_locks)
    with durable.sole_user(tmp_path / "out"):
        pass
    assert "out: cannot be locked (No locks available): see that no other process writes to it" in caplog.text


def test_an_encoding_process_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "encoder.py").write_text("import sys; sys.exit(7)")
    monkeypatch.setattr(encoder, "__file__", str(tmp_path / "encoder.py"))
    with pytest.raises(ValueError, match="an encoding process exited with code 7"):
        prepare(PrepareConfig((str(write(tmp_path / "a.jsonl", TEXTS)),)), tmp_path / "out", workers=1)


def encoders_of(folder: Path) -> list[int]:
    """Encoding processes that work for a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder / "tokenizer.json").encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def kill_and_go_on(tmp_path: Path, kills: int, seed: int) -> None:
    """Real processes, real kills, each at a moment of its own after at least one more shard; the result is that of no kill."""
    config = PrepareConfig((str(write(tmp_path / "a.jsonl.xz", documents(200 * kills))),), valid_fraction=0.05, shard_tokens=5000)
    code = "import sys, pathlib, headmax.data.prepare as module; from headmax.data.prepare import *; module.BLOCK = 5000;"
    code += f"prepare(PrepareConfig({config.inputs}, valid_fraction=0.05, shard_tokens=5000), pathlib.Path(sys.argv[1]), workers=2)"
    draw, out = random.Random(seed), tmp_path / "killed"
    shards = 0
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", code, str(out)])
        while process.poll() is None and len(list(out.glob("train-*.documents"))) <= shards:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.1)
        assert process.poll() is None, "it was done before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        shards = len(list(out.glob("train-*.documents")))
        with pytest.raises(ValueError, match="incomplete; rerun"):
            Index.read(out)
    limit = time.monotonic() + 10
    while encoders_of(out) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not encoders_of(out), "encoding processes outlive their parent"
    for folder in (out, tmp_path / "undisturbed"):
        prepare(config, folder, workers=2)
    assert verify(out).documents("train") + verify(out).documents("valid") == 200 * kills
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_killed_and_run_again_it_gives_the_same_folder(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, kills=2, seed=0)


@pytest.mark.slow
def test_killed_many_times_it_gives_the_same_folder(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, kills=12, seed=1)


def test_inputs_are_known_by_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (write(tmp_path / folder / "x.txt", [text * 2000]) for folder, text in (("a", "one "), ("b", "two ")))
    assert first.stat().st_size == second.stat().st_size
    out, config = tmp_path / "out", PrepareConfig((str(first),))
    prepare(config, out, workers=1)
    before = contents(out)
    with pytest.raises(ValueError, match=r"b/x\.txt: changed since .*out was made from it; restore it, or choose another folder"):
        prepare(PrepareConfig((str(second),)), out, workers=1)
    prepare(config, out, workers=1)
    assert contents(out) == before


@pytest.mark.parametrize("kind", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_an_input_edited_between_two_goes_is_noticed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = write(tmp_path / kind, TEXTS), tmp_path / "out"
    config = PrepareConfig((str(path),), shard_tokens=3000)
    with pytest.raises(KeyboardInterrupt):
        interrupt(config, out, monkeypatch, KeyboardInterrupt())
    whole = path.read_bytes()
    path.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
    with pytest.raises(ValueError, match=f"{kind}: changed since .* was made from it"):
        prepare(config, out, workers=1)
    path.write_bytes(whole)
    prepare(config, out, workers=1)
    prepare(config, tmp_path / "undisturbed", workers=1)
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_a_folder_made_before_inputs_were_hashed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, out = PrepareConfig((str(write(tmp_path / "a.txt", TEXTS)),)), tmp_path / "out"
    prepare(config, out, workers=1)
    fields = json.loads((out / "index.json").read_text())
    del fields["made_from"]["contents"]
    (out / "index.json").write_text(json.dumps(fields))
    assert prepare(config, out, workers=1).tokens("train") == verify(out).tokens("train")
    assert "prepared before inputs were hashed" in caplog.text


def test_what_can_never_be_complete_leaves_nothing_and_no_advice_to_repeat_it(tmp_path: Path) -> None:
    config = PrepareConfig((str(write(tmp_path / "a.txt", TEXTS)),), valid_fraction=1e-12, shard_tokens=3000)
    with pytest.raises(
        ValueError, match=r"no documents for validation in .*: a valid_fraction of 1e-12 leaves none of 40 documents; give a larger one"
    ):
        prepare(config, tmp_path / "out", workers=1)
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(ValueError, match="no prepared data "):
        Index.read(tmp_path / "out")
