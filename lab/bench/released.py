"""A layer stack in the shape of Qwen3.5, random weights: on headmax's ops, and as transformers runs it with and without FLA's."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headmax.bench.isolated import isolated
from headmax.bench.timing import peak_memory, seconds
from headmax.ops.spec import distance
from headmax.records import Record, Recorder

PEERS = ("headmax", "headmax-softmax", "transformers-fla", "transformers")
"""On our ops, plain and with head gates; transformers with flash-linear-attention, and with its own PyTorch."""
WARMUP = 2
FOUR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
"""Kinds of layers, repeated."""


@dataclass(frozen=True)
class Plan:
    """What every process measures."""

    layers: int
    """A multiple of four."""
    train: tuple[int, int]
    """Length and batch of a training step."""
    prefill: int
    """Tokens of the one sequence that is prefilled."""
    rounds: int
    device: str
    tiny: bool
    """Narrow layers, for a machine without a GPU."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16


def stack(plan: Plan) -> nn.Module:
    """Qwen3.5's decoder without embedding and head: 16 key heads, 32 value heads, K = V = 128, hidden 2048."""
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    hidden, keys, width = (64, 2, 16) if plan.tiny else (2048, 16, 128)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=plan.layers,
        layer_types=FOUR * (plan.layers // 4),
        linear_num_key_heads=keys,
        linear_num_value_heads=2 * keys,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=2 * width,
        max_position_embeddings=plan.prefill,
    )
    torch.manual_seed(0)
    model: nn.Module = Qwen3_5TextModel(config)
    return model.to(plan.device, plan.dtype)


class Step:
    """One optimizer step on random hidden states: the weights' dtype throughout, fused AdamW."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def __call__(self) -> None:
        self.model(inputs_embeds=self.x, use_cache=False).last_hidden_state.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def prefill(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            model(inputs_embeds=x, use_cache=True)

    return run


def layer(model: Any, x: Tensor) -> Callable[[], None]:
    """One linear-attention layer, forward and backward, without the norm before it and the MLP behind."""
    mixer = model.layers[0].linear_attn

    def run() -> None:
        mixer(x).float().square().mean().backward()
        mixer.zero_grad()

    return run


def measure(plan: Plan, peer: str) -> Iterator[Record]:
    """One peer: how far its output is from transformers' own, then its times and memory."""
    if peer == "transformers-fla":
        import fla  # noqa: F401  # else this peer would be the other one
    else:
        sys.modules["fla"] = None  # type: ignore[assignment]  # transformers looks for it when its model is imported
    make, device = Recorder("released", plan.device), torch.device(plan.device)
    model: Any = stack(plan)
    extra = {"layers": plan.layers, "rounds": plan.rounds, "tiny": plan.tiny} | versions()

    def draw(batch: int, length: int) -> Tensor:
        return torch.randn(batch, length, model.config.hidden_size, device=device, dtype=plan.dtype)

    if peer.startswith("headmax"):
        x = draw(1, min(plan.prefill, 2048))
        yield make(f"{x.shape[1]} tokens", peer, "distance to transformers", moved(model.eval(), x, peer), "relative", None, **extra)
    length, batch = plan.train
    works: dict[str, tuple[int, Callable[[], object]]] = {
        f"prefill {plan.prefill}x1": (plan.prefill, prefill(model, draw(1, plan.prefill))),
        f"training step {length}x{batch}": (length * batch, Step(model, draw(batch, length))),
        f"layer, forward and backward {length}x{batch}": (length * batch, layer(model, draw(batch, length))),
    }
    for case, (tokens, work) in works.items():
        model.train(not case.startswith("prefill"))
        for _ in range(WARMUP):
            work()
        peak = peak_memory(work, device)
        times = [seconds(work, device) for _ in range(plan.rounds)]
        taken = statistics.median(times)
        yield make(case, peer, "time", 1e3 * taken, "ms", None, fastest=1e3 * min(times), slowest=1e3 * max(times), **extra)
        yield make(case, peer, "tokens per second", tokens / taken, "tokens/s", None, **extra)
        if peak is not None:
            yield make(case, peer, "peak memory", peak / 2**30, "GiB", None, **extra)


@torch.no_grad()
def moved(model: nn.Module, x: Tensor, peer: str) -> float:
    """Puts the model on our ops; how far its output is then from what transformers' PyTorch gave."""
    from headmax import accelerate, softmaxify

    before = model(inputs_embeds=x, use_cache=False).last_hidden_state
    (softmaxify if peer == "headmax-softmax" else accelerate)(model)
    return distance(model(inputs_embeds=x, use_cache=False).last_hidden_state, before)


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in ("torch", "transformers", "triton", "flash-linear-attention", "causal-conv1d"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def bench(plan: Plan, peers: tuple[str, ...], limit: float, say: Callable[[str], None]) -> Iterator[Record]:
    """A process for each peer, one after the other on the same machine, each within `limit` seconds."""
    for peer in peers:
        say(f"Qwen3.5's shape: {peer}")
        yield from isolated(measure, plan, peer, limit=limit, say=say)
