"""`headmax chat`."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from headmax.cli.options import Checkpoint, Device, File, Key, Name, Number, OptionalCheckpoint, Text, find_device, metavar
from headmax.cli.serve import KEY


def chat(
    target: Checkpoint,
    /,
    system: Text = None,
    max_new_tokens: int = 512,
    greedy: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: Number = None,
    api_key: Key = None,
    model: Name = None,
    chat_template: File = None,
    tokenizer: OptionalCheckpoint = None,
    device: Device = "auto",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, metavar("{float32,bfloat16,float16}")] = None,
    max_length: Number = None,
) -> None:
    """Chat with a checkpoint or a server, in the terminal.

    Each line is a turn; /new starts a new conversation. Ctrl-C ends a reply, Ctrl-D the chat.

    Args:
        target: a model folder, run or hub model, or the address of a server with an OpenAI-compatible API, such as http://127.0.0.1:8000.
        system: system prompt.
        max_new_tokens: maximum number of tokens of a reply.
        greedy: always choose the most likely token.
        temperature: divide the logits by this; below 1 sharpens the distribution.
        top_p: keep the smallest set of most likely tokens with at least this total probability.
        seed: random seed; unless given, each call differs.
        api_key: bearer token for the server; the environment variable HEADMAX_API_KEY keeps it out of process lists.
        model: model of the server; its first unless given.
        chat_template: for a checkpoint: file with a Jinja template, instead of the tokenizer's.
        tokenizer: for a checkpoint: folder with the tokenizer, if the model has none.
        device: where a checkpoint runs; auto takes a GPU if there is one.
        dtype: precision of a checkpoint's weights; bfloat16 on a GPU and float32 on a CPU unless given.
        max_length: longest conversation in tokens; only checkpoints with attention layers need it.
    """
    import secrets

    import torch

    from headmax import durable
    from headmax.generate import GREEDY, Engine, Sampling
    from headmax.generate.terminal import Settings
    from headmax.serve.client import is_address
    from headmax.serve.conversation import Local, converse, converse_with_server
    from headmax.train.loading import load_model, load_tokenizer

    if is_address(target):
        given = {"chat-template": chat_template, "tokenizer": tokenizer, "dtype": dtype, "max-length": max_length}
        for option in (name for name, value in given.items() if value is not None):
            raise ValueError(f"--{option} is for a checkpoint; {target} is a server, which has its own")
        fields = {"max_tokens": max_new_tokens, "temperature": 0.0 if greedy else temperature, "top_p": top_p}
        fields |= {} if seed is None else {"seed": seed}
        return converse_with_server(target, api_key or os.environ.get(KEY), model, fields, system)
    if api_key is not None or model is not None:
        raise ValueError("--api-key and --model are for a server: give its address, such as http://127.0.0.1:8000")
    loaded = load_model(target, find_device(device), dtype and getattr(torch, dtype))
    words = load_tokenizer(tokenizer or target)
    if chat_template is not None:
        words.chat_template = durable.read_text(chat_template)
    rules = GREEDY if greedy else Sampling(temperature, top_p=top_p, seed=secrets.randbelow(2**63) if seed is None else seed)
    engine = Engine(loaded, max_batch=1, max_length=max_length, tokenizer=words)
    return converse(Local(engine, Settings(max_new_tokens, rules, ())), system)
