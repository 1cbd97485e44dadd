"""`python -m headmax` imports all of headmax, and so PyTorch, before its own first line: what must be in place by then."""

from __future__ import annotations

import sys
from types import TracebackType


def quiet(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Says nothing of an interruption, with which the process ends by SIGINT; all else as ever."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # while Python imports the package of `-m`
    sys.excepthook = quiet
