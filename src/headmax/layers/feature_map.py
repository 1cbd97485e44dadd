"""Feature maps φ of plain linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

FeatureMap = Literal["identity", "relu", "elu", "silu", "softmax"]

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,
    "silu": F.silu,
    "softmax": lambda x: F.softmax(x, dim=-1).to(x.dtype),  # autocast widens it on a GPU
}
