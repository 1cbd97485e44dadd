"""The automatic prefix cache: states after texts that were read before, in a radix tree over tokens whose edges are whole chunks; kept in
device memory, then host memory, then a folder."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from headmax.generate.step import State
from headmax.serve.folder import Folder, nbytes

logger = logging.getLogger("headmax")

States = tuple[State, ...]


def chunks_of(tokens: Tensor, size: int) -> Iterator[bytes]:
    """Each whole chunk of tokens [n] as a key: its ids, 4 bytes each."""
    ids = tokens.numpy().astype(np.int32)
    for start in range(0, len(ids) - size + 1, size):
        yield ids[start : start + size].tobytes()


class Node:
    """A text of whole chunks, and the states after it if they are kept: in memory (`states`), in the folder (`saved`), or both."""

    __slots__ = ("children", "depth", "key", "parent", "saved", "states")

    def __init__(self, parent: Node | None, key: bytes) -> None:
        self.parent, self.key = parent, key
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, Node] = {}
        self.states: States | None = None
        self.saved = False

    @property
    def kept(self) -> bool:
        return self.states is not None or self.saved

    def tokens(self) -> np.ndarray:
        """The ids of the whole text."""
        keys, node = [], self
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return np.frombuffer(b"".join(reversed(keys)), dtype=np.int32)


class Match(NamedTuple):
    """What a tree knows of a text."""

    node: Node | None
    """The longest beginning with states, short of the text's last token."""
    common: int
    """Chunks that the text has in common with any other in the tree."""


class Tree:
    """Only paths to texts with states are kept."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.root = Node(None, b"")

    def match(self, tokens: Tensor) -> Match:
        """For a text [n], of which at least the last token is still to be read."""
        node, best = self.root, None
        for key in chunks_of(tokens, self.chunk):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            if node.kept and node.depth * self.chunk < len(tokens):
                best = node
        return Match(best, node.depth)

    def find(self, tokens: Tensor) -> Node | None:
        """The node of a text [whole chunks]."""
        node: Node | None = self.root
        for key in chunks_of(tokens, self.chunk):
            node = None if node is None else node.children.get(key)
        return node

    def grow(self, tokens: Tensor) -> Node:
        """The node of a text [whole chunks], made if it is not there."""
        if not len(tokens) or len(tokens) % self.chunk:
            raise ValueError(f"tokens must be whole chunks of {self.chunk} tokens, got {len(tokens)} tokens")
        node = self.root
        for key in chunks_of(tokens, self.chunk):
            if key not in node.children:
                node.children[key] = Node(node, key)
            node = node.children[key]
        return node

    def prune(self, node: Node) -> None:
        """Forgets the path to a node as far as no other text needs it."""
        while node.parent is not None and not node.children and not node.kept:
            del node.parent.children[node.key]
            node = node.parent


@dataclass
class Tier:
    """Memory of one kind; least recently used first out."""

    device: torch.device
    limit: int
    sizes: OrderedDict[Node, int] = field(default_factory=OrderedDict)
    used: int = 0

    def add(self, node: Node, size: int) -> None:
        self.sizes[node] = size
        self.used += size

    def remove(self, node: Node) -> bool:
        """Whether it was there."""
        size = self.sizes.pop(node, None)
        self.used -= size or 0
        return size is not None


class PrefixCache:
    """For one thread. States are never written to, so that any number of texts may go on from them."""

    def __init__(self, chunk: int, limits: dict[str, int], folder: Folder | None = None) -> None:
        """`limits` are bytes by device, such as {"cuda": 2**31, "cpu": 2**33}: what does not fit the first moves on to the next."""
        self.tree = Tree(chunk)
        self.tiers = [Tier(torch.device(device), limit) for device, limit in limits.items()]
        self.folder = folder
        self.on_disk: dict[str, Node] = {}
        self.counts: Counter[str] = Counter()
        """Those of `headmax.serve.metrics.COUNTS`."""
        for tokens in [] if folder is None else folder.scan():
            if len(tokens) % chunk == 0:
                self._mark_saved(self.tree.grow(torch.from_numpy(tokens)))

    @property
    def chunk(self) -> int:
        return self.tree.chunk

    def match(self, tokens: Tensor) -> Match:
        """What is known of a text [n]."""
        self._forget_gone()
        return self.tree.match(tokens)

    def fetch(self, node: Node) -> States | Future[States]:
        """A match's states on the device, or, where they lie in the folder alone, a promise of them for `arrived`."""
        if node.states is None:
            assert self.folder is not None
            return self.folder.load(node.tokens())
        tier = next(tier for tier in self.tiers if node in tier.sizes)
        tier.sizes.move_to_end(node)
        if tier.device != self.tiers[0].device:
            self._place(node, node.states)
        assert node.states is not None
        return _moved(node.states, self.tiers[0].device)

    def arrived(self, node: Node, promise: Future[States]) -> States | None:
        """What the folder had for a node, kept in memory from now on; None where it had nothing of use, which is not asked for again."""
        try:
            states = _moved(promise.result(), self.tiers[0].device)
        except Exception as error:  # a file that has gone or is damaged is a miss
            logger.warning("prefix folder: %s", " ".join(str(error).split())[:200])
            self.counts["failed_reads"] += 1
            self._lose(node)
            return None
        if node.states is None and node.saved:  # else it has been forgotten meanwhile
            self._place(node, states)
        return states

    def put(self, tokens: Tensor, states: States) -> None:
        """Keeps the states after a text [whole chunks]."""
        node = self.tree.grow(tokens)
        if node.states is None:
            self.counts["stores"] += 1
            if self.folder is not None and not node.saved and self.folder.save(node.tokens(), states):
                self._mark_saved(node)
            self._place(node, states)
        self.tree.prune(node)

    def has(self, tokens: Tensor) -> bool:
        """Whether the states after a text [whole chunks] are kept."""
        node = self.tree.find(tokens)
        return node is not None and node.kept

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()

    def _place(self, node: Node, states: States) -> None:
        """Into the first tier that can hold them at all; those that must make room move one tier on."""
        for tier in self.tiers:
            tier.remove(node)
        node.states, size = None, nbytes(states) + 4 * node.depth * self.chunk
        for n, tier in enumerate(self.tiers):
            if size > tier.limit:
                continue
            node.states = _moved(states, tier.device)
            tier.add(node, size)
            self._shrink(n)
            return

    def _shrink(self, n: int) -> None:
        tier = self.tiers[n]
        while tier.used > tier.limit:
            node, size = next(iter(tier.sizes.items()))
            tier.remove(node)
            if n + 1 < len(self.tiers) and size <= self.tiers[n + 1].limit and node.states is not None:
                node.states = _moved(node.states, self.tiers[n + 1].device)
                self.tiers[n + 1].add(node, size)
                self._shrink(n + 1)
            else:
                node.states = None
                self.counts["evictions"] += 1
                self.tree.prune(node)

    def _mark_saved(self, node: Node) -> None:
        assert self.folder is not None
        node.saved = True
        self.on_disk[self.folder.name(node.tokens())] = node

    def _lose(self, node: Node) -> None:
        assert self.folder is not None
        if node.saved:
            self.on_disk.pop(self.folder.name(node.tokens()), None)
            node.saved = False
            self.tree.prune(node)

    def _forget_gone(self) -> None:
        for name in [] if self.folder is None else self.folder.take_gone():
            if name in self.on_disk:
                self._lose(self.on_disk[name])


def _moved(states: States, device: torch.device) -> States:
    return tree_map_only(Tensor, lambda x: x.to(device), states)
