"""A process that serves one model until it is on_signal to end."""

from __future__ import annotations

import contextlib
import logging
import platform
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn

from headmax import __version__, durable
from headmax.generate.engine import Engine
from headmax.generate.prefix import fingerprint
from headmax.generate.text import end_tokens
from headmax.models import HeadmaxForCausalLM
from headmax.serve.app import make_app
from headmax.serve.batch import Batch, SeparateSteps, SharedBatch
from headmax.serve.cache import PrefixCache
from headmax.serve.config import ServerConfig
from headmax.serve.folder import Folder
from headmax.serve.reading import Pieces
from headmax.serve.scheduler import Scheduler
from headmax.serve.service import Service
from headmax.serve.tokenizer import ServedTokenizer
from headmax.train.loading import has_tokenizer, load_model, load_tokenizer
from headmax.train.parallel import find_device

logger = logging.getLogger("headmax")


def make_batch(model: HeadmaxForCausalLM, config: ServerConfig, state_dtype: torch.dtype = torch.float32) -> Batch:
    """Slots: under --deterministic each by itself on a CPU, and in batches of one size on a GPU, whose kernels treat all rows alike."""
    length = config.max_length if any(model.model.uses_attention) else None
    if config.deterministic and model.device.type != "cuda":
        return SeparateSteps(model, config.max_batch, state_dtype, length)
    return SharedBatch(model, config.max_batch, state_dtype, length, fixed=config.deterministic)


def origin(model: HeadmaxForCausalLM, config: ServerConfig) -> str:
    """What states in a folder depend on; under --deterministic also on all that decides how a sum is rounded."""
    parts = [fingerprint(model), f"chunk {config.chunk}"]
    if config.deterministic:
        device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
        parts += ["deterministic", f"headmax {__version__}", f"torch {torch.__version__}", f"backend {model.config.backend}"]
        parts += [device, platform.machine(), f"{torch.get_num_threads()} threads"]
    return ", ".join(parts)


def make_cache(model: HeadmaxForCausalLM, config: ServerConfig) -> PrefixCache | None:
    if not config.prefix_cache:
        return None
    limits = {str(model.device): config.prefix_cache}
    if model.device.type == "cuda" and config.prefix_cache_host:
        limits["cpu"] = config.prefix_cache_host
    folder = None
    if config.prefix_folder is not None:
        like = Engine(model, max_batch=1, max_length=1).prefill([0]).states
        folder = Folder(config.prefix_folder, config.prefix_folder_size, origin(model, config), like)
    return PrefixCache(config.chunk, limits, folder)


def make_scheduler(model: HeadmaxForCausalLM, config: ServerConfig, state_dtype: torch.dtype = torch.float32) -> Scheduler:
    """With its slots and its prefix cache; not running yet."""
    pieces = Pieces(config.chunk, max(config.piece, config.chunk), config.deterministic)
    batch = make_batch(model, config, state_dtype)
    return Scheduler(model.eval(), batch, pieces=pieces, cache=make_cache(model, config), queue=config.queue)


def make_service(
    model: HeadmaxForCausalLM, config: ServerConfig, tokenizer: Any = None, state_dtype: torch.dtype = torch.float32
) -> Service:
    """Everything but the socket; the scheduler is running."""
    scheduler = make_scheduler(model, config, state_dtype)
    served = None if tokenizer is None else ServedTokenizer(tokenizer)
    return Service(config, scheduler.start(), served, model.config.vocab_size, end_tokens(model, tokenizer))


def load_service(
    checkpoint: str,
    config: ServerConfig,
    device: str,
    *,
    dtype: str | None = None,
    state_dtype: str = "float32",
    tokenizer: str | None = None,
    template: Path | None = None,
) -> Service:
    """`make_service` for a checkpoint, with its own tokenizer or another's, and a chat template from a file if given."""
    model = load_model(checkpoint, find_device(device), getattr(torch, dtype) if dtype else None)
    loaded = load_tokenizer(tokenizer or checkpoint) if tokenizer is not None or has_tokenizer(checkpoint) else None
    if template is not None:
        if loaded is None:
            raise ValueError("--chat-template needs a tokenizer: --tokenizer names a folder with one")
        loaded.chat_template = durable.read_text(template)
    return make_service(model, config, loaded, getattr(torch, state_dtype))


def listen(host: str, port: int) -> socket.socket:
    """A socket on that address; ValueError where it is taken or not ours. Port 0 is any that is free."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port must be 0 to 65535, got {port}")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error}") from None


class Server(uvicorn.Server):
    """Leaves signals to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(service: Service) -> Server:
    config = uvicorn.Config(
        make_app(service),
        http="h11",
        ws="none",
        lifespan="off",
        loop="asyncio",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=service.config.drain,
    )
    return Server(config)


def serve(service: Service, address: socket.socket) -> None:
    """Until SIGTERM or SIGINT, then until the requests under way are answered; a second signal ends it at once."""
    server = make_server(service)
    host, port = address.getsockname()[:2]

    def on_signal(number: int, frame: FrameType | None) -> None:
        server.force_exit = server.force_exit or server.should_exit
        server.should_exit = True

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        logger.info("serving %s on http://%s:%d", service.config.name, f"[{host}]" if ":" in host else host, port)
        server.run(sockets=[address])
    finally:
        service.scheduler.close(timeout=30)
        for number, handler in before.items():
            signal.signal(number, handler)
