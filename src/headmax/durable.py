"""Files and folders that are whole or not there, whenever the power goes; written by one process, and over nothing but its own."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

logger = logging.getLogger("headmax")

UNFINISHED = ".tmp"
"""Ends the name of what is being written."""


class WriteError(OSError, ValueError):
    """What could not be written, and why, in one line."""

    def __str__(self) -> str:
        return f"{self.filename}: cannot be written to: {self.strerror}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system or safetensors says of a failed write becomes a `WriteError` that names `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error
    except SafetensorError as error:
        raise WriteError(errno.EIO, str(error), str(path)) from error


def write(path: Path, content: str | bytes) -> None:
    """The whole content, on disk, in place of what was there before; or an error, and what was there before."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` once all of it is written and on disk, and goes if it cannot be; one process at a time."""
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(target.name + UNFINISHED)
    with writing(path):
        refuse_special(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(unfinished, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:  # kept until it is locked
            _lock(file.fileno(), path)
            if not (unfinished.exists() and os.path.samestat(os.fstat(file.fileno()), unfinished.stat())):
                raise ValueError(f"{path}: another process has just written it")
            with _removed_on_failure(unfinished):
                file.truncate(0)  # what a process that was killed has left
                yield file
                sync(file)
                unfinished.replace(target)
        sync_folder(target.parent)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that becomes `out`, which must be new or empty, once all of it is on disk, and goes if it cannot be."""
    target = Path(os.path.realpath(out))
    unfinished = target.with_name(f".{target.name}{UNFINISHED}")
    with writing(out):
        claim(out)
        with sole_user(unfinished), _removed_on_failure(unfinished):
            for left in unfinished.iterdir():  # by a process that was killed
                _remove(left)
            yield unfinished
            for path in unfinished.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            sync_folder(unfinished)
            unfinished.rename(target)
        sync_folder(target.parent)


def append(path: Path, content: bytes) -> None:
    """All of it behind what is there, or nothing; several processes may share a file."""
    with writing(path):
        refuse_special(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            before, left = file.seek(0, os.SEEK_END), memoryview(content)
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, before)
                raise


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(path)
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(file: IO) -> None:
    """What was written is on disk when this returns."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Names too must reach the disk, where the file system has a way to."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Owner:
    """Whose folder it is: what a command writes, recognised by what is always in it."""

    content: str
    """In words, such as "a training run"."""
    recognises: Callable[[Path], bool]


def claim(folder: Path, owner: Owner | None = None) -> None:
    """Raises where a folder holds anything and is not the owner's, before anything is written to it."""
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder}: a file, where a folder is to be written")
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        if not names or (owner is not None and owner.recognises(folder)):
            return
    if owner is None:
        raise ValueError(f"{folder} is not empty: give a new folder")
    raise ValueError(f"{folder}: holds other files; choose a new or empty folder, or one with {owner.content}")


def refuse_inputs(out: Path, *inputs: Path | None) -> None:
    """Raises where the file to be written is one of those that are read, by whatever name or link."""
    with writing(out):
        refuse_special(out)
        for path in inputs:
            if path is not None and path.exists() and out.exists() and path.samefile(out):
                raise ValueError(f"{out}: read and to be written, which would destroy it; choose another file to write")


def refuse_special(out: Path) -> None:
    """Raises where a file cannot be written, such as in place of a folder, a device or a pipe, or below a file."""
    if out.is_dir():
        raise ValueError(f"{out}: a folder, where a file is to be written")
    if out.exists() and not out.is_file():
        raise ValueError(f"{out}: not a regular file; choose another file to write")
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ValueError(f"{out}: cannot be written to: {above} is not a folder")


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps other processes from writing to it; a lock of the system's, which a killed process leaves free."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    """Until the handle is closed; ValueError where another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{path}: another process is writing to it") from error
    except OSError as error:  # file systems over a network may have no such locks
        logger.warning("%s: cannot be locked (%s): see that no other process writes to it", path, error.strerror)


def file_name(name: Any, where: object) -> str:
    """`name` as it is, if it names a file in the folder it is looked for in; `where` says who names it."""
    if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise ValueError(f"{where}: {name!r} is no name of a file beside it")
    return name


def read_text(path: Path) -> str:
    """The text of a file in UTF-8; one line says what is wrong with it."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}; give a text file in UTF-8"
        ) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: no such file") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error


def parse_json(text: str | bytes) -> Any:
    """What a JSON text holds; ValueError for any that holds nothing, also one nested too deep for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_json(path: Path, what: str = "a JSON object") -> dict[str, Any]:
    """The object in a JSON file, which is `what`."""
    text = read_text(path)
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: not {what}: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: not {what} but a {type(fields).__name__}")
    return fields
