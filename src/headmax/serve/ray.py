"""Many servers of one model with Ray Serve: `serve run headmax.serve.ray:app checkpoint=tiny replicas=2`."""

# No postponed annotations here: Ray reads the type of what `app` takes.
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from headmax.serve.config import ServerConfig
from headmax.serve.gateway import Gateway, answers, ranked


class Fleet(BaseModel):
    """What `app` takes; all other fields are those of `ServerConfig`, sizes in bytes."""

    model_config = ConfigDict(extra="allow")

    checkpoint: str
    replicas: int = Field(1, ge=1, description="Servers, at least.")
    max_replicas: int | None = Field(None, ge=1, description="Servers at most: Ray starts and ends them by how many requests each has.")
    gpus: float = Field(0.0, ge=0, description="Of each server.")
    cpus: float = Field(1.0, ge=0, description="Of each server.")
    device: str = "auto"
    dtype: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = Field(None, description="A file.")

    def server(self) -> ServerConfig:
        """ValueError names a field that there is not."""
        more = dict(self.model_extra or {})
        known = {field.name for field in dataclasses.fields(ServerConfig)} - {"prefix_folder", "prefix_folder_size"}
        if unknown := sorted(set(more) - known):
            raise ValueError(f"{unknown[0]}: unknown; there are {', '.join(sorted({*known, *Fleet.model_fields}))}")
        return TypeAdapter(ServerConfig).validate_python({"name": self.checkpoint.rstrip("/").rpartition("/")[2]} | more)


class PrefixRouter(RequestRouter):
    """Requests that begin alike go to the same server, as long as it takes more; then to the next in their order."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        key = "" if pending_request is None or not pending_request.args else pending_request.args[0]
        key = key or str(id(pending_request))  # nothing to keep together: anywhere
        return [[replica] for replica in ranked(key, candidate_replicas, lambda replica: replica.replica_id.unique_id)]


class Model:
    """One server, without a socket."""

    def __init__(self, fleet: Fleet) -> None:
        from headmax.serve.app import make_app
        from headmax.serve.server import load_service

        self.service = load_service(
            fleet.checkpoint,
            fleet.server(),
            fleet.device,
            dtype=fleet.dtype,
            tokenizer=fleet.tokenizer,
            template=None if fleet.chat_template is None else Path(fleet.chat_template),
        )
        self.name = serve.get_replica_context().replica_id.unique_id
        self.app = make_app(self.service)

    async def call(self, key: str, request: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """The answer's ASGI messages. `key` is for `PrefixRouter`."""
        async with contextlib.aclosing(answers(self.app, request, body)) as messages:  # type: ignore[type-var]
            async for message in messages:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-served-by", self.name.encode())]
                yield dict(message)

    def check_health(self) -> None:
        """Ray replaces a server where this raises."""
        if self.service.scheduler.broken is not None:
            raise RuntimeError(f"the scheduler has failed: {self.service.scheduler.broken}")

    def __del__(self) -> None:
        if hasattr(self, "service"):
            self.service.scheduler.close(timeout=10)


@serve.ingress()
class Front:
    """Takes requests and hands them on."""

    def __init__(self, model: DeploymentHandle, max_body: int) -> None:
        async def call(key: str, request: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
            response = model.call.options(stream=True).remote(key, request, body)
            try:
                async for message in response:
                    yield message
            finally:
                response.cancel()

        self.gateway = Gateway(call, (RayError, RayServeException), max_body)

    def __serve_build_asgi_app__(self) -> Gateway:
        return self.gateway


def app(fleet: Fleet) -> serve.Application:
    """For `serve run headmax.serve.ray:app checkpoint=... replicas=...`, and for Ray's configuration files."""
    config = fleet.server()
    most = fleet.max_replicas or fleet.replicas
    scale: dict[str, Any] = {"num_replicas": fleet.replicas}
    if most > fleet.replicas:
        scale = {"autoscaling_config": {"min_replicas": fleet.replicas, "max_replicas": most, "target_ongoing_requests": config.max_batch}}
    model = serve.deployment(
        Model,
        name="Model",
        **scale,
        max_ongoing_requests=2 * config.max_batch,
        ray_actor_options={"num_gpus": fleet.gpus, "num_cpus": fleet.cpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=config.drain,
        health_check_period_s=5,
    )
    front = serve.deployment(Front, name="Front", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
    return front.bind(model.bind(fleet), config.max_body)
