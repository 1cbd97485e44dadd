"""A text read once: all a model remembers of it, to be continued many times, kept in a file or handed to the model itself."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headmax import durable
from headmax.layers.mixers.attention import AttentionState
from headmax.layers.mixers.state import RecurrentSlots, RecurrentState
from headmax.models import HeadmaxCache, HeadmaxForCausalLM

FORMAT = "headmax prefix 1"
NOT_COMPARED = ("_name_or_path", "transformers_version", "architectures", "use_cache", "backend")
"""Settings that change nothing about what a model computes."""


PIECE = 2**24
"""Weights that a fingerprint adds up at a time, as integers of 64 bits."""


def fingerprint(model: HeadmaxForCausalLM) -> str:
    """Tells models apart: settings, dtypes and every weight. Sums of integers, so that it is the same on every device."""
    settings = {name: value for name, value in model.config.to_dict().items() if name not in NOT_COMPARED}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    sums = []
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        bits = weight.detach().contiguous().flatten().view(torch.int16 if weight.element_size() == 2 else torch.int32)
        plain = weighted = torch.zeros((), dtype=torch.int64, device=bits.device)
        for n, piece in enumerate(bits.split(PIECE)):
            plain = plain + piece.sum()
            weighted = weighted + (piece * torch.arange(n * PIECE + 1, n * PIECE + len(piece) + 1, device=bits.device)).sum()
        sums += [plain, weighted]
    digest.update(str(torch.stack(sums).tolist()).encode())
    return digest.hexdigest()[:32]


class Fingerprint:
    """A model's fingerprint, taken when it is first asked for: all weights are read for it."""

    def __init__(self, model: HeadmaxForCausalLM) -> None:
        self.model = model

    @functools.cached_property
    def text(self) -> str:
        return fingerprint(self.model)

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Copies and pickles of a prefix carry the text, not the model."""
        return str, (str(self),)


def check_place(path: Path) -> None:
    """Raises where a prefix cannot be saved: in a folder's place, or in that of a file that is none."""
    durable.refuse_inputs(path)
    if path.exists() and path.stat().st_size:
        try:
            with safe_open(path, framework="pt") as file:
                kind = (file.metadata() or {}).get("format")
        except (SafetensorError, OSError):
            kind = None
        if kind != FORMAT:
            raise ValueError(f"{path}: there already, and no prefix; choose another file to write")


@dataclass(frozen=True)
class PrefixState:
    """The states of a model after `tokens`, and its next logits. It is never modified, so any number of requests may share one."""

    tokens: Tensor
    """[n] on the host"""
    states: tuple[RecurrentState | AttentionState, ...]
    """Of each layer, for one sequence."""
    logits: Tensor
    """[vocabulary] float32, of the token after the last."""
    model: str | Fingerprint
    """The fingerprint of the model it came from; str() gives it."""

    def __len__(self) -> int:
        return len(self.tokens)

    def nbytes(self) -> int:
        return self.to_cache().nbytes()

    def to_cache(self) -> HeadmaxCache:
        """For `model(..., past_key_values=cache)`. No copy: the model makes new states and leaves these alone."""
        cache = HeadmaxCache(len(self.states))
        for layer, state in zip(cache.layers, self.states, strict=True):
            layer.advance(state, len(self))
        return cache

    @classmethod
    def from_cache(cls, cache: HeadmaxCache, tokens: Tensor, logits: Tensor, model: str | Fingerprint) -> PrefixState:
        """`cache` after one sequence, `logits` [vocabulary] after its last token, `model` the fingerprint."""
        states = tuple(
            RecurrentSlots.of(x.state()).state() if isinstance(x := layer.state, RecurrentSlots) else x for layer in cache.layers
        )
        if any(state is None for state in states) or cache.get_seq_length() != len(tokens):
            raise ValueError(f"cache has seen {cache.get_seq_length()} tokens, tokens are {len(tokens)}")
        return cls(tokens.cpu(), states, logits.float(), model)  # type: ignore[arg-type]

    def check(self, model: str | Fingerprint) -> None:
        """Raises unless it came from the model of that fingerprint. No weight is read where both are one object."""
        if self.model is not model and str(self.model) != str(model):
            raise ValueError(f"prefix is of another model (fingerprint {self.model}), or of the same in another dtype; this one is {model}")

    def check_shapes(self, other: PrefixState) -> None:
        """Raises unless this has a shape that the model of `other` can give: another prefix, of any length."""
        tokens, vocabulary = self.tokens, len(other.logits)
        if (
            tokens.ndim != 1
            or tokens.dtype != torch.int64
            or not len(tokens)
            or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary
        ):
            raise ValueError(f"tokens must be one sequence of ids of a vocabulary of {vocabulary}")
        if len(self.states) != len(other.states):
            raise ValueError(f"states are of {len(self.states)} layers, the model has {len(other.states)}")
        for n, (state, like) in enumerate(zip(self.states, other.states, strict=True)):
            expected = state_shapes(like, None if isinstance(like, RecurrentState) else len(tokens))
            if state_shapes(state, None) != expected:
                raise ValueError(f"state of layer {n} is {state_shapes(state, None)}, must be {expected}")
        if (self.logits.shape, self.logits.dtype) != (other.logits.shape, other.logits.dtype):
            raise ValueError(f"logits must be {vocabulary} of {other.logits.dtype}, got {list(self.logits.shape)} of {self.logits.dtype}")

    def save(self, path: Path | str) -> None:
        """One safetensors file; `load` checks it against the model. Only an earlier prefix is written over."""
        if not bool(self.logits.isfinite().all()):
            raise ValueError("prefix is of no use: the model's logits after it are not finite, its weights hold NaN or infinity")
        check_place(Path(path))
        tensors = {"tokens": self.tokens, "logits": self.logits, **pack_states(self.states)}
        metadata = {"format": FORMAT, "model": str(self.model), "layers": str(len(self.states))}
        durable.write(Path(path), save({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, metadata=metadata))

    @classmethod
    def load(cls, path: Path | str, model: str | Fingerprint, device: torch.device | str = "cpu") -> PrefixState:
        """What `save` wrote, if it is whole and of the model with that fingerprint."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - the file may change later
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path}: not a prefix saved by headmax (format {metadata.get('format')!r})")
        try:
            states = unpack_states(tensors, int(metadata["layers"]), device)
            prefix = cls(tensors["tokens"], states, tensors["logits"].to(device), metadata["model"])
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: not a whole prefix: {error} is missing or no number") from error
        try:
            prefix.check(model)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return prefix


def pack_states(states: Sequence[RecurrentState | AttentionState]) -> dict[str, Tensor]:
    """The states of all layers as named tensors."""
    tensors: dict[str, Tensor] = {}
    for n, state in enumerate(states):
        if isinstance(state, AttentionState):
            tensors |= {f"{n}.keys": state.keys, f"{n}.values": state.values}
        else:
            tensors |= {f"{n}.recurrent": state.recurrent} | {f"{n}.conv.{i}": x for i, x in enumerate(state.conv)}
    return tensors


def unpack_states(
    tensors: dict[str, Tensor], layers: int, device: torch.device | str = "cpu"
) -> tuple[RecurrentState | AttentionState, ...]:
    """What `pack_states` made. KeyError names what is missing."""
    return tuple(_state(tensors, n, device) for n in range(layers))


def _state(tensors: dict[str, Tensor], layer: int, device: torch.device | str) -> RecurrentState | AttentionState:
    if f"{layer}.keys" in tensors:
        return AttentionState(tensors[f"{layer}.keys"].to(device), tensors[f"{layer}.values"].to(device))
    convolved = sorted(name for name in tensors if name.startswith(f"{layer}.conv."))
    return RecurrentState(tensors[f"{layer}.recurrent"].to(device), tuple(tensors[name].to(device) for name in convolved))


def state_shapes(state: RecurrentState | AttentionState, length: int | None) -> list[tuple[list[int], torch.dtype]]:
    """Shape and dtype of a state's tensors; with `length`, those that keys and values of so many tokens would have."""
    if isinstance(state, RecurrentState):
        return [(list(x.shape), x.dtype) for x in (state.recurrent, *state.conv)]
    return [([*x.shape[:2], x.shape[2] if length is None else length, *x.shape[3:]], x.dtype) for x in state]
