"""Files that are whole or not there, whenever the power goes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO


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
