"""Does something wait for the GPU?"""

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    with warnings.catch_warnings(action="ignore"):  # torch says that this mode does not find everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
