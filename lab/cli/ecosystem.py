"""Other libraries' own tests, on headmax."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from headmax.cli.options import metavar

Checkout = Annotated[Path, metavar("CHECKOUT")]


def transformers(checkout: Checkout, /, only: str = "") -> None:
    """Run transformers' tests of a language model on every mixer, with and without gates.

    Args:
        checkout: transformers' repository at the installed version; the source distribution has only a part of tests/.
        only: run tests whose names match this expression of pytest's.
    """
    from lab.ecosystem.run import run_suite

    sys.exit(run_suite("transformers", checkout, only))


def fla(checkout: Checkout, /, only: str = "") -> None:
    """Run flash-linear-attention's tests of its ops on headmax's.

    Args:
        checkout: flash-linear-attention's repository at the installed version.
        only: run tests whose names match this expression of pytest's.
    """
    from lab.ecosystem.run import run_suite

    sys.exit(run_suite("fla", checkout, only))
