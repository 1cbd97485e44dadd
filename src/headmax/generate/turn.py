"""One caller at a time on memory that many share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """Threads wait for each other. A thread that has the turn and asks for it again is told so: it would wait for itself."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holder: int | None = None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """For work on the shared memory."""
        if self.holder == threading.get_ident():
            raise RuntimeError("engine is busy: finish the call to `generate` or `forced` under way first, or use a second engine")
        with self.lock:
            self.holder = threading.get_ident()
            try:
                yield
            finally:
                self.holder = None

    @contextmanager
    def reentrant(self) -> Iterator[None]:
        """For work that leaves the shared memory alone, but not the device: also in a turn of the same thread."""
        if self.holder == threading.get_ident():
            yield
        else:
            with self.exclusive():
                yield
