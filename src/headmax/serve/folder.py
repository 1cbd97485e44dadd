"""States in a folder, one safetensors file each: written and read by a thread of its own, whole or not at all, across restarts."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils._pytree import tree_map_only

from headmax import durable
from headmax.generate.prefix import pack_states, state_shapes, unpack_states
from headmax.generate.step import State

logger = logging.getLogger("headmax")

FORMAT = "headmax snapshot 1"
MOST_WAITING = 2**30
"""Bytes of states that may wait to be written, in memory beside the cache's; more are not saved."""


def nbytes(states: Sequence[State]) -> int:
    """Memory of states."""
    sizes: list[int] = []
    tree_map_only(Tensor, lambda x: sizes.append(x.nbytes), tuple(states))
    return sum(sizes)


class Folder:
    """At most `limit` bytes of states, of one origin: a model, its precision and how it is run. Least recently used files go first."""

    def __init__(self, path: Path, limit: int, origin: str, like: Sequence[State]) -> None:
        """`like` are states after one token, for their shapes."""
        self.path, self.limit, self.origin, self.like = path, limit, origin, like
        self.lock = threading.Lock()
        self.sizes: OrderedDict[str, int] = OrderedDict()
        self.waiting = 0
        """Bytes that are to be written."""
        self.gone: list[str] = []
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(durable.sole_user(path))
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="headmax-prefix-folder")

    def name(self, tokens: np.ndarray) -> str:
        """The file of a text, by its content."""
        return hashlib.sha256(self.origin.encode() + tokens.astype(np.int32).tobytes()).hexdigest()[:40]

    @property
    def nbytes(self) -> int:
        with self.lock:
            return sum(self.sizes.values())

    def scan(self) -> Iterator[np.ndarray]:
        """The texts whose states are here, whole and of this origin, oldest first. Other files are left alone."""
        for left in self.path.glob(f"*.safetensors{durable.UNFINISHED}"):  # by a process that was killed
            left.unlink(missing_ok=True)
        files = sorted((file.stat().st_mtime_ns, file) for file in self.path.glob("*.safetensors") if file.is_file())
        for _, file in files:
            try:
                with safe_open(file, framework="np") as content:
                    if (content.metadata() or {}).get("origin") != self.origin:
                        continue
                    tokens = content.get_tensor("tokens")
                if tokens.ndim != 1 or not len(tokens) or self.name(tokens) != file.stem:
                    raise ValueError("its tokens are not those of its name")
            except Exception as error:  # whatever is wrong with a file that may hold anything
                logger.warning("%s: ignored, not whole: %s", file, " ".join(str(error).split())[:200])
                continue
            with self.lock:
                self.sizes[file.stem] = file.stat().st_size
            yield tokens
        self._shrink()

    def save(self, tokens: np.ndarray, states: Sequence[State]) -> bool:
        """Has states written, unless too many wait already; whether they will be."""
        size = nbytes(states)
        with self.lock:
            if self.waiting and self.waiting + size > MOST_WAITING:
                return False
            self.waiting += size
        self.thread.submit(self._write, tokens, states, size)
        return True

    def load(self, tokens: np.ndarray) -> Future[tuple[State, ...]]:
        """The states of a text, on the host; an error where they are not there, not whole or of other shapes."""
        return self.thread.submit(self._read, tokens)

    def take_gone(self) -> list[str]:
        """The names of files that have gone since this was last asked."""
        with self.lock:
            gone, self.gone = self.gone, []
        return gone

    def close(self) -> None:
        """Ends once everything is written."""
        self.thread.shutdown(wait=True)
        self.stack.close()

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"

    def _write(self, tokens: np.ndarray, states: Sequence[State], size: int) -> None:
        name = self.name(tokens)
        try:
            tensors = {"tokens": torch.from_numpy(tokens.astype(np.int32)), **pack_states(states)}
            content = save({key: x.cpu().contiguous() for key, x in tensors.items()}, {"format": FORMAT, "origin": self.origin})
            durable.write(self._file(name), content)
            with self.lock:
                self.sizes[name] = len(content)
                self.sizes.move_to_end(name)
            self._shrink()
        except Exception as error:  # a full disk must not end the thread, nor the server
            logger.warning("prefix folder: %s", " ".join(str(error).split())[:200])
            with self.lock:
                self.gone.append(name)
        finally:
            with self.lock:
                self.waiting -= size

    def _read(self, tokens: np.ndarray) -> tuple[State, ...]:
        file = self._file(self.name(tokens))
        try:
            with safe_open(file, framework="pt") as content:
                tensors = {key: content.get_tensor(key).clone() for key in content.keys()}  # noqa: SIM118 - the file may change later
            states = unpack_states(tensors, len(self.like))
            for state, like in zip(states, self.like, strict=True):
                expected = state_shapes(like, None if hasattr(like, "recurrent") else len(tokens))
                if state_shapes(state, None) != expected:
                    raise ValueError(f"states are {state_shapes(state, None)}, must be {expected}")
            if not np.array_equal(tensors["tokens"].numpy(), tokens):
                raise ValueError("its tokens are others")
            file.touch()
        except Exception:
            with self.lock:
                self.sizes.pop(file.stem, None)
            raise
        with self.lock:
            if file.stem in self.sizes:
                self.sizes.move_to_end(file.stem)
        return states

    def _shrink(self) -> None:
        with self.lock:
            while sum(self.sizes.values()) > self.limit:
                name, _ = self.sizes.popitem(last=False)
                self._file(name).unlink(missing_ok=True)
                self.gone.append(name)
