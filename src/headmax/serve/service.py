"""What the server answers on each path."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

import torch
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from headmax import durable
from headmax.generate.sampling import Sampling
from headmax.serve import pages
from headmax.serve.config import ServerConfig
from headmax.serve.errors import ApiError, json_response
from headmax.serve.exchange import EventLoop, EventStream, Exchange
from headmax.serve.job import Job
from headmax.serve.metrics import CONTENT_TYPE
from headmax.serve.reply import ChatReply, Continuation, Extras, Reply
from headmax.serve.scheduler import Scheduler
from headmax.serve.schema import ChatBody, CompletionBody, Generation, check
from headmax.serve.tokenizer import ServedTokenizer

MOST_TOGETHER = 1024
"""Choices of all prompts of a request."""


def extras(body: Generation) -> Extras:
    return Extras(body.return_token_ids, body.return_gates, body.stream_options is not None and body.stream_options.include_usage)


class Service:
    """The endpoints of one model."""

    def __init__(
        self, config: ServerConfig, scheduler: Scheduler, tokenizer: ServedTokenizer | None, vocabulary: int, ends: frozenset[int]
    ) -> None:
        self.config, self.scheduler, self.tokenizer, self.vocabulary, self.ends = config, scheduler, tokenizer, vocabulary, ends
        self.created = int(time.time())
        self.loop: EventLoop | None = None

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return json_response(self._model())

    async def health(self, request: Request) -> Response:
        if self.scheduler.broken is not None:
            raise ApiError(503, f"the server has failed: {self.scheduler.broken}", code="failed")
        if self.scheduler.closing:
            raise ApiError(503, "the server is shutting down", code="closed")
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self.scheduler.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return json_response(pages.openapi(self.config.name))

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(pages.docs(self.config.name))

    async def page(self, request: Request) -> Response:
        return pages.part(request.url.path)

    async def completions(self, request: Request) -> Response:
        body = check(CompletionBody, await self._json(request))
        self._check_model(body.model)
        if body.best_of not in (None, body.n):
            raise ApiError(400, f"best_of: must be n = {body.n} or left out, got {body.best_of}", param="best_of")
        if len(body.prompt) > self.config.queue or len(body.prompt) * body.n > MOST_TOGETHER:
            most = f"at most {self.config.queue} prompts, and {MOST_TOGETHER} choices of them all"
            raise ApiError(400, f"prompt: a request may have {most}", param="prompt")
        prompts = [await self._tokens(prompt) for prompt in body.prompt]
        starts = [""] * len(prompts)
        if body.echo and self.tokenizer is not None:
            starts = [
                given if isinstance(given, str) else self.tokenizer.decode(ids) for given, ids in zip(body.prompt, prompts, strict=True)
            ]
        choices = self._continuations(body, prompts, starts)
        reply = Reply(self.config.name, self.tokenizer, choices, logprobs=body.logprobs, extras=extras(body))
        jobs = self._jobs(body, prompts, body.max_tokens, body.logprobs, scored=body.echo and body.logprobs is not None)
        return await self._answer(request, body, jobs, reply)

    async def chat(self, request: Request) -> Response:
        body = check(ChatBody, await self._json(request))
        self._check_model(body.model)
        if self.tokenizer is None:
            raise ApiError(400, "this server has no tokenizer: use /v1/completions with token ids")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, 'top_logprobs: needs logprobs; send "logprobs": true too', param="top_logprobs")
        self._check_characters(self.tokenizer, sum(len(message.content) for message in body.messages), "messages")
        ids = await self.tokenizer.encode_chat([message.model_dump(exclude_none=True) for message in body.messages])
        self._check_tokens(ids, "messages")
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        limit = max(1, self.config.max_length - len(ids)) if asked is None else asked
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        choices = self._continuations(body, [ids], [""])
        reply = ChatReply(self.config.name, self.tokenizer, choices, logprobs=logprobs, extras=extras(body))
        return await self._answer(request, body, self._jobs(body, [ids], limit, logprobs), reply)

    async def _answer(self, request: Request, body: Generation, jobs: Sequence[Job], reply: Reply) -> Response:
        if self.loop is None:
            self.loop = EventLoop(asyncio.get_running_loop())
        reply.prompt_tokens = sum(len(job.tokens) for job in jobs)
        exchange = Exchange(self.scheduler, self.loop, jobs, reply, self.config.timeout)
        if body.stream:
            return EventStream(exchange)
        return await exchange.whole(request)

    def _continuations(self, body: Generation, prompts: Sequence[Sequence[int]], starts: Sequence[str]) -> list[Continuation]:
        """The choices of all prompts, whose texts begin with `starts`."""
        if body.stop and self.tokenizer is None:
            raise ApiError(400, "stop: this server has no tokenizer; use stop_token_ids", param="stop")
        pairs = [pair for pair in zip(prompts, starts, strict=True) for _ in range(body.n)]
        return [Continuation(index, self.tokenizer, body.stop, prompt, start) for index, (prompt, start) in enumerate(pairs)]

    def _jobs(
        self, body: Generation, prompts: Sequence[Sequence[int]], limit: int, logprobs: int | None, scored: bool = False
    ) -> list[Job]:
        """One for each prompt; nobody listens to them yet."""
        for token in body.stop_token_ids:
            if not 0 <= token < self.vocabulary:
                raise ApiError(400, f"stop_token_ids: {token} is not in the vocabulary of {self.vocabulary} tokens", param="stop_token_ids")
        if body.return_gates and (len(prompts) * body.n > 1 or body.stop):
            raise ApiError(400, "return_gates: needs a single choice, and stop_token_ids in place of stop", param="return_gates")
        if body.return_gates and self.scheduler.model.config.head_gate is None:
            raise ApiError(400, "return_gates: this model has no head gates", param="return_gates")
        stops = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else self.ends)
        jobs = []
        for number, ids in enumerate(prompts):
            if len(ids) + limit > self.config.max_length:
                message = f"{len(ids)} tokens of prompt and {limit} new ones exceed the limit of {self.config.max_length} tokens"
                raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
            jobs.append(
                Job(
                    torch.tensor(ids, dtype=torch.int64),
                    self._rules(body, number),
                    limit,
                    listen=lambda event: None,
                    stop_tokens=stops,
                    logprobs=logprobs is not None,
                    likeliest=bool(logprobs),
                    scored=scored,
                    watched=body.return_gates,
                )
            )
        return jobs

    def _rules(self, body: Generation, prompt: int) -> list[Sampling]:
        """Of each choice: with a seed the same for every prompt."""
        seed = secrets.randbelow(2**63) if body.seed is None else body.seed
        top_k = None if body.top_k is None or body.top_k < 1 else body.top_k
        return [
            Sampling(
                temperature=body.temperature,
                top_k=top_k,
                top_p=body.top_p,
                min_p=body.min_p,
                repetition_penalty=body.repetition_penalty,
                seed=(seed + n) % 2**63,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
            )
            for n in range(body.n)
        ]

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ApiError(400, "prompt: this server has no tokenizer; give token ids", param="prompt")
            self._check_characters(self.tokenizer, len(prompt), "prompt")
            prompt = await self.tokenizer.encode(prompt)
        self._check_tokens(prompt, "prompt")
        return prompt

    def _check_characters(self, tokenizer: ServedTokenizer, count: int, param: str) -> None:
        """Before a text that is too long in any case keeps the tokenizer from others, for seconds a megabyte."""
        if count > self.config.max_length * tokenizer.longest:
            message = f"{param}: {count} characters exceed the limit of {self.config.max_length} tokens"
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def _check_tokens(self, ids: Sequence[int], param: str) -> None:
        if not ids:
            raise ApiError(400, f"{param}: empty; give at least one token", param=param)
        if len(ids) > self.config.max_length:
            message = f"{param}: {len(ids)} tokens exceed the limit of {self.config.max_length}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise ApiError(400, f"{param}: ids must be from 0 to {self.vocabulary - 1}, got {min(ids)} to {max(ids)}", param=param)

    def _check_model(self, name: str) -> None:
        if name != self.config.name:
            raise ApiError(404, f"model {name!r} is not served here; {self.config.name!r} is", param="model", code="model_not_found")

    def _model(self) -> dict[str, object]:
        return {"id": self.config.name, "object": "model", "created": self.created, "owned_by": "headmax"}

    async def _json(self, request: Request) -> object:
        """The body of a request, within the limits of size and time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"content-type must be application/json, got {kind!r}")
        try:
            async with asyncio.timeout(self.config.body_timeout):
                raw = await self._body(request)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self.config.body_timeout:g} seconds") from None
        try:
            return durable.parse_json(raw.decode())
        except ValueError as error:  # UnicodeDecodeError among them
            raise ApiError(400, f"the body must be JSON in UTF-8: {str(error)[:200]}") from None

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.config.max_body:
                raise ApiError(413, f"the body has more than {self.config.max_body} bytes", code="body_too_large")
            parts.append(part)
        return b"".join(parts)
