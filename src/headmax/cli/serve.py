"""`headmax serve`."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from headmax.cli.options import Checkpoint, Device, File, Folder, Name, OptionalCheckpoint, Seconds, Size, metavar

KEY = "HEADMAX_API_KEY"


def serve(
    checkpoint: Checkpoint,
    /,
    host: Annotated[str, metavar("HOST")] = "127.0.0.1",
    port: int = 8000,
    max_batch: int = 16,
    prefix_cache: Size = 2 * 2**30,
    deterministic: bool = False,
    api_key: Name = None,
    name: Name = None,
    max_length: int = 32768,
    queue: int = 256,
    timeout: Seconds = 600.0,
    drain: int = 60,
    max_body: Size = 8 * 2**20,
    prefix_cache_host: Size = 0,
    prefix_folder: Folder = None,
    prefix_folder_size: Size = 16 * 2**30,
    chunk: int = 256,
    piece: int = 1024,
    chat_template: File = None,
    tokenizer: OptionalCheckpoint = None,
    device: Device = "auto",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, metavar("{float32,bfloat16,float16}")] = None,
    state_dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Answer requests over HTTP as OpenAI's interface does, many at a time.

    Args:
        checkpoint: a model folder, a run of `headmax train`, or a model on the Hugging Face hub.
        host: address to listen on; 0.0.0.0 is every one this machine has.
        port: port to listen on; 0 takes a free one.
        max_batch: most texts that are generated at a time; more wait.
        prefix_cache: device memory for states of texts read before; 0 turns the prefix cache off.
        deterministic: the same request gives the same bits, whatever else is served and cached.
        api_key: what callers must send as a bearer token; the environment variable HEADMAX_API_KEY does not show in lists of processes.
        name: what requests call the model; the checkpoint's last path component unless given.
        max_length: longest text in tokens, prompt included; memory is taken for it only in models with attention layers.
        queue: most prompts that wait; more are answered with status 503.
        timeout: seconds a request may take, waiting included.
        drain: seconds that requests under way have to end after SIGTERM.
        max_body: largest body of a request.
        prefix_cache_host: host memory for states that no longer fit the device's.
        prefix_folder: folder to keep states in across restarts.
        prefix_folder_size: most disk space it takes.
        chunk: states are kept after multiples of this many tokens.
        piece: most tokens of prompts to read between two steps of those that generate; a chunk at least.
        chat_template: file with a Jinja template, in place of the tokenizer's.
        tokenizer: checkpoint or folder with the tokenizer, if the model has none.
        device: where to run; auto takes a GPU if there is one.
        dtype: precision of the weights; bfloat16 on a GPU and float32 on a CPU unless given.
        state_dtype: precision of the recurrent states.
    """
    from headmax.serve.config import ServerConfig
    from headmax.serve.server import listen, load_service
    from headmax.serve.server import serve as run
    from headmax.train.loading import find_source

    config = ServerConfig(
        name=name or find_source(checkpoint).resolve().name,
        max_batch=max_batch,
        max_length=max_length,
        queue=queue,
        chunk=chunk,
        piece=piece,
        prefix_cache=prefix_cache,
        prefix_cache_host=prefix_cache_host,
        prefix_folder=prefix_folder,
        prefix_folder_size=prefix_folder_size,
        deterministic=deterministic,
        api_key=os.environ.get(KEY) or None if api_key is None else api_key,
        timeout=timeout,
        max_body=max_body,
        drain=drain,
    )
    address = listen(host, port)
    service = load_service(checkpoint, config, device, dtype=dtype, state_dtype=state_dtype, tokenizer=tokenizer, template=chat_template)
    run(service, address)
