"""What the output norms get: the root mean square of each layer's read-out, during training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmax import durable
from headmax.data.source import Source
from headmax.models import HeadmaxConfig, HeadmaxForCausalLM

SEQUENCES = 2
"""Held-out sequences that are looked at."""


class NormProbe:
    """Runs a plain, unfused copy of the model in training, so that its norms can be watched."""

    def __init__(self, config: HeadmaxConfig, text: Source, file: Path) -> None:
        self.config = HeadmaxConfig.from_dict(config.to_dict() | {"fused": False})
        self.ids, self.file = text.batch(range(SEQUENCES)).input_ids, file
        self.seen: dict[str, list[float]] = durable.read_json(file) if file.exists() else {}
        """By tokens trained on: the root mean square that each layer's norm gets. Kept in a file, for a training that goes on."""

    @property
    def points(self) -> list[dict[str, Any]]:
        return [{"tokens": int(tokens), "rms": rms} for tokens, rms in self.seen.items()]

    @torch.no_grad()
    def look(self, model: HeadmaxForCausalLM, tokens: int) -> None:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []), model.device:
            copy = HeadmaxForCausalLM(self.config)
        copy.load_state_dict(model.state_dict())
        seen: list[Tensor] = []
        for block in copy.eval().model.layers:
            block.mixer.output_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float().square().mean().sqrt()))
        with torch.autocast(model.device.type, torch.bfloat16):
            copy.model(self.ids.to(model.device), use_cache=False)
        self.seen[str(tokens)] = [float(f"{x:.4g}") for x in torch.stack(seen).tolist()]
        durable.write(self.file, json.dumps(self.seen))
