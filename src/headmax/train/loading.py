"""Loading a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headmax.generate import terminal
from headmax.models import HeadmaxForCausalLM


def is_run(source: Path) -> bool:
    return (source / "checkpoints").is_dir()


def load_model(source: str | Path, device: str, dtype: torch.dtype | None = None) -> HeadmaxForCausalLM:
    return terminal.load(Path(source), device, dtype)


def load_tokenizer(source: str | Path) -> Any:
    return terminal.load_tokenizer(Path(source))
