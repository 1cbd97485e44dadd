"""A radix tree over tokens whose edges are whole chunks: which texts share a beginning, and where states of one are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from headmax.generate.step import State


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
        self.states: tuple[State, ...] | None = None
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
            raise ValueError(f"tokens must be whole chunks of {self.chunk}, got {len(tokens)}")
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
