"""Scores requests, with torch alone. A context is read once and its state forked; sequences are packed, not padded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headmax.eval.plan import Batch, Limits, batches, split
from headmax.eval.requests import Request
from headmax.eval.scores import Score, Source
from headmax.generate import GREEDY, Engine, PrefixState
from headmax.generate import Request as Text
from headmax.generate.prefix import Fingerprint
from headmax.layers.mixers.state import RecurrentState
from headmax.models import HeadmaxCache, HeadmaxForCausalLM
from headmax.ops import Packing
from headmax.records import current_commit, describe_device
from headmax.train.parallel import World

Item = TypeVar("Item")
TEXTS = 16
"""Texts that a model with attention layers generates at a time."""
LOGIT_ROWS = 1024
"""Positions whose logits are in memory at a time."""
STATE_BYTES = 2**30
"""Memory for states of sequences on a CPU; on a GPU it is an eighth of the free memory."""
MAX_ROWS = 1024
"""Sequences at a time, at most."""
SHORT = 8
"""Tokens of a context below which reading it again is cheaper than keeping its state."""


class Scorer:
    """Scores requests in batches of at most `batch_tokens`; a longer sequence is read in pieces.

    Models with attention layers have no states to fork: they read every request from its beginning, padded on the right.
    """

    def __init__(
        self, model: HeadmaxForCausalLM, tokenizer: PreTrainedTokenizerBase | None = None, batch_tokens: int | None = None
    ) -> None:
        """`batch_tokens`: unless given, 65,536 on a GPU and 16,384 on a CPU."""
        if batch_tokens is not None and batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
        self.model, self.tokenizer, self.origin = model.eval(), tokenizer, Fingerprint(model)
        self.forks = not any(model.model.uses_attention)
        self.engine: Engine | None = None
        with torch.inference_mode():
            one = model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True).past_key_values
        self.state_bytes: int = one.nbytes()
        gpu = model.device.type == "cuda"
        memory = torch.cuda.mem_get_info(model.device)[0] // 8 if gpu else STATE_BYTES
        tokens = batch_tokens or (65_536 if gpu else 16_384)
        self.limits = Limits(tokens, max(1, min(MAX_ROWS, memory // self.state_bytes)), mixed=tokens if gpu else 128)
        self.rank, self.ranks, self.calls = 0, 1, 0

    def share_with(self, world: World) -> None:
        """Each rank answers its share of the requests of every call: the batches that one process would make, in turns."""
        self.rank, self.ranks = world.rank, world.size
        self.limits = replace(self.limits, rows=min(world.gather(self.limits.rows)))  # free memory differs, batches must not

    def _turns(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Those of this rank. The first batch of a call goes to another rank each time: small tasks have no second one."""
        return (batch for n, batch in enumerate(batches, self.calls) if n % self.ranks == self.rank)

    @property
    def source(self) -> Source:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return Source(str(self.origin), dtype, describe_device(self.model.device), current_commit(), self.state_bytes)

    @torch.no_grad()
    def __call__(self, requests: Iterable[Request]) -> Iterator[list[Score]]:
        """The scores of all requests, batch by batch, in no particular order; equal requests are answered once."""
        self.calls += 1
        by_context: dict[tuple[int, ...], list[Request]] = {}
        for request in {request.id: request for request in requests}.values():
            by_context.setdefault(request.context, []).append(request)
        known = self.model.config.vocab_size
        alone: list[Request] = []
        texts: list[Request] = []
        forked: dict[tuple[int, ...], list[Request]] = {}
        for context, asked in by_context.items():
            shared = self.forks and len(asked) > 1 and len(context) >= SHORT
            for request in asked:
                if (largest := max(chain(context, request.targets))) >= known:
                    raise ValueError(f"token {largest} exceeds the model's vocabulary of {known}: make the requests with its tokenizer")
                if request.kind == "generate" and not self.forks:
                    texts.append(request)
                elif request.kind == "generate" or (shared and request.kind == "loglikelihood"):
                    forked.setdefault(context, []).append(request)
                else:
                    alone.append(request)
        yield from self._alone(alone)
        texts.sort(key=lambda request: len(request.context))
        for start in self._turns(range(0, len(texts), TEXTS)):
            yield from self._texts([(request, None) for request in texts[start : start + TEXTS]])
        yield from self._forked(forked)

    def answers(self, requests: Iterable[Request]) -> dict[str, Score]:
        """The scores of all requests, by id."""
        return {score.id: score for scores in self(requests) for score in scores}

    def _alone(self, requests: list[Request]) -> Iterator[list[Score]]:
        """Requests that do not share their contexts."""
        rows = sorted(((_inputs(request), request) for request in requests), key=lambda row: -len(row[0]))
        for group in self._turns(split([len(tokens) for tokens, _ in rows], self.limits, padded=not self.forks)):
            inputs, asked = [rows[n][0] for n in group], [rows[n][1] for n in group]
            found = self._predict(inputs, [request.targets for request in asked])
            yield _sums(asked, *found, [n for n, request in enumerate(asked) for _ in request.targets])

    def _predict(
        self, rows: Sequence[tuple[int, ...]], targets: Sequence[tuple[int, ...]], cache: HeadmaxCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """`_targets` of all rows, concatenated; a row's targets follow its last tokens."""
        if len(rows) == 1 and len(rows[0]) > self.limits.tokens:
            return self._long(rows[0], targets[0], cache)
        if self.forks:
            hidden, ends = self._packed(rows, cache).last_hidden_state[0], _ends(rows)
        else:
            width = len(rows[0])
            padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.model.device)
            hidden = self.model.model(padded, use_cache=False).last_hidden_state.flatten(0, 1)
            ends = [n * width + len(row) for n, row in enumerate(rows)]
        positions = chain.from_iterable(range(end - len(wanted), end) for end, wanted in zip(ends, targets, strict=True))
        return self._targets(hidden[list(positions)], list(chain.from_iterable(targets)))

    def _long(self, row: tuple[int, ...], targets: tuple[int, ...], cache: HeadmaxCache | None) -> tuple[Tensor, Tensor]:
        """`_predict` of one long row, read in pieces."""
        cache = cache or HeadmaxCache(self.model.config.num_hidden_layers)
        first, parts = len(row) - len(targets), []
        for start in range(0, len(row), self.limits.tokens):
            piece = torch.tensor([row[start : start + self.limits.tokens]], device=self.model.device)
            hidden = self.model.model(piece, past_key_values=cache, use_cache=True).last_hidden_state[0]
            skipped = max(0, first - start)
            if skipped < len(hidden):
                end = start + len(hidden)
                parts.append(self._targets(hidden[skipped:], targets[start + skipped - first : end - first]))
        logprobs, hits = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(hits)

    def _forked(self, by_context: dict[tuple[int, ...], list[Request]]) -> Iterator[list[Score]]:
        """Requests that continue from the state of a shared context."""
        waiting: list[tuple[Request, PrefixState | None]] = []
        for batch in self._turns(batches(list(by_context), self.limits)):
            last, cache = self._read(batch)
            asked = [(n, request) for n, context in enumerate(batch.contexts) for request in by_context[context]]
            if scored := [(n, request) for n, request in asked if request.kind == "loglikelihood"]:
                yield self._continuations(last, cache, scored)
            waiting += [(request, self._prefix(n, request.context, last, cache)) for n, request in asked if request.kind == "generate"]
            if len(waiting) >= self.limits.rows:
                yield from self._texts(waiting)
                waiting = []
        yield from self._texts(waiting)

    def _read(self, batch: Batch) -> tuple[Tensor, HeadmaxCache]:
        """The last hidden state [contexts, hidden], and the recurrent states, after each context."""
        if not batch.prefixes:
            return self._states(batch.contexts, None)
        _, cache = self._states(batch.prefixes, None)
        return self._states(batch.endings, cache.select(torch.tensor(batch.owner, device=self.model.device)))

    def _states(self, rows: Sequence[Sequence[int]], cache: HeadmaxCache | None) -> tuple[Tensor, HeadmaxCache]:
        longest = self.limits.tokens if len(rows) == 1 else max(map(len, rows))
        for start in range(0, max(map(len, rows)), longest):  # a single long row is read in pieces
            pieces = [row[start : start + longest] for row in rows]
            output = self._packed(pieces, cache, keep=True)
            cache = output.past_key_values
        return output.last_hidden_state[0, [end - 1 for end in _ends(pieces)]], cache  # type: ignore[return-value]

    def _packed(self, rows: Sequence[Sequence[int]], cache: HeadmaxCache | None = None, keep: bool = False):  # type: ignore[no-untyped-def]
        """The model's output for packed rows, each continuing from its state in `cache`."""
        tokens = torch.tensor([list(chain.from_iterable(rows))], device=self.model.device)
        packing = Packing([0, *_ends(rows)], self.model.device)
        return self.model.model(tokens, cu_seqlens=packing, past_key_values=cache, use_cache=keep)

    def _continuations(self, last: Tensor, cache: HeadmaxCache, asked: list[tuple[int, Request]]) -> list[Score]:
        """Scores of targets after contexts: the first from the context's last hidden state, the others from the forked state."""
        first = self._targets(last[[n for n, _ in asked]], [request.targets[0] for _, request in asked])
        longer = [k for k, (_, request) in enumerate(asked) if len(request.targets) > 1]
        longer.sort(key=lambda k: -len(asked[k][1].targets))
        parts, owner = [first], list(range(len(asked)))
        for group in split([len(asked[k][1].targets) - 1 for k in longer], self.limits):
            members = [longer[n] for n in group]
            forked = cache.select(torch.tensor([asked[k][0] for k in members], device=self.model.device))
            targets = [asked[k][1].targets for k in members]
            parts.append(self._predict([tokens[:-1] for tokens in targets], [tokens[1:] for tokens in targets], forked))
            owner += [k for k in members for _ in asked[k][1].targets[1:]]
        logprobs, hits = (torch.cat(column) for column in zip(*parts, strict=True))
        return _sums([request for _, request in asked], logprobs, hits, owner)

    def _targets(self, hidden: Tensor, targets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """For targets [n] after hidden states [n, hidden]: log-probabilities, and whether each was the most likely token."""
        target_ids = torch.tensor(targets, device=hidden.device)
        logprobs, hits = [], []
        for h, target in zip(hidden.split(LOGIT_ROWS), target_ids.split(LOGIT_ROWS), strict=True):
            logits = self.model.lm_head(h)
            hits.append(logits.argmax(-1) == target)
            logprobs.append(
                logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).gather(1, target.unsqueeze(1)).squeeze(1)
            )
        return torch.cat(logprobs), torch.cat(hits)

    def _prefix(self, row: int, context: tuple[int, ...], last: Tensor, cache: HeadmaxCache) -> PrefixState:
        states = []
        for layer in cache.layers:
            assert isinstance(layer.state, RecurrentState)
            states.append(RecurrentState(layer.state.recurrent[row : row + 1].clone(), tuple(x[row : row + 1] for x in layer.state.conv)))
        return PrefixState(torch.tensor(context), tuple(states), self.model.lm_head(last[row]).float(), self.origin)

    def _texts(self, asked: Sequence[tuple[Request, PrefixState | None]]) -> Iterator[list[Score]]:
        """Greedy continuations, until a stop string, the end-of-text token or the request's most tokens; contexts may be read already."""
        rows = self.limits.rows if self.forks else TEXTS
        order = sorted(asked, key=lambda row: len(row[0].context))
        for start in range(0, len(order), rows):
            members = order[start : start + rows]
            texts = [
                Text(request.context if prefix is None else (), prefix, request.max_new_tokens, GREEDY, self.end_tokens, request.until)
                for request, prefix in members
            ]
            longest = max(len(request.context) + request.max_new_tokens for request, _ in members)
            completions = self._engine(rows, longest).generate(texts)
            yield [self._text(request, completion.tokens) for (request, _), completion in zip(members, completions, strict=True)]

    def _text(self, request: Request, tokens: list[int]) -> Score:
        """Decodes the text as a whole: token by token, invalid UTF-8 would decode differently."""
        assert self.tokenizer is not None
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return Score(request.id, text=min((text.partition(stop)[0] for stop in request.until), key=len, default=text), tokens=tokens)

    @property
    def end_tokens(self) -> list[int]:
        """End-of-text tokens of the tokenizer and the model, as in the harness."""
        model_ends = self.model.config.eos_token_id
        ends = {
            None if self.tokenizer is None else self.tokenizer.eos_token_id,
            *(model_ends if isinstance(model_ends, list) else [model_ends]),
        }
        return sorted(token for token in ends if token is not None and token < self.model.config.vocab_size)

    def _engine(self, rows: int, length: int) -> Engine:
        """A single engine for recurrent models; with attention, one per batch, with memory for its longest text."""
        if self.tokenizer is None:
            raise ValueError("generating text needs a tokenizer: add one to the model's folder, or give --tokenizer")
        if self.engine is None or not self.forks:
            dtype = torch.promote_types(self.model.dtype, torch.float32)
            limit = None if self.forks else length
            self.engine = Engine(self.model, max_batch=rows, state_dtype=dtype, max_length=limit, tokenizer=self.tokenizer)
            self.engine.origin = self.origin  # computed once, from all weights
        return self.engine


def _inputs(request: Request) -> tuple[int, ...]:
    """Tokens to read to predict the targets: for loglikelihood, the context and all targets but the last."""
    return request.context if request.kind == "recall" else request.context + request.targets[:-1]


def _ends(rows: Sequence[Sequence[int]]) -> list[int]:
    total, ends = 0, []
    for row in rows:
        total += len(row)
        ends.append(total)
    return ends


def _sums(requests: Sequence[Request], logprobs: Tensor, hits: Tensor, owner: Sequence[int]) -> list[Score]:
    """Scores from those of single targets, `owner` being the request of each. Summed exactly: a document has thousands of targets."""
    parts: list[list[float]] = [[] for _ in requests]
    counts = [0] * len(requests)
    for n, logprob, hit in zip(owner, logprobs.tolist(), hits.tolist(), strict=True):
        parts[n].append(logprob)
        counts[n] += hit
    if not bool(logprobs.isfinite().all()):
        raise ValueError("log-probabilities are not finite: the model's weights hold NaN or infinity, or overflow in this dtype")
    return [Score(request.id, math.fsum(part), count) for request, part, count in zip(requests, parts, counts, strict=True)]
