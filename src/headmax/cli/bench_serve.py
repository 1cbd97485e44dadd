"""`headmax bench serve`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from headmax.cli.bench import say
from headmax.cli.options import Checkpoint, Device, File, Key, Name, Seconds, at_least, find_device, metavar
from headmax.cli.serve import KEY

if TYPE_CHECKING:
    from headmax.serve.load import Timing, Trace


def serve(
    target: Checkpoint,
    /,
    peer: Literal["none", "hf"] = "none",
    conversations: int = 100,
    rate: float = 4.0,
    turns: int = 1,
    prompt: int = 128,
    new_tokens: int = 128,
    documents: int = 0,
    document: int = 4096,
    words: bool = False,
    vocabulary: int = 32_000,
    goal_first: Seconds = 0.5,
    goal_per_token: Seconds = 0.05,
    max_batch: int = 64,
    deterministic: bool = False,
    model: Name = None,
    api_key: Key = None,
    device: Device = "auto",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, metavar("{float32,bfloat16,float16}")] = None,
    seed: int = 0,
    out: File = None,
) -> None:
    """Time a server under a trace of requests, against transformers' generate in batches.

    Conversations start at random times; each turn adds a prompt to the conversation so far.

    Args:
        target: a checkpoint to serve and measure, or the address of a server with an OpenAI-compatible API.
        peer: what to compare with: hf is the same checkpoint through transformers' generate, in batches of the waiting requests.
        conversations: number of conversations.
        rate: conversations that start per second, on average; inf for all at once.
        turns: requests per conversation, each after the answer to the one before.
        prompt: tokens that each turn adds.
        new_tokens: tokens per answer.
        documents: number of documents that conversations start with, each shared by some; 0 for none.
        document: tokens of a document.
        words: send English words instead of token ids, with OpenAI's fields only; answers may then be shorter.
        vocabulary: token ids are drawn below this; a checkpoint's own unless an address is given.
        goal_first: goal for the time to the first token, for goodput.
        goal_per_token: goal for the mean time per further token, for goodput.
        max_batch: maximum batch of a checkpoint's server and of the peer.
        deterministic: serve the checkpoint with --deterministic.
        model: model of the server; its first unless given.
        api_key: bearer token for the server; or set the environment variable HEADMAX_API_KEY.
        device: where a checkpoint runs; auto takes a GPU if there is one.
        dtype: precision of a checkpoint's weights; bfloat16 on a GPU and float32 on a CPU unless given.
        seed: random seed of the prompts and their arrival times.
        out: append the records to this file.
    """
    from headmax import records
    from headmax.serve.client import is_address
    from headmax.serve.load import Goal, Trace, play_over_http, summary
    from headmax.train.loading import load_config

    at_least(1, conversations=conversations, turns=turns, prompt=prompt, new_tokens=new_tokens, document=document, max_batch=max_batch)
    at_least(0, documents=documents)
    if not rate > 0:
        raise ValueError(f"--rate must be positive, got {rate}")
    if out is not None:
        records.check(out)
    remote = is_address(target)
    if peer != "none" and (remote or words):
        raise ValueError("--peer takes a checkpoint, and token ids: leave the address and --words out")
    ids = None if words else vocabulary if remote else load_config(target).vocab_size
    trace = Trace(conversations, rate, turns, prompt, new_tokens, documents, document, ids, seed)
    say(str(trace))
    if remote:
        place, runs = "cpu", iter([(target, play_over_http(trace, target, api_key or os.environ.get(KEY), model))])
    else:
        place = find_device(device)
        runs = of_checkpoint_and_peer(trace, target, place, dtype, max_batch, deterministic, peer)
    make = records.Recorder("serve", place)
    for impl, timings in runs:
        for record in summary(trace, timings, Goal(goal_first, goal_per_token), impl, make, max_batch=None if remote else max_batch):
            say(record.line())
            if out is not None:
                records.append(out, [record])


def of_checkpoint_and_peer(
    trace: Trace, checkpoint: str, device: str, dtype: str | None, max_batch: int, deterministic: bool, peer: str
) -> Iterator[tuple[str, list[Timing]]]:
    """One after the other."""
    yield "headmax", of_checkpoint(trace, checkpoint, device, dtype, max_batch, deterministic)
    if peer == "hf":
        yield peer, of_generate(trace, checkpoint, device, dtype, max_batch)


def of_checkpoint(trace: Trace, checkpoint: str, device: str, dtype: str | None, max_batch: int, deterministic: bool) -> list[Timing]:
    """Through a server of its own, after a first request that is not counted."""
    from dataclasses import replace

    from headmax.serve.load import play_over_http
    from headmax.serve.process import server_process

    longest = trace.document * bool(trace.documents) + trace.turns * (trace.prompt + trace.new)
    options = ["--device", device, "--max-batch", max_batch, "--queue", trace.conversations, "--max-length", 2 * longest]
    options += ["--deterministic"] if deterministic else []
    options += [] if dtype is None else ["--dtype", dtype]
    with server_process(checkpoint, *options) as (_, address):
        play_over_http(replace(trace, conversations=1, rate=math.inf, turns=1, documents=0, seed=trace.seed + 1), address)
        return play_over_http(trace, address)


def of_generate(trace: Trace, checkpoint: str, device: str, dtype: str | None, max_batch: int) -> list[Timing]:
    """Through transformers, after a first request that is not counted."""
    import asyncio
    from dataclasses import replace

    import torch

    from headmax.serve.load import play
    from headmax.serve.peer import Generate
    from headmax.train.loading import load_model

    with Generate(load_model(checkpoint, device, getattr(torch, dtype) if dtype else None), max_batch).running() as answerer:
        asyncio.run(play(replace(trace, conversations=1, rate=math.inf, turns=1, documents=0, seed=trace.seed + 1), answerer))
        return asyncio.run(play(trace, answerer))
