"""Nothing is lost, nothing is half written: outputs against inputs, other people's folders, and a disk with no room left."""

import contextlib
import json
import resource
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headmax import durable, records
from headmax.analysis.style import save as save_figure
from headmax.analysis.style import subplots
from headmax.cli.generate import generate
from headmax.cli.inspect import inspect
from headmax.demo import recall as demo
from headmax.eval.requests import Request
from headmax.eval.requests import write as write_requests
from headmax.eval.run import Settings
from headmax.eval.terminal import Place
from headmax.eval.terminal import run as evaluate
from headmax.models.convert import from_fla, write_folder
from headmax.train import TrainConfig, checkpoint
from headmax.train.export import to_hf
from headmax.train.loading import load_model
from tests.generate.checkpoint import make_model, save
from tests.train.small import train


@contextlib.contextmanager
def no_room(most: int = 100) -> Iterator[None]:
    """No file may grow beyond so many bytes: what a full disk is to a process, without a disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(folder, max_steps=2)
    return folder


def test_a_run_keeps_out_of_folders_that_are_no_runs(model: Path, run: Path, tmp_path: Path) -> None:
    before = contents(model)
    with pytest.raises(ValueError, match=r"holds other files; choose a new or empty folder, or one with a run of headmax train"):
        train(model, max_steps=1)
    assert contents(model) == before
    shutil.copytree(run, tmp_path / "run")
    train(tmp_path / "run", max_steps=3)
    (tmp_path / "run/config.json").unlink()  # as if it had been killed before its first line
    train(tmp_path / "run", max_steps=3)


def test_evaluations_and_pictures_keep_out_of_folders_of_others(model: Path, tmp_path: Path) -> None:
    before = contents(model)
    with pytest.raises(ValueError, match="holds other files; choose a new or empty folder, or one with an earlier evaluation"):
        evaluate(Place(model, model, model), "mqar", Settings(), "requests", None, None, None, None)
    with pytest.raises(ValueError, match="holds other files; choose a new or empty folder, or one with only pictures and records"):
        save_figure(subplots(figsize=(2, 2))[0], model, "curves")
    with pytest.raises(ValueError, match=r"not a file of records"):
        evaluate(Place(model, model, tmp_path / "work"), "mqar", Settings(), "requests", model / "config.json", None, None, None)
    assert contents(model) == before
    for _ in range(2):
        evaluate(Place(model, model, tmp_path / "work"), "mqar_4", Settings(limit=1), "requests", None, None, None, None)
    assert (tmp_path / "work/requests.jsonl").is_file()


def test_a_demo_removes_no_folder_of_another(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files; choose a new or empty folder, or one with an earlier demo"):
        demo.run(seed=0, heads=2, pairs=2, key=4, steps=1, out=tmp_path, record=None)
    assert (tmp_path / "plain/thesis.txt").read_text() == "mine"


def test_an_output_that_is_an_input_is_refused(model: Path, tmp_path: Path) -> None:
    text, link = tmp_path / "x.txt", tmp_path / "link.html"
    text.write_text("<!doctype html> a text")
    link.symlink_to(text)
    for out in (text, link):
        with pytest.raises(ValueError, match="read and to be written, which would destroy it"):
            inspect(str(model), file=text, out=out)
    with pytest.raises(ValueError, match="exists and is not an HTML page"):
        inspect(str(model), prompt="x", out=model / "config.json")
    with pytest.raises(ValueError, match="there already, and no prefix"):
        generate(str(model), prompt="x", save_prefix=model / "model.safetensors", device="cpu")
    with pytest.raises(ValueError, match="a folder, where a file is to be written"):
        inspect(str(model), prompt="x", out=tmp_path)
    assert text.read_text() == "<!doctype html> a text"
    assert json.loads((model / "config.json").read_text())["model_type"] == "headmax"


def test_a_text_that_is_none_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8: byte 0xf6 at 2"):
        generate(str(model), file=tmp_path / "latin.txt", device="cpu")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        inspect(str(model), file=tmp_path, out=tmp_path / "r.html")
    with pytest.raises(ValueError, match="cannot be written to: File name too long"):
        inspect(str(model), prompt="x", out=tmp_path / ("x" * 300))


def write_twice(write: Callable[[Path], object], path: Path) -> None:
    """Fails where there is no room and leaves nothing; then there is room, and the same works."""
    with no_room(), pytest.raises(ValueError, match=r"cannot be written to: .*File too large"):
        write(path)
    assert not list(path.parent.iterdir())
    write(path)
    assert path.exists()


def test_without_room_nothing_is_left_and_the_next_try_works(run: Path, tmp_path: Path) -> None:
    def figure(path: Path) -> None:
        save_figure(subplots(figsize=(2, 2))[0], path.parent, path.stem)

    record = records.Recorder("s", "cpu")("c" * 100, "headmax", "m", 1.0, "u")
    writers: dict[str, Callable[[Path], object]] = {
        "page.html": lambda path: durable.write(path, "x" * 1000),
        "picture.png": figure,
        "records.jsonl": lambda path: records.append(path, [record]),
        "requests.jsonl": lambda path: write_requests(path, {"task": [Request("generate", tuple(range(100)))]}),
        "hf": lambda path: to_hf(run, path),
        "fla": lambda path: write_folder(path, {}, load_model(run).state_dict(), tmp_path),
    }
    for name, write in writers.items():
        place = tmp_path / f"for-{name}"
        place.mkdir()
        if name == "records.jsonl":
            with no_room(), pytest.raises(ValueError, match="File too large"):
                write(place / name)
            assert (place / name).stat().st_size == 0
            write(place / name)
            assert list(records.read(place / name)) == [record]
        else:
            write_twice(write, place / name)


def test_a_prefix_without_room(tmp_path: Path) -> None:
    from headmax.generate import Engine

    prefix = Engine(make_model(), max_batch=1).prefill([3, 4, 5])
    (tmp_path / "p").mkdir()
    write_twice(prefix.save, tmp_path / "p/prefix")
    prefix.save(tmp_path / "p/prefix")


def test_what_a_killed_process_left_does_not_block_the_next(tmp_path: Path) -> None:
    (tmp_path / ".out.tmp/rest").mkdir(parents=True)
    with durable.new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
    assert contents(tmp_path) == {"out/a": b"a"}
    with pytest.raises(ValueError, match="is not empty: give a new folder"), durable.new_folder(tmp_path / "out"):
        raise AssertionError
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/out: cannot be written to: .*file is not a folder"):
        durable.write(tmp_path / "file/out", "x")


def test_two_processes_do_not_mix_what_they_write(tmp_path: Path) -> None:
    with durable.replacing(tmp_path / "file") as first:
        first.write(b"first")
        first.flush()
        with pytest.raises(ValueError, match="file: another process is writing to it"):
            durable.write(tmp_path / "file", "second")
    assert contents(tmp_path) == {"file": b"first"}


def test_pictures_go_beside_a_picture_that_a_killed_process_left(tmp_path: Path) -> None:
    (tmp_path / "curves.png.tmp").write_bytes(b"half")
    save_figure(subplots(figsize=(2, 2))[0], tmp_path, "curves")
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "curves.svg"}


def test_records_go_behind_records_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}\n")
    with pytest.raises(ValueError, match=r"config\.json: not a file of records"):
        records.append(tmp_path / "config.json", [])
    assert (tmp_path / "config.json").read_text() == "{}\n"


@pytest.mark.parametrize("name", ["../x", "/x", "..", "", "a/b", "a\\b", 3])
def test_a_name_stays_in_its_folder(name: object) -> None:
    with pytest.raises(ValueError, match="is no name of a file beside it"):
        durable.file_name(name, "index.json")


def test_a_manifest_that_names_files_elsewhere(run: Path, tmp_path: Path) -> None:
    (folder,) = checkpoint.list_checkpoints(run / "checkpoints")
    copy = shutil.copytree(folder, tmp_path / folder.name)
    assert checkpoint.problem(copy) is None
    manifest = json.loads((copy / "manifest.json").read_text())
    (tmp_path / "outside").write_bytes(b"")
    for files in (manifest["files"] | {"../outside": {"size": 0}}, {}, [], manifest["files"] | {".": {"size": copy.stat().st_size}}):
        (copy / "manifest.json").write_text(json.dumps({"files": files}))
        assert checkpoint.problem(copy)


def test_numbers_that_would_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="seed must be at most 1000000000000000000"):
        TrainConfig(seed=10**30)
    with pytest.raises(ValueError, match="token_budget must be at most"):
        TrainConfig(token_budget=10**30)
    with pytest.raises(ValueError, match=r"--seed must be in \[0, 2\^63\)"):
        Settings(seed=10**30)


def test_convert_names_a_torn_file_before_it_writes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/config.json").write_text("{}")
    (tmp_path / "in/model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
        from_fla(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_written_may_go_back_and_mend(tmp_path: Path) -> None:
    """As zip files do, and in the place of what a killed process has left."""
    (tmp_path / "made.zip.tmp").write_bytes(b"left over" * 100)
    with durable.replacing(tmp_path / "made.zip") as file, zipfile.ZipFile(file, "w") as made:
        made.writestr("name", "content")
    with zipfile.ZipFile(tmp_path / "made.zip") as read:
        assert read.read("name") == b"content"
    assert [path.name for path in tmp_path.iterdir()] == ["made.zip"]


ALLOWED = {"durable.py", "models/convert.py", "train/export.py", "bench/timing.py", "models/configuration.py"}
"""The one that writes, those that fill `durable.new_folder`, /proc, and an extension of transformers' own method."""


def test_every_file_is_written_by_one_function() -> None:
    source, lab = Path(durable.__file__).parent, Path(__file__).parents[1] / "lab"
    calls = (".write_text(", ".write_bytes(", "save_file(", ".save_pretrained(", 'open("w', "shutil.copy", "np.save")
    found = {
        f"{path.relative_to(root)}: {call}"
        for root in (source, lab)
        for path in root.rglob("*.py")
        for call in calls
        if call in path.read_text() and str(path.relative_to(root)) not in ALLOWED
    }
    aside = {"data/documents.py: shutil.copy", "data/parts.py: shutil.copy", 'data/folder.py: open("w', "study/needles.py: np.save"}
    passing = {"bench/serve.py: .save_pretrained(", "pages/site_hooks.py: .write_text("}  # a temporary folder, the site's
    passing |= {"bench/endure.py: .save_pretrained(", "bench/endure.py: .write_text("}  # temporary too
    assert found == aside | passing
