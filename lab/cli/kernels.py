"""Whether kernels fit other cards."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from headmax.cli.options import Words, metavar, one_of

DTYPES = ("bfloat16", "float32")


def fit(capability: Annotated[Literal[80, 86, 89, 90, 100, 120], metavar("CAPABILITY")], /, dtypes: Words = DTYPES) -> None:
    """Compile the kernels for a GPU that is not at hand; exit code 1 if they do not fit.

    Args:
        capability: the GPU's compute capability, such as 89 for sm_89.
        dtypes: precisions of what is computed.
    """
    one_of("dtypes", dtypes, DTYPES)
    import torch

    from lab.bench.fit import check

    if not check(capability, [getattr(torch, name) for name in dtypes]):
        sys.exit(1)
