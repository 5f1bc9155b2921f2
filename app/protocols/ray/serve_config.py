"""A Serve config as this service uses it: unknown members are refused, where Ray Serve would ignore them.

The settings of a replica on a cluster: those of the service, less what the cluster does itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from boxcal.app.settings import limits
from boxcal.app.settings.service import Settings

EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - others reach every replica through the cluster's proxies
OTHER_REQUESTS = 64
"""Uploads, streams of events and waits for fits, which the queue of predictions does not count."""
OF_THE_CLUSTER = ("host", "port", "workers", "grpc_port", "tls_cert", "tls_key", "tls_client_ca")
OF_SECRETS = ("database_url", "alarm_secret")


def argument_settings(args: Mapping[str, Any]) -> Settings:
    """Check the settings that a Serve config names; the environment adds the others."""
    for name in args:
        if name in OF_THE_CLUSTER:
            raise ValueError(f"args.{name}: the cluster's proxies listen, encrypt and start the replicas")
        if name in OF_SECRETS:
            raise ValueError(f"args.{name} is a secret: set BOXCAL_{name.upper()} in the environment instead")
    try:
        settings = Settings(**{**args, "host": EVERY_ADDRESS})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("args", *first["loc"])))
        raise ValueError(f"{place}: {first['msg']}, got {first['input']!r}") from error
    if not settings.data_dir.is_absolute():
        raise ValueError(f"args.data_dir is {str(settings.data_dir)!r}; it must be an absolute path")
    return settings


def replica_settings(args: Mapping[str, Any]) -> Settings:
    """Read the settings of a replica from the arguments and the environment."""
    settings = argument_settings(args)
    if settings.registry_url.startswith("sqlite"):
        raise ValueError("replicas on a cluster share a registry on PostgreSQL: set BOXCAL_DATABASE_URL")
    return settings


def ongoing_limit(settings: Settings) -> int:
    """Return how many requests a replica may have at once: its own queue shall refuse the next, not Ray's."""
    return limits.MAX_QUEUE_SAMPLES * len(settings.entries()) + OTHER_REQUESTS


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Autoscaling(Strict):
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt
    initial_replicas: PositiveInt | None = None
    target_ongoing_requests: PositiveFloat
    metrics_interval_s: PositiveFloat | None = None
    look_back_period_s: PositiveFloat | None = None
    upscale_delay_s: NonNegativeFloat | None = None
    downscale_delay_s: NonNegativeFloat | None = None


class Actor(Strict):
    num_cpus: NonNegativeFloat | None = None
    num_gpus: NonNegativeFloat | None = None
    memory: PositiveFloat | None = None
    resources: dict[str, float] | None = None
    accelerator_type: str | None = None


class Deployment(Strict):
    name: Literal["boxcal"]
    num_replicas: PositiveInt | None = None
    autoscaling_config: Autoscaling | None = None
    max_replicas_per_node: PositiveInt | None = None
    max_ongoing_requests: PositiveInt | None = None
    graceful_shutdown_timeout_s: NonNegativeFloat | None = None
    health_check_period_s: PositiveFloat | None = None
    health_check_timeout_s: PositiveFloat | None = None
    ray_actor_options: Actor | None = None


class ServedApplication(Strict):
    """The service; its `args` are settings."""

    name: str = Field(min_length=1)
    route_prefix: Literal["/"] = "/"
    import_path: Literal["boxcal.app.protocols.ray.replica:application"]
    args: dict[str, Any] = {}
    deployments: list[Deployment] = []

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        least = ongoing_limit(argument_settings(self.args))
        for deployment in self.deployments:
            given = deployment.max_ongoing_requests
            if given is not None and given < least:
                raise ValueError(
                    f"max_ongoing_requests is {given}; below {least} (the queues and 64) Ray Serve "
                    "holds requests back instead of the service's own queue"
                )
        return self


class Http(Strict):
    host: str | None = None
    port: int | None = Field(default=None, ge=1, le=65535)
    keep_alive_timeout_s: PositiveInt | None = None


class Logging(Strict):
    encoding: Literal["TEXT", "JSON"] | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] | None = None
    enable_access_log: bool | None = None


class ServeConfig(Strict):
    proxy_location: Literal["EveryNode", "HeadOnly"] = "EveryNode"
    http_options: Http | None = None
    logging_config: Logging | None = None
    applications: list[ServedApplication] = Field(min_length=1)


def read_config(path: Path) -> dict[str, Any]:
    """Read a Serve config, or the one in a manifest of the kind RayService, and check it."""
    try:
        documents = [one for one in yaml.safe_load_all(path.read_text("utf-8")) if one is not None]
        manifests = [one for one in documents if isinstance(one, dict) and one.get("kind") == "RayService"]
        config = yaml.safe_load(manifests[0]["spec"]["serveConfigV2"]) if manifests else documents[0]
    except (yaml.YAMLError, LookupError, TypeError) as error:
        raise ValueError(f"{path} has no Serve config: {' '.join(str(error).split())}") from error
    try:
        return ServeConfig.model_validate(config).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
