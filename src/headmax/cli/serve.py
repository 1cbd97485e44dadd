"""`headmax serve`."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from headmax.cli.options import Checkpoint, Device, File, Folder, Key, Name, OptionalCheckpoint, Seconds, Size, metavar

KEY = "HEADMAX_API_KEY"


def serve(
    checkpoint: Checkpoint,
    /,
    host: Annotated[str, metavar("HOST")] = "127.0.0.1",
    port: int = 8000,
    max_batch: int = 16,
    prefix_cache: Size = 2 * 2**30,
    deterministic: bool = False,
    api_key: Key = None,
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
    """Serve a model over HTTP, with an OpenAI-compatible API.

    Args:
        checkpoint: a model folder, a run of `headmax train`, or a model on the Hugging Face hub.
        host: address to listen on; 0.0.0.0 for all network interfaces.
        port: port to listen on; 0 for a free one.
        max_batch: maximum number of texts generated at the same time; further requests wait.
        prefix_cache: device memory for the prefix cache, which keeps states of texts read before; 0 turns it off.
        deterministic: give the same request the same bits, whatever else is served or cached.
        api_key: bearer token that clients must send; the environment variable HEADMAX_API_KEY keeps it out of process lists.
        name: model name in requests; the checkpoint's last path component unless given.
        max_length: longest text in tokens, prompt included; it takes memory only in models with attention layers.
        queue: maximum number of waiting prompts; further requests get status 503.
        timeout: time limit of a request, waiting included.
        drain: seconds that running requests have to finish after SIGTERM.
        max_body: maximum size of a request.
        prefix_cache_host: host memory for states that no longer fit into --prefix-cache.
        prefix_folder: folder that keeps states across restarts.
        prefix_folder_size: maximum size of the prefix folder.
        chunk: the prefix cache keeps states at multiples of this many tokens.
        piece: maximum number of prompt tokens to read between two decoding steps; at least --chunk.
        chat_template: file with a Jinja template, instead of the tokenizer's.
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
