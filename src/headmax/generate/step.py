"""One decoding step of the whole model on fixed memory: run as it is on a CPU, replayed as a CUDA graph on a GPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from headmax.generate.prefix import PrefixState
from headmax.generate.sampling import Features, Sampler
from headmax.layers.block import Block
from headmax.layers.decoding import AttentionSlots, Place, Slots, make_slots, plain_step, unfit
from headmax.models import HeadmaxForCausalLM

logger = logging.getLogger("headmax")

Path = Literal["auto", "fused", "plain"]
Layer = Callable[[Tensor, Slots, Place], Tensor]


def layers(model: HeadmaxForCausalLM, path: Path) -> tuple[list[Layer], Callable[[Tensor], Tensor]]:
    """How each block decodes, and the head after them: in kernels, or by its own forward where it cannot or should not."""
    blocks = cast(Sequence[Block], model.model.layers)
    reasons = {block: "asked for" if path == "plain" else unfit(block) if path == "auto" else None for block in blocks}
    if path == "auto" and any(reasons.values()):
        said = sorted({why for why in reasons.values() if why is not None})
        logger.warning("decoding goes without fused kernels in some layers: %s", "; ".join(said))
    made: list[Layer] = [functools.partial(plain_step, block) for block in blocks]

    def head(x: Tensor) -> Tensor:
        return model.lm_head(model.model.norm(x)).float()

    if all(reasons.values()):
        return made, head
    from headmax.layers.triton_block import FusedBlock, FusedHead

    plain_head = type(model.lm_head) is nn.Linear
    if path == "fused" and not plain_head:
        raise ValueError(f"lm_head cannot be fused: it is a {type(model.lm_head).__name__}")
    made = [FusedBlock(block) if reasons[block] is None else plain for block, plain in zip(blocks, made, strict=True)]
    return made, FusedHead(model.model.norm, model.lm_head) if plain_head else head


class Step:
    """The states of up to `slots` sequences, and the step that moves the first of them on by one token."""

    def __init__(self, model: HeadmaxForCausalLM, slots: int, state_dtype: torch.dtype, length: int | None, path: Path) -> None:
        self.model, self.length, device = model, length, model.device
        if path == "auto" and device.type != "cuda":
            path = "plain"  # kernels could only be interpreted
        self.layers, self.head = layers(model, path)
        self.memory = [make_slots(block, slots, state_dtype, length) for block in model.model.layers]
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.position = torch.zeros(slots, dtype=torch.int64, device=device)
        self.sampler = Sampler(slots, model.config.vocab_size, device)
        self.graphs: dict[tuple[int, Features | None], Replay] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def load(self, prefixes: Sequence[PrefixState]) -> None:
        """Puts states into the first slots; what comes after them is to be fed next."""
        for slot, prefix in enumerate(prefixes):
            for slots, state in zip(self.memory, prefix.states, strict=True):
                slots.store(slice(slot, slot + 1), state)  # type: ignore[arg-type]
        positions = [len(prefix) for prefix in prefixes] + [0] * (len(self.position) - len(prefixes))
        self.position.copy_(torch.tensor(positions))

    def logits(self, rows: int) -> Tensor:
        """Feeds `tokens` to the first slots: float32 logits [rows, vocabulary] of what comes after them."""
        model, position = self.model.model, self.position[:rows]
        x = model.embed_tokens(self.tokens[:rows])
        rotary = {turn: turn and turn.at(position.unsqueeze(1), x.dtype) for turn in set(model.rotary)}
        seen = None
        if self.length is not None and any(isinstance(slots, AttentionSlots) for slots in self.memory):
            seen = (torch.arange(self.length, device=x.device) <= position.unsqueeze(1))[:, None, None]
        place = Place(position, rotary, seen)
        for layer, slots in zip(self.layers, self.memory, strict=True):
            x = layer(x, slots, place)
        logits = self.head(x)
        self.position[:rows] += 1
        return logits

    def sample(self, logits: Tensor, features: Features) -> tuple[Tensor, Tensor | None]:
        """Chooses the next tokens of the first slots, which become those to be fed; and their log-probabilities."""
        rows = logits.shape[0]
        tokens, logprobs = self.sampler(logits, self.position[:rows], features)
        self.tokens[:rows] = tokens.clamp_min(0)  # NO_TOKEN is not to be looked up
        return tokens, logprobs

    def advance(self, rows: int, features: Features | None) -> tuple[Tensor, Tensor | None]:
        """Feeds the current tokens and samples the next ones; without features, the logits instead, and nothing is sampled."""
        logits = self.logits(rows)
        return (logits, None) if features is None else self.sample(logits, features)

    @torch.no_grad()
    def prepare(self, rows: int, features: Features | None) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """`advance` for so many rows, to be called again and again. On a GPU it is captured the first time: load the slots after that."""
        if features is not None and features.penalized:
            self.sampler.remember()
        if self.pool is None:
            return torch.no_grad()(lambda: self.advance(rows, features))
        if (rows, features) not in self.graphs:
            self.position.zero_()
            self.graphs[rows, features] = Replay(lambda: self.advance(rows, features), self.pool)
        return self.graphs[rows, features]


class Replay:
    """A function as a CUDA graph: what it returned when it was captured is where its results lie after each call."""

    def __init__(self, function: Callable[[], tuple[Tensor, Tensor | None]], pool: Any) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are compiled and libraries set up outside the capture
                function()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.results = function()

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        self.graph.replay()
        return self.results
