"""One decoding step of the whole model and its sampling on fixed memory: run as it is on a CPU, replayed as a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headmax.generate.prefix import PrefixState
from headmax.generate.sampling import Features, Sampler
from headmax.layers.fusion import fusion_enabled, intact
from headmax.models import HeadmaxCache, HeadmaxForCausalLM
from headmax.models.decoding import Replay, make_slots


class Step:
    """The states of up to `slots` sequences, and the step that moves the first of them on by one token."""

    def __init__(self, model: HeadmaxForCausalLM, slots: int, state_dtype: torch.dtype, length: int | None) -> None:
        self.model, device = model, model.device
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.position = torch.zeros(slots, dtype=torch.int64, device=device)
        self.memory = make_slots(model.model.layers, slots, state_dtype, self.position, length)
        self.sampler = Sampler(slots, model.config.vocab_size, device)
        self.graphs: dict[tuple[int, Features | None], Replay] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def load(self, prefixes: Sequence[PrefixState]) -> None:
        """Puts states into the first slots; what comes after them is to be fed next."""
        for slot, prefix in enumerate(prefixes):
            for slots, state in zip(self.memory, prefix.states, strict=True):
                slots.rows(slice(slot, slot + 1)).store(state)  # type: ignore[arg-type]
        positions = [len(prefix) for prefix in prefixes] + [0] * (len(self.position) - len(prefixes))
        self.position.copy_(torch.tensor(positions))

    def logits(self, rows: int) -> Tensor:
        """Feeds `tokens` to the first slots: float32 logits [rows, vocabulary] of what comes after them."""
        cache = HeadmaxCache.on([slots.rows(slice(0, rows)) for slots in self.memory])
        positions = self.position[:rows, None]
        hidden = self.model.model(self.tokens[:rows, None], position_ids=positions, past_key_values=cache, use_cache=True).last_hidden_state
        self.position[:rows] += 1
        return self.head(hidden[:, 0])

    def head(self, x: Tensor) -> Tensor:
        """lm_head(x) in float32."""
        head = self.model.lm_head
        if fusion_enabled(self.model.config.fused, self.model.config.backend, x) and intact(head) and x.dtype not in (torch.float64,):
            from headmax.layers.triton_linear import Input, linear

            return linear(Input(x), [head.weight], dtype=torch.float32)
        return head(x).float()

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
