"""How a server is set up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headmax.ops.packing import LONG_CHUNK


@dataclass(frozen=True)
class ServerConfig:
    name: str
    """What requests call the model."""
    max_batch: int = 16
    """Choices that are generated at a time."""
    max_length: int = 32768
    """Most tokens of a text, prompt included."""
    queue: int = 256
    """Most prompts that wait for a slot; more are answered with 503."""
    chunk: int = 256
    """Tokens after which states are kept, counted from a text's start."""
    piece: int = 1024
    """Most tokens of a prompt in one pass, and of all between two steps; a chunk at least."""
    prefix_cache: int = 2 * 2**30
    """Bytes of states in device memory, 0 for no prefix cache."""
    prefix_cache_host: int = 0
    """Bytes beside them in host memory, where the model runs on a GPU."""
    prefix_folder: Path | None = None
    """Where states are kept across restarts."""
    prefix_folder_size: int = 16 * 2**30
    """Bytes of them."""
    deterministic: bool = False
    """Whether a request gives the same bits alone, in any batch, after a prefix hit or not."""
    api_key: str | None = None
    """What callers must show, if anything."""
    timeout: float = 600.0
    """Seconds that a request may take, waiting included."""
    body_timeout: float = 30.0
    """Seconds in which its body must have come."""
    max_body: int = 8 * 2**20
    """Bytes of a body."""
    drain: int = 60
    """Seconds that requests under way have to end after SIGTERM."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_length", "queue", "piece", "max_body", "prefix_folder_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("prefix_cache", "prefix_cache_host", "drain"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.api_key == "":
            raise ValueError("api_key is empty: leave it out for a server that is open to all")
        if self.chunk < 1 or self.chunk % LONG_CHUNK:
            raise ValueError(f"chunk must be a multiple of {LONG_CHUNK}, the longest chunk of the recurrences, got {self.chunk}")
        if self.prefix_folder is not None and not self.prefix_cache:
            raise ValueError("prefix_folder needs prefix_cache: what is read from it is kept there")
