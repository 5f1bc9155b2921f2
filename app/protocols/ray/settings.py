"""The settings of a replica on a cluster: those of the service, less what the cluster does itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

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
