"""Feature maps φ of plain linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

FeatureMap = Literal["identity", "relu", "elu", "silu", "softmax"]


def identity(x: Tensor) -> Tensor:
    return x


def elu(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1).to(x.dtype)  # autocast widens it on a GPU


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": identity,
    "relu": F.relu,
    "elu": elu,
    "silu": F.silu,
    "softmax": softmax,
}
"""Named functions: layers hold them, and pickle refuses a lambda."""
