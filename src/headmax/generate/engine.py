"""Decoding: many requests at once, each token at the cost of reading the weights and the states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headmax.data.tokenizer import encode_text
from headmax.generate.prefill import prefill
from headmax.generate.prefix import Fingerprint, PrefixState
from headmax.generate.sampling import NO_TOKEN, Features, Sampled, Sampling
from headmax.generate.step import Fetched, Step
from headmax.generate.text import TextStream
from headmax.generate.turn import Turn
from headmax.models import HeadmaxCache, HeadmaxForCausalLM


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    prompt: str | Sequence[int] = ()
    """Text, if the engine has a tokenizer, or token ids."""
    prefix: PrefixState | None = None
    """State after the text before the prompt, from `Engine.prefill`."""
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: Sequence[int] = ()
    """Tokens that end the text; the completion includes the one that did."""
    stop_strings: Sequence[str] = ()
    """Strings that end the text, which does not include them. They need a tokenizer."""


@dataclass
class Completion:
    """The result of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    """Log-probability of each token under the model itself, before temperature and the other rules; if requested."""
    text: str | None = None
    """The decoded text, without special tokens; None if the engine has no tokenizer."""
    finish: Literal["length", "stop_token", "stop_string"] = "length"


OnToken = Callable[[int, int, str], None]
"""Called with the request's index, the new token and the text that no later stop string can remove, which may be empty."""


class Engine:
    """Decodes batches of requests.

    On a GPU a whole step, from embedding to sampled token, is one CUDA graph per batch size, a power of two up to `max_batch`;
    other batch sizes are padded to the next one. Threads may share an engine and then wait for each other.
    """

    def __init__(
        self,
        model: HeadmaxForCausalLM,
        *,
        max_batch: int = 8,
        state_dtype: torch.dtype = torch.float32,
        prefill_chunk: int = 8192,
        max_length: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        """
        Args:
            model: the model; its weights must not change while the engine is in use.
            max_batch: maximum number of requests at a time; memory for their states is allocated now.
            state_dtype: dtype of the recurrent states; bfloat16 halves their memory, at some loss of precision (docs/generation.md).
            prefill_chunk: maximum number of prompt tokens in one forward pass.
            max_length: maximum length of a text in tokens, prompt included; needed for attention layers only.
            tokenizer: a Hugging Face tokenizer, for prompts, stop strings and completions as text.
        """
        if not isinstance(model, HeadmaxForCausalLM):
            raise ValueError(f"model must be a HeadmaxForCausalLM, got {type(model).__name__}")
        if max_batch < 1 or prefill_chunk < 1:
            raise ValueError(f"max_batch and prefill_chunk must be at least 1, got {max_batch} and {prefill_chunk}")
        if not state_dtype.is_floating_point:
            raise ValueError(f"state_dtype must be a floating dtype, got {state_dtype}")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1 or None, got {max_length}")
        if any(model.model.uses_attention) and max_length is None:
            raise ValueError("max_length must be given: the model has attention layers, whose keys and values grow with every token")
        self.model, self.tokenizer = model.eval(), tokenizer
        self.max_batch, self.prefill_chunk, self.max_length = max_batch, prefill_chunk, max_length
        self.origin = Fingerprint(model)
        self.turn = Turn()
        self.step = Step(model, max_batch, state_dtype, max_length)

    @property
    def fingerprint(self) -> str:
        """Identifies the model in saved prefixes."""
        return str(self.origin)

    def state_bytes(self, batch: int = 1) -> int:
        """Memory of the states of `batch` sequences."""
        return HeadmaxCache.on([slots.rows(slice(0, batch)) for slots in self.step.memory]).nbytes()

    def encode(self, prompt: str | Sequence[int], start: bool = True) -> Tensor:
        """Token ids [n] of a prompt, on the host; at the `start` of a text, with the special tokens that the tokenizer puts there.

        Names of special tokens in a text are plain text, as in training data; pass token ids for special tokens.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt is text, and the engine has no tokenizer: give token ids, or Engine(..., tokenizer=...)")
            prompt = encode_text(self.tokenizer, prompt, start=start)["input_ids"]
        vocabulary = self.model.config.vocab_size
        try:
            ids = torch.as_tensor(prompt).cpu()
        except (RuntimeError, TypeError, ValueError) as error:  # such as numbers of more than 64 bits
            raise ValueError(f"prompt must be one sequence of token ids below {vocabulary}") from error
        if ids.ndim != 1:
            raise ValueError(f"prompt must be one sequence of token ids, got shape {list(ids.shape)}")
        if len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool):
            raise ValueError(f"prompt must be token ids, which are integers, got {ids.dtype}")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(f"prompt has token ids from {int(ids.min())} to {int(ids.max())}, the vocabulary {vocabulary} tokens")
        return ids.long()

    def prefill(self, prompt: str | Sequence[int], prefix: PrefixState | None = None) -> PrefixState:
        """Reads a prompt, after a prefix if given, and returns the state of the model."""
        with self.turn.reentrant():
            return self._prefill([Request(prompt, prefix)])[0]

    def load_prefix(self, path: Path | str) -> PrefixState:
        """A prefix that `PrefixState.save` wrote, checked against this model."""
        with self.turn.reentrant():
            prefix = PrefixState.load(path, self.origin, self.model.device)
            try:
                prefix.check_shapes(self.prefill([0]))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            return prefix

    def _prefill(self, requests: Sequence[Request]) -> list[PrefixState]:
        prompts = [self.encode(request.prompt, request.prefix is None) for request in requests]
        for request, prompt in zip(requests, prompts, strict=True):
            if request.prefix is not None:
                request.prefix.check(self.origin)
            elif len(prompt) == 0:
                raise ValueError(f"prompt is empty: give at least one token, such as bos_token_id {self.model.config.bos_token_id}")
        return prefill(self.model, prompts, self.prefill_chunk, self.origin, [request.prefix for request in requests])

    def _check(self, requests: Sequence[Request]) -> None:
        if not 1 <= len(requests) <= self.max_batch:
            raise ValueError(f"{len(requests)} requests, the engine takes 1 to max_batch = {self.max_batch} at a time")
        vocabulary = self.model.config.vocab_size
        for request in requests:
            for name in ("stop_tokens", "stop_strings"):
                if isinstance(getattr(request, name), int | str):
                    raise ValueError(f"{name} must be a list, got {getattr(request, name)!r}")
            if request.max_new_tokens < 0:
                raise ValueError(f"max_new_tokens must not be negative, got {request.max_new_tokens}")
            for token in request.stop_tokens:
                if not 0 <= token < vocabulary:
                    raise ValueError(f"stop_tokens has {token}, which is not in the vocabulary of {vocabulary} tokens")
            if request.stop_strings and self.tokenizer is None:
                raise ValueError("stop_strings need a tokenizer: Engine(..., tokenizer=...)")
            if "" in request.stop_strings:
                raise ValueError("stop_strings has an empty string, which would end every text at once")

    def _rows(self, count: int) -> int:
        """The batch size that runs so many requests: the next power of two, if there is room for it."""
        return min(1 << (count - 1).bit_length(), self.max_batch)

    def _load(self, prefixes: Sequence[PrefixState], new_tokens: Sequence[int]) -> None:
        for prefix, new in zip(prefixes, new_tokens, strict=True):
            if self.max_length is not None and len(prefix) + new > self.max_length:
                raise ValueError(f"{len(prefix)} tokens and {new} more exceed max_length = {self.max_length}")
        self.step.load(prefixes)

    @torch.no_grad()
    def forced(self, prefixes: Sequence[PrefixState], tokens: Tensor) -> Iterator[Tensor]:
        """Logits [batch, vocabulary] after each given token [batch, time], one decoding step each; a view that the next step overwrites."""
        batch, time = tokens.shape
        if batch != len(prefixes) or batch > self.max_batch:
            raise ValueError(f"tokens have {batch} rows for {len(prefixes)} prefixes, max_batch is {self.max_batch}")
        with self.turn.exclusive():
            advance = self.step.prepare(self._rows(batch), None)
            self._load(prefixes, [time] * batch)
            tokens = tokens.to(self.model.device)
            for t in range(time):
                self.step.tokens[:batch] = tokens[:, t]
                yield advance()[0][:batch]

    def generate(
        self, requests: Request | Sequence[Request], *, on_token: OnToken | None = None, logprobs: bool = False
    ) -> list[Completion]:
        """Continues every request until a stop token or string, or until its `max_new_tokens`.

        Args:
            requests: one or several, at most `max_batch`.
            on_token: called with a request's index, each new token, and the text that no later stop string can remove.
            logprobs: also return the log-probability of every token under the model itself, before temperature and the other rules.

        Returns:
            A completion for each request, in order.
        """
        requests = [requests] if isinstance(requests, Request) else list(requests)
        self._check(requests)
        with self.turn.exclusive():
            return self._generate(requests, on_token, logprobs)

    def _generate(self, requests: Sequence[Request], on_token: OnToken | None, logprobs: bool) -> list[Completion]:
        rows = self._rows(len(requests))
        features = Features.of([request.sampling for request in requests], logprobs)
        longest = max(request.max_new_tokens for request in requests)
        prefixes = self._prefill(requests)
        run = Collector(self, requests, prefixes, on_token, logprobs)
        if longest == 0:
            return run.finish()
        with torch.no_grad():
            advance = self.step.prepare(rows, features)
            self._load(prefixes, [request.max_new_tokens for request in requests])
            self.step.sampler.set([request.sampling for request in requests], [prefix.tokens for prefix in prefixes])
            pending = run.fetch(self.step.sample(torch.stack([prefix.logits for prefix in prefixes]), features))
            for _ in range(longest - 1):  # on a GPU the host looks at a step's tokens while the device is at the next one
                ahead = run.fetch(advance()) if self.model.device.type == "cuda" else None
                if not run.take(pending):
                    return run.finish()
                pending = run.fetch(advance()) if ahead is None else ahead
            run.take(pending)
        return run.finish()


class Collector:
    """The host's side of a call to `generate`: what came out so far, and who has stopped."""

    def __init__(
        self, engine: Engine, requests: Sequence[Request], prefixes: Sequence[PrefixState], on_token: OnToken | None, logprobs: bool
    ) -> None:
        self.requests, self.on_token = requests, on_token
        self.completions = [Completion(logprobs=[] if logprobs else None) for _ in requests]
        words = engine.tokenizer
        pairs = zip(requests, prefixes, strict=True)
        self.streams = [None if words is None else TextStream(words, own.stop_strings, before.tokens.tolist()) for own, before in pairs]
        self.active = [n for n, request in enumerate(requests) if request.max_new_tokens > 0]

    def fetch(self, sampled: Sampled) -> Fetched:
        """Starts copying a step's results to the host."""
        return Fetched(sampled, len(self.requests))

    def take(self, fetched: Fetched) -> bool:
        """Notes a step's tokens; False once nobody wants more."""
        tokens, logprobs, _ = fetched.wait()
        chosen, values = tokens.tolist(), None if logprobs is None else logprobs.tolist()
        still = []
        for n in self.active:
            request, completion, stream = self.requests[n], self.completions[n], self.streams[n]
            token: int = chosen[n]
            if token == NO_TOKEN:
                raise ValueError(
                    f"the model's logits are not finite after {len(completion.tokens)} new tokens of request {n}: "
                    "its weights hold NaN or infinity, or overflow in this dtype"
                )
            completion.tokens.append(token)
            if values is not None and completion.logprobs is not None:
                completion.logprobs.append(values[n])
            text = "" if stream is None else stream.push(token)
            if token in request.stop_tokens:
                completion.finish = "stop_token"
            elif stream is not None and stream.stopped:
                completion.finish = "stop_string"
            if completion.finish == "length" and len(completion.tokens) < request.max_new_tokens:
                still.append(n)
            elif stream is not None:
                text += stream.finish()
                completion.finish = "stop_string" if stream.stopped else completion.finish
            if self.on_token is not None:
                self.on_token(n, token, text)
        self.active = still
        return bool(still)

    def finish(self) -> list[Completion]:
        for completion, stream in zip(self.completions, self.streams, strict=True):
            completion.text = None if stream is None else stream.text
        return self.completions
