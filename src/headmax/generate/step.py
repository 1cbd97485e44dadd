"""One decoding step of the whole model and its sampling on fixed memory: run as it is on a CPU, replayed as a CUDA graph on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from headmax.generate.prefix import PrefixState
from headmax.generate.sampling import Features, Sampled, Sampler, Sampling
from headmax.layers.fusion import fusion_enabled, intact
from headmax.layers.mixers.attention import AttentionSlots, AttentionState
from headmax.layers.mixers.state import RecurrentSlots, RecurrentState
from headmax.models import HeadmaxCache, HeadmaxForCausalLM
from headmax.models.decoding import Replay, make_slots

State = RecurrentState | AttentionState
Taken = Callable[[], tuple[State, ...]]


@torch.no_grad()
def _own(copies: Sequence[RecurrentSlots | list[State]], row: int) -> tuple[State, ...]:
    return tuple(_copy(x.rows(slice(row, row + 1)), 0) if isinstance(x, RecurrentSlots) else x[row] for x in copies)


class Entry(NamedTuple):
    """A sequence on its way into a slot."""

    states: Sequence[State]
    """After all but the last token of its text."""
    text: Tensor
    """[n] on the host"""
    generated: int
    """How many of the text's last tokens it has generated; as many in all that enter together."""
    rules: Sampling


class Fetched:
    """A step's results on their way to the host."""

    def __init__(self, sampled: Sampled, rows: int) -> None:
        self.sampled: Sampled = tree_map_only(Tensor, lambda x: _to_host(x[:rows]), sampled)
        self.event: Any = None
        device = sampled.tokens.device
        if device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> Sampled:
        """The results, once they are there."""
        if self.event is not None:
            self.event.synchronize()
        return self.sampled


def _to_host(x: Tensor) -> Tensor:
    if x.device.type != "cuda":
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _copy(slots: RecurrentSlots | AttentionSlots, length: int) -> State:
    if isinstance(slots, AttentionSlots):
        return AttentionState(slots.keys[:, :, :length].clone(), slots.values[:, :, :length].clone())
    recurrent = slots.recurrent.to(torch.promote_types(slots.recurrent.dtype, torch.float32), copy=True)  # as prompts leave them
    return RecurrentState(recurrent, tuple(x.clone() for x in slots.conv))


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
            self._store(slot, prefix.states)
        positions = [len(prefix) for prefix in prefixes] + [0] * (len(self.position) - len(prefixes))
        self.position.copy_(torch.tensor(positions))

    @torch.no_grad()
    def put(self, slots: Sequence[int], sequences: Sequence[Entry]) -> None:
        """Puts sequences into slots."""
        device, texts = self.tokens.device, [sequence.text for sequence in sequences]
        index = torch.tensor(slots, device=device)
        if len(slots) == 1:
            self._store(slots[0], sequences[0].states)
        else:
            self._store_together(slots, index, [sequence.states for sequence in sequences])
        self.position[index] = torch.tensor([len(text) - 1 for text in texts]).to(device)
        self.tokens[index] = torch.stack([text[-1] for text in texts]).to(device)
        self.sampler.put(index, [sequence.rules for sequence in sequences], texts, sequences[0].generated)

    @torch.no_grad()
    def feed(self, tokens: Mapping[int, int]) -> None:
        """What some slots are to be fed in the next step, in place of what was sampled."""
        index = torch.tensor(list(tokens), device=self.tokens.device)
        self.tokens[index] = torch.tensor(list(tokens.values())).to(self.tokens.device)

    @torch.no_grad()
    def take(self, slots: Sequence[int], lengths: Sequence[int]) -> list[Taken]:
        """Copies of the states in some slots, after so many tokens each. They are made together; a call gives one sequence's own."""
        index = torch.tensor(slots, device=self.tokens.device)
        copies: list[RecurrentSlots | list[State]] = []
        for memory in self.memory:
            if isinstance(memory, RecurrentSlots):
                inputs = None if memory.inputs is None else memory.inputs.index_select(0, index)
                copies.append(RecurrentSlots(memory.recurrent.index_select(0, index), inputs, memory.channels))
            else:
                pairs = zip(slots, lengths, strict=True)
                copies.append([_copy(memory.rows(slice(slot, slot + 1)), length) for slot, length in pairs])
        return [functools.partial(_own, copies, row) for row in range(len(slots))]

    @torch.no_grad()
    def move(self, source: int, target: int) -> None:
        """A sequence goes on in another slot."""
        for slots in self.memory:
            own = (slots.keys, slots.values) if isinstance(slots, AttentionSlots) else (slots.recurrent, slots.inputs)
            for x in own:
                if x is not None:
                    x[target].copy_(x[source])
        for column in (self.position, self.tokens):
            column[target].copy_(column[source])
        self.sampler.move(source, target)

    def _store(self, slot: int, states: Sequence[State]) -> None:
        for memory, state in zip(self.memory, states, strict=True):
            self._store_in(memory, slot, state)

    @staticmethod
    def _store_in(memory: RecurrentSlots | AttentionSlots, slot: int, state: State) -> None:
        row = memory.rows(slice(slot, slot + 1))
        row.store(state)  # type: ignore[arg-type]
        if isinstance(row, AttentionSlots) and isinstance(state, AttentionState):  # a NaN left there would reach what masks it
            row.keys[:, :, state.keys.shape[2] :].zero_()
            row.values[:, :, state.keys.shape[2] :].zero_()

    def _store_together(self, slots: Sequence[int], index: Tensor, states: Sequence[Sequence[State]]) -> None:
        """Recurrent states of all sequences at once, layer by layer: a few copies in all, not a few for each sequence."""
        for memory, own in zip(self.memory, zip(*states, strict=True), strict=True):
            if isinstance(memory, RecurrentSlots):
                memory.recurrent.index_copy_(0, index, torch.cat([state.recurrent for state in own]).to(memory.recurrent.dtype))
                for kept, new in zip(memory.conv, zip(*(state.conv for state in own), strict=True), strict=True):
                    kept.index_copy_(0, index, torch.cat(new).to(kept.dtype))
            else:
                for slot, state in zip(slots, own, strict=True):
                    self._store_in(memory, slot, state)

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
            from headmax.ops.kernels.linear import LinearInput, linear

            return linear(LinearInput(x), [head.weight], dtype=torch.float32)
        return head(x).float()

    def sample(self, logits: Tensor, features: Features) -> Sampled:
        """Chooses the next tokens of the first slots, which become those to be fed."""
        rows = logits.shape[0]
        sampled = self.sampler(logits, self.position[:rows], features)
        self.tokens[:rows] = sampled.tokens.clamp_min(0)  # NO_TOKEN is not to be looked up
        return sampled

    def advance(self, rows: int, features: Features | None) -> Sampled:
        """Feeds the current tokens and samples the next ones; without features, the logits instead, and nothing is sampled."""
        logits = self.logits(rows)
        return Sampled(logits) if features is None else self.sample(logits, features)

    @torch.no_grad()
    def prepare(self, rows: int, features: Features | None) -> Callable[[], Sampled]:
        """`advance` for so many rows, to be called again and again. On a GPU it is captured the first time: load the slots after that."""
        if features is not None and features.penalized:
            self.sampler.remember()
        if self.pool is None:
            return torch.no_grad()(lambda: self.advance(rows, features))
        if (rows, features) not in self.graphs:
            self.position.zero_()
            self.graphs[rows, features] = Replay(lambda: self.advance(rows, features), self.model.device, self.pool)
        return self.graphs[rows, features]
