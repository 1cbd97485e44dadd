"""How a server is set up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headmax.ops.packing import LONG_CHUNK


@dataclass(frozen=True)
class ServerConfig:
    name: str
    """Model name in requests."""
    max_batch: int = 16
    """Maximum number of texts generated at the same time."""
    max_length: int = 32768
    """Maximum length of a text in tokens, prompt included."""
    queue: int = 256
    """Maximum number of waiting prompts; further requests get status 503."""
    chunk: int = 256
    """The prefix cache keeps states at multiples of this many tokens."""
    piece: int = 1024
    """Maximum number of prompt tokens read in one pass, and between two decoding steps; at least `chunk`."""
    prefix_cache: int = 2 * 2**30
    """Bytes of the prefix cache in device memory; 0 turns it off."""
    prefix_cache_host: int = 0
    """Further bytes in host memory, if the model runs on a GPU."""
    prefix_folder: Path | None = None
    """Folder that keeps states across restarts."""
    prefix_folder_size: int = 16 * 2**30
    """Maximum size of that folder in bytes."""
    deterministic: bool = False
    """Give a request the same bits alone, in any batch, and with or without a prefix hit."""
    api_key: str | None = None
    """Bearer token that clients must send, if any."""
    timeout: float = 600.0
    """Time limit of a request in seconds, waiting included."""
    body_timeout: float = 30.0
    """Time limit in seconds for receiving its body."""
    max_body: int = 8 * 2**20
    """Maximum size of a body in bytes."""
    drain: int = 60
    """Seconds that running requests have to finish after SIGTERM."""

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
