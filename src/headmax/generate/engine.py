"""Decoding: many requests at once, each token at the cost of reading the weights and the states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, SupportsIndex

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

    def check(self, vocabulary: int) -> None:
        """ValueError names the first field of another type, or out of range."""
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be an integer that is not negative, got {self.max_new_tokens!r}")
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling must be a Sampling, got {self.sampling!r}")
        if not isinstance(self.prefix, PrefixState | None):
            raise ValueError(f"prefix must be a PrefixState, such as Engine.prefill gives, or None, got {self.prefix!r:.80}")
        for name, kind, those in (("stop_tokens", SupportsIndex, "token ids"), ("stop_strings", str, "strings")):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Collection) or not all(isinstance(one, kind) for one in given):
                raise ValueError(f"{name} must be a list of {those}, got {given!r}")
        for token in self.stop_tokens:
            if not 0 <= token < vocabulary:
                raise ValueError(f"stop_tokens has {token}, which is not in the vocabulary of {vocabulary} tokens")
        if "" in self.stop_strings:
            raise ValueError("stop_strings has an empty string, which would end every text at once")


STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
        counts = {"max_batch": max_batch, "prefill_chunk": prefill_chunk}
        for name, number in (counts if max_length is None else counts | {"max_length": max_length}).items():
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {number!r}")
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype must be one of {', '.join(map(str, STATE_DTYPES))}, got {state_dtype!r}")
        if any(x.is_meta for x in model.parameters()):
            raise ValueError("model has weights on the meta device, where they have no values: load them first")
        if any(model.model.uses_attention) and max_length is None:
            raise ValueError("max_length must be given: the model has attention layers, whose keys and values grow with every token")
        self.model, self.tokenizer = model.eval(), tokenizer
        self.max_batch, self.prefill_chunk, self.max_length = max_batch, prefill_chunk, max_length
        self.origin = Fingerprint(model)
        self.turn = Turn()
        with torch.inference_mode(False):  # its memory is written to in any mode
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
            raise ValueError(f"requests must be 1 to max_batch = {self.max_batch} at a time, got {len(requests)}")
        for request in requests:
            request.check(self.model.config.vocab_size)
            if request.stop_strings and self.tokenizer is None:
                raise ValueError("stop_strings need a tokenizer: Engine(..., tokenizer=...)")

    def _rows(self, count: int) -> int:
        """The batch size that runs so many requests: the next power of two, if there is room for it."""
        return min(1 << (count - 1).bit_length(), self.max_batch)

    def _load(self, prefixes: Sequence[PrefixState], new_tokens: Sequence[int]) -> None:
        for prefix, new in zip(prefixes, new_tokens, strict=True):
            if self.max_length is not None and len(prefix) + new > self.max_length:
                raise ValueError(f"{len(prefix)} tokens and {new} more exceed the engine's max_length = {self.max_length}: ask for fewer")
        self.step.load(prefixes)

    @torch.no_grad()
    def forced(self, prefixes: Sequence[PrefixState], tokens: Tensor) -> Iterator[Tensor]:
        """Logits [batch, vocabulary] after each given token [batch, time], one decoding step each; a view that the next step overwrites."""
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens must be an integer tensor [batch, time], got {tokens!r:.80}")
        batch, time = tokens.shape
        if not 1 <= batch == len(prefixes) <= self.max_batch:
            rows = f"1 to max_batch = {self.max_batch} rows, one for each of the {len(prefixes)} prefixes"
            raise ValueError(f"tokens must have {rows}, got {batch}")
        if time and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.model.config.vocab_size:
            raise ValueError(f"tokens must be from 0 to {self.model.config.vocab_size - 1}, got {int(tokens.min())} to {int(tokens.max())}")
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
        if strange := [request for request in requests if not isinstance(request, Request)]:
            raise ValueError(f"requests must be Request objects, such as Request('Once'), got {strange[0]!r:.80}")
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
