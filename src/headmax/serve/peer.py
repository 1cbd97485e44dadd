"""transformers' `generate` as a server would use it: whoever waits is a batch, and the next begins when it has ended."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from headmax.serve.load import Timing


@dataclass
class Call:
    """One request on its way to a batch."""

    prompt: Sequence[int]
    new: int
    timing: Timing
    answer: asyncio.Future[list[int]]


class Clock(BaseStreamer):
    """Notes when each step's tokens are on the host, which is when a server could send them."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.prompted = False

    def put(self, value: Any) -> None:
        now = time.perf_counter()
        for call in self.calls if self.prompted else ():
            if len(call.timing.arrived) < call.new:
                call.timing.arrived.append(now)
        self.prompted = True

    def end(self) -> None:
        pass


class Generate:
    """Answers by a model's `generate`, at most `max_batch` requests at a time, padded on the left."""

    def __init__(self, model: Any, max_batch: int) -> None:
        self.model, self.max_batch = model, max_batch
        self.calls: queue.Queue[Call | None] = queue.Queue()

    async def ask(self, prompt: Any, new: int, seed: int, timing: Timing) -> Any:
        call = Call(prompt, new, timing, asyncio.get_running_loop().create_future())
        self.calls.put(call)
        return await call.answer

    @contextmanager
    def running(self) -> Iterator[Generate]:
        """Answers come while this is open."""
        thread = threading.Thread(target=self._run, name="generate")
        thread.start()
        try:
            yield self
        finally:
            self.calls.put(None)
            thread.join()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            batch = [call]
            while len(batch) < self.max_batch and not self.calls.empty():
                if (call := self.calls.get()) is None:
                    return
                batch.append(call)
            try:
                answers: Sequence[list[int] | Exception] = self._generate(batch)
            except Exception as error:
                answers = [ValueError(f"generate: {error}")] * len(batch)
            for call, answer in zip(batch, answers, strict=True):
                settle: Any = call.answer.set_exception if isinstance(answer, Exception) else call.answer.set_result
                call.answer.get_loop().call_soon_threadsafe(settle, answer)

    @torch.no_grad()
    def _generate(self, batch: Sequence[Call]) -> list[list[int]]:
        longest, most = max(len(call.prompt) for call in batch), max(call.new for call in batch)
        device = self.model.device
        ids = torch.tensor([[0] * (longest - len(call.prompt)) + list(call.prompt) for call in batch], device=device)
        mask = torch.arange(longest, device=device) >= longest - torch.tensor([[len(call.prompt)] for call in batch], device=device)
        exact = {"max_new_tokens": most, "min_new_tokens": most, "do_sample": True, "pad_token_id": 0}
        rows = self.model.generate(ids, attention_mask=mask.long(), streamer=Clock(batch), **exact)[:, longest:].tolist()
        for call in batch:
            call.timing.tokens, call.timing.prompt = call.new, len(call.prompt)
        return [row[: call.new] for call, row in zip(batch, rows, strict=True)]
