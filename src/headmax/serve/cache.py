"""The automatic prefix cache: states after texts that were read before, in device memory, then host memory, then a folder."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from headmax.generate.step import State
from headmax.serve.folder import Folder
from headmax.serve.tree import Match, Node, Tree

logger = logging.getLogger("headmax")

States = tuple[State, ...]


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


def nbytes(states: States) -> int:
    """Memory of states."""
    sizes: list[int] = []
    tree_map_only(Tensor, lambda x: sizes.append(x.nbytes), states)
    return sum(sizes)


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
