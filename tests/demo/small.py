"""A corpus of a few short modules, and a demo on it that takes a second."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from headmax.demo import code, outputs
from headmax.demo.corpus import Corpus, Document, is_held_out

STEPS = 5
HELD_OUT = ("argparse.py", "fnmatch.py")
"""By their names."""


def make_corpus(word: str = "value") -> Corpus:
    names = [*HELD_OUT, *(f"module_{n}.py" for n in range(20))]
    documents = [Document(name, make_module(n, word)) for n, name in enumerate(names)]
    train, valid = (tuple(d for d in documents if is_held_out(d.name) is wanted) for wanted in (False, True))
    assert tuple(document.name for document in valid) == HELD_OUT
    return Corpus("Python 0", train, valid)


def make_module(number: int, word: str) -> str:
    functions = [f"def read_{word}_{n}(path):\n    return open(path).read() * {number * n}\n" for n in range(20)]
    return "\n\n".join(["import os", *functions])


@contextlib.contextmanager
def small_batches() -> Iterator[pytest.MonkeyPatch]:
    """2 sequences of 32 tokens per step on one thread, and short continuations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "LENGTH", 32)
        patch.setattr(code, "BATCH", 2)
        patch.setattr(code, "NEW_TOKENS", 5)
        patch.setattr(outputs, "THREADS", 1)
        yield patch


def run(out: Path, *, seed: int = 0, steps: int = STEPS, record: Path | None = None, corpus: Corpus | None = None) -> str:
    """`headmax demo` on the small corpus; returns what it printed."""
    printed = io.StringIO()
    with small_batches(), contextlib.redirect_stdout(printed):
        code.run(seed=seed, steps=steps, out=out, record=record, corpus=corpus or make_corpus())
    return printed.getvalue()
