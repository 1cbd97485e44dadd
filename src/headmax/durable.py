"""Files that are whole or not there, whenever the power goes, and folders with one process that writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

logger = logging.getLogger("headmax")


def write(path: Path, content: str | bytes) -> None:
    """The whole content, on disk, in place of what was there before; or an error, and what was there before."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        sync(file)
    unfinished.replace(path)
    sync_folder(path.parent)


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


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps other processes from writing to it; a lock of the system's, which a killed process leaves free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written to: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ValueError(f"{folder}: another process is writing to it") from error
    except OSError as error:  # file systems over a network may have no such locks
        logger.warning("%s: cannot be locked (%s): see that no other process writes to it", folder, error.strerror)
    try:
        yield
    finally:
        os.close(handle)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; ValueError names the file where it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
