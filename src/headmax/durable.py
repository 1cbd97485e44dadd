"""Atomic writes of files and folders, durable across power failures; locks and ownership of output folders."""

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
"""Suffix of files and folders that are being written."""


class WriteError(OSError, ValueError):
    """A failed write, with its path and reason in one line."""

    def __str__(self) -> str:
        return f"{self.filename}: cannot be written to: {self.strerror}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns errors of the system and of safetensors into a `WriteError` that names `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error
    except SafetensorError as error:
        raise WriteError(errno.EIO, str(error), str(path)) from error


def write(path: Path, content: str | bytes) -> None:
    """Replaces a file atomically, and waits until it is on disk; on an error the old file stays."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file that replaces `path` atomically once it is on disk, and is removed on an error. Locks out other processes."""
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
    """A temporary folder that becomes `out`, which must be new or empty, once it is on disk; it is removed on an error."""
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
    """Appends all of `content` or nothing; several processes may share a file."""
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
    """Waits until everything written to the file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk, if the file system supports that."""
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
    """Recognises the output folders of a command by their contents."""

    content: str
    """For messages, such as "a training run"."""
    recognises: Callable[[Path], bool]


def claim(folder: Path, owner: Owner | None = None) -> None:
    """ValueError if a folder is not empty and not the owner's; call it before writing anything."""
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
    """ValueError if the output file is also an input, under any name or link."""
    with writing(out):
        refuse_special(out)
        for path in inputs:
            if path is not None and path.exists() and out.exists() and path.samefile(out):
                raise ValueError(f"{out}: read and to be written, which would destroy it; choose another file to write")


def refuse_special(out: Path) -> None:
    """ValueError if `out` cannot be a file: it is a folder, device or pipe, or below a file."""
    if out.is_dir():
        raise ValueError(f"{out}: a folder, where a file is to be written")
    if out.exists() and not out.is_file():
        raise ValueError(f"{out}: not a regular file; choose another file to write")
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ValueError(f"{out}: cannot be written to: {above} is not a folder")


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Creates the folder if necessary, and locks it against other processes; the system releases the lock of a killed process."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    """Locks a file or folder until the handle is closed; ValueError if another process has locked it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{path}: another process is writing to it") from error
    except OSError as error:  # file systems over a network may have no such locks
        logger.warning("%s: cannot be locked (%s): see that no other process writes to it", path, error.strerror)


def file_name(name: Any, where: object) -> str:
    """Returns `name` if it is a plain file name, without a path; an error begins with `where`, which contained it."""
    if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise ValueError(f"{where}: {name!r} is no name of a file beside it")
    return name


def read_text(path: Path, pipe: bool = False) -> str:
    """The text of a file in UTF-8, or of a `pipe`; errors are one line. Anything else, such as a device, may have no end."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir() or (pipe and path.is_fifo())):
            raise ValueError(f"{path}: not a regular file; give one to read")
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
    """The value of a JSON text; ValueError if it is invalid or nested too deep for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_json(path: Path, what: str = "a JSON object") -> dict[str, Any]:
    """The object in a JSON file; errors call it `what`."""
    text = read_text(path)
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: not {what}: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: not {what} but a {type(fields).__name__}")
    return fields
