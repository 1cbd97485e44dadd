"""Modules that define the initial values of their parameters, alone or inside a Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Initialized(nn.Module):
    def initial_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """This module's own parameters, each with a fresh initial value."""
        yield from ()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for parameter, value in self.initial_parameters():
            parameter.copy_(value)
