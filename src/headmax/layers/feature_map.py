"""Feature maps φ of plain linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

FeatureMap = Literal["identity", "relu", "elu", "silu", "softmax"]


def _identity(x: Tensor) -> Tensor:
    return x


def _elu(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1).to(x.dtype)  # autocast widens it on a GPU


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "relu": F.relu,
    "elu": _elu,
    "silu": F.silu,
    "softmax": _softmax,
}
"""Functions with names, so that a model can be pickled."""
