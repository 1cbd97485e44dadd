"""Reading prompts: in pieces, so that memory does not depend on their length, and several at once where that wastes little."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headmax.generate.prefix import Fingerprint, PrefixState
from headmax.layers.mixers.attention import AttentionState
from headmax.layers.mixers.state import RecurrentState
from headmax.models import HeadmaxCache, HeadmaxForCausalLM
from headmax.models.inputs import read_inputs
from headmax.models.modeling import Gates


def groups(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Which prompts to read together: at most `most` tokens, padding included, and none less than half as long as another."""
    results: list[list[int]] = []
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        longest = lengths[results[-1][0]] if results else 0
        if results and 2 * lengths[n] > longest and (len(results[-1]) + 1) * longest <= most:
            results[-1].append(n)
        else:
            results.append([n])
    return results


@torch.no_grad()
def prefill(
    model: HeadmaxForCausalLM, prompts: Sequence[Tensor], chunk: int, fingerprint: Fingerprint, prefixes: Sequence[PrefixState | None]
) -> list[PrefixState]:
    """The state after each prompt, which continues its prefix if it has one; no forward pass sees more than `chunk` tokens."""
    done: dict[int, PrefixState] = {}
    for n, (prompt, prefix) in enumerate(zip(prompts, prefixes, strict=True)):
        if prefix is not None:  # by itself: beside a state, padding would let it decay
            done |= {n: prefix} if len(prompt) == 0 else {n: _read(model, [prompt], chunk, fingerprint, prefix)[0]}
    fresh = [n for n in range(len(prompts)) if n not in done]
    for group in groups([len(prompts[n]) for n in fresh], chunk):
        members = [fresh[i] for i in group]
        done |= zip(members, _read(model, [prompts[n] for n in members], chunk, fingerprint, None), strict=True)
    return [done[n] for n in range(len(prompts))]


class Pass:
    """A forward pass that can pause after any block, so that decoding need not wait for all of it."""

    def __init__(
        self,
        model: HeadmaxForCausalLM,
        ids: Tensor,
        cache: HeadmaxCache,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        gates: bool = False,
    ) -> None:
        """Over tokens `ids` [rows, n] after those in the cache."""
        self.model, self.return_gates = model.model, gates
        self.inputs = read_inputs(self.model, ids.to(model.device), mask, positions, cache, None, True, None, gates)
        self.x, self.gates, self.done = self.inputs.x, [], 0  # type: ignore[var-annotated]

    @torch.no_grad()
    def advance(self, blocks: int | None = None) -> Tensor | None:
        """Runs so many more blocks, all by default: the last layer's output [rows, n, hidden] once all have run."""
        end = len(self.model.layers) if blocks is None else min(self.done + blocks, len(self.model.layers))
        with self.model.compiler_limits():
            for n in range(self.done, end):
                block = self.model.layers[n]
                self.x, state, gate = (block.step if self.inputs.fused_step(n) else block)(self.x, **self.inputs.for_block(n))
                self.inputs.advance(n, state, self.x.shape[1])
                self.gates.append(gate)
        self.done = end
        return self.model.norm(self.x) if end == len(self.model.layers) else None


def _padded(prompts: Sequence[Tensor], past: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [rows, n] with padding on the left, their mask [rows, past + n], and their positions."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros(len(prompts), past + longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    return ids, mask, (mask.cumsum(-1) - 1).clamp_min(0)


def _read(
    model: HeadmaxForCausalLM, prompts: Sequence[Tensor], chunk: int, fingerprint: Fingerprint, prefix: PrefixState | None
) -> list[PrefixState]:
    """Prompts of similar length in one batch, padded on the left, where padding leaves no trace."""
    longest, past = max(map(len, prompts)), 0 if prefix is None else len(prefix)
    ids, mask, positions = _padded(prompts, past, model.device)
    cache = HeadmaxCache(model.config.num_hidden_layers) if prefix is None else prefix.to_cache()
    piece = max(1, chunk // len(prompts))
    hidden = None
    for start in range(0, longest, piece):
        end = min(start + piece, longest)
        hidden = model.model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, : past + end],
            position_ids=positions[:, past + start : past + end],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
    logits = model.lm_head(hidden).float()
    before = torch.empty(0, dtype=torch.int64) if prefix is None else prefix.tokens
    results = []
    for row, prompt in enumerate(prompts):
        states = tuple(_row(layer.to_keep(), row, past + len(prompt)) for layer in cache.layers)
        results.append(PrefixState(torch.cat([before, prompt]), states, logits[row], fingerprint))
    return results


class Reader:
    """A text read by itself, in pieces whose size is chosen from one to the next, after the states of what came before."""

    def __init__(
        self, model: HeadmaxForCausalLM, text: Tensor, states: Sequence[RecurrentState | AttentionState], past: int, gates: bool = False
    ) -> None:
        """`states` are those after the first `past` tokens of `text` [n]; none for 0. With `gates`, those of the last piece are kept."""
        self.model, self.text, self.position, self.return_gates = model, text, past, gates
        self.gates: Gates | None = None
        self.under_way: Pass | None = None
        self.cache = HeadmaxCache(model.config.num_hidden_layers)
        if past:
            for layer, state in zip(self.cache.layers, states, strict=True):
                layer.advance(state, past)

    @property
    def left(self) -> int:
        """Tokens not read yet."""
        return len(self.text) - self.position

    def begin(self, count: int) -> None:
        """The next piece has so many tokens."""
        with torch.no_grad():
            piece = self.text[None, self.position : self.position + count]
            self.under_way = Pass(self.model, piece, self.cache, gates=self.return_gates)

    def advance(self, blocks: int | None = None) -> Tensor | None:
        """Runs so many blocks over the piece, all by default: the last layer's output [count, hidden] once it has been read."""
        assert self.under_way is not None
        hidden = self.under_way.advance(blocks)
        if hidden is None:
            return None
        self.position += hidden.shape[1]
        self.gates, self.under_way = tuple(self.under_way.gates) if self.return_gates else None, None
        return hidden[0]

    def read(self, count: int) -> Tensor:
        """Reads that many tokens: the last layer's output [count, hidden]."""
        self.begin(count)
        hidden = self.advance()
        assert hidden is not None
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocabulary] of what follows tokens with the outputs `hidden` [n, hidden]."""
        return self.model.lm_head(hidden).float()

    @torch.no_grad()
    def states(self) -> tuple[RecurrentState | AttentionState, ...]:
        """After what has been read. They stay as they are while reading goes on, as long as its pieces are more than a step's tokens."""
        return tuple(_row(layer.to_keep(), 0, self.position) for layer in self.cache.layers)


class Together:
    """Several texts read from their start in one pass."""

    def __init__(self, model: HeadmaxForCausalLM, texts: Sequence[Tensor]) -> None:
        self.model, self.texts = model, texts
        self.cache = HeadmaxCache(model.config.num_hidden_layers)
        with torch.no_grad():
            ids, mask, positions = _padded(texts, 0, model.device)
            self.under_way = Pass(model, ids, self.cache, mask, positions)

    @torch.no_grad()
    def advance(self, blocks: int | None = None) -> Tensor | None:
        """Runs so many blocks: float32 logits [texts, vocabulary] of what follows each text once all have run."""
        hidden = self.under_way.advance(blocks)
        return None if hidden is None else self.model.lm_head(hidden[:, -1]).float()

    @torch.no_grad()
    def states(self, row: int) -> tuple[RecurrentState | AttentionState, ...]:
        """After a text; in the memory of all."""
        return tuple(_row(layer.to_keep(), row, len(self.texts[row])) for layer in self.cache.layers)


def _row(state: tuple | None, row: int, length: int) -> RecurrentState | AttentionState:
    """One sequence's own state; of keys and values the last `length`, which are not padding."""
    if isinstance(state, AttentionState):
        return AttentionState(*(x[row : row + 1, :, -length:].contiguous() for x in state))
    assert isinstance(state, RecurrentState)
    return RecurrentState(state.recurrent[row : row + 1], tuple(x[row : row + 1] for x in state.conv))
