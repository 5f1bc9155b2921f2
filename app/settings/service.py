"""Settings of the service, read once at startup: options, environment variables `BOXCAL_*`, a config file."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from boxcal.app.settings import config_file, model_list
from boxcal.app.settings.nearest import nearest

if TYPE_CHECKING:
    from boxcal.models.backends.backbone import Backbone


ORIGIN = re.compile(r"https?://[^/\s]+")


class Settings(BaseSettings):
    """Settings of the service; the field `name` is the environment variable `BOXCAL_NAME`."""

    model_config = SettingsConfigDict(env_prefix="BOXCAL_", extra="forbid", frozen=True)

    model: str = Field(
        default="digits",
        description="Model: `digits`, `torchvision:NAME`, `timm:NAME`, `transformers:FOLDER`, `onnx:PATH` or "
        "`pt2:PATH`; without a model, `logits:K` for K classes, or `logits` with `BOXCAL_LABELS`.",
    )
    weights: str | None = Field(
        default=None,
        description="Weights of a torchvision or timm model: a path or `random`; torchvision: or `DEFAULT`.",
    )
    labels: Path | None = Field(
        default=None, description="File with one class label per line; replaces the labels of the model."
    )
    models: str | None = Field(
        default=None,
        description="Several models in one process, instead of `BOXCAL_MODEL`: `NAME=MODEL,...`, or a "
        "`.toml` file with a table for each. The first one is the default.",
    )
    device: str = Field(default="auto", description="Device: `auto`, `cpu`, `cuda` or `cuda:N`.")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Floating-point type of the backbone."
    )
    optimize: Literal["on", "off"] = Field(
        default="on",
        description="Optimise vision transformers; the logits are checked at startup.",
    )

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 selects a free port.")
    allow_anonymous: bool = Field(
        default=False,
        description="Accept every request without an API key, on any address; for a service behind a gateway "
        "that authenticates clients.",
    )
    allowed_hosts: str | None = Field(
        default=None,
        description="Names that the header `Host` may have, without port, separated by commas; `*` for any. "
        "Default: the names of the loopback interface if the service listens on it, else any.",
    )
    cors_origins: str | None = Field(
        default=None,
        description="Origins whose web pages may use the service, such as `https://example.org`, separated "
        "by commas.",
    )
    tls_cert: Path | None = Field(
        default=None, description="Certificate chain (PEM) for HTTPS; loaded again when the file changes."
    )
    tls_key: Path | None = Field(
        default=None, validate_default=True, description="Private key (PEM) of the certificate."
    )
    tls_client_ca: Path | None = Field(
        default=None, description="Certificates (PEM) of the authorities that sign clients; requires one."
    )
    grpc_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of the Open Inference Protocol over gRPC (extra `grpc`); 0 selects a free port. "
        "Default: no gRPC.",
    )
    uds: Path | None = Field(
        default=None, description="Unix socket to listen on, instead of the address and the port."
    )
    root_path: str = Field(
        default="",
        pattern=r"^(/[^/?#\s]+)*$",
        description="Path under which a proxy serves the service, such as `/boxcal`; it may remove it.",
    )
    data_dir: Path = Field(default=Path("data"), description="Directory for the database and uploads.")
    database_url: str | None = Field(
        default=None, description="SQLAlchemy URL of the registry; default: SQLite in the data directory."
    )

    migrate: Literal["on", "off"] = Field(
        default="on",
        description="Update the tables of a PostgreSQL registry at the start; `off`: by `boxcal migrate`.",
    )
    shared_dir: str | None = Field(
        default=None,
        description="Directory that the replicas share, or `s3://BUCKET/PREFIX` (extra `s3`), for validation "
        "sets: if a replica stops, another one continues its fits. Default: such fits are interrupted.",
    )

    fits: Literal["here", "queue"] = Field(
        default="here",
        description="Where fits run: in the service, or in `boxcal worker` processes that share "
        "`BOXCAL_SHARED_DIR`.",
    )
    workers: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Number of processes that serve on the same port; for models on a CPU and for logits.",
    )

    keep_versions: int | None = Field(
        default=None,
        ge=1,
        description="Newest calibrators per model to keep; older ones are pruned. Default: all.",
    )
    keep_days: float = Field(
        default=30, ge=0, description="Days for which calibrators that were active are not pruned."
    )

    max_batch_size: int = Field(
        default=32, ge=1, description="Maximum number of samples in one forward pass."
    )
    max_queue_samples: int = Field(
        default=1024, ge=1, description="Maximum number of samples in the queue and in progress."
    )
    max_body_bytes: int = Field(
        default=32 * 2**20, ge=1, description="Maximum request body in bytes, except `/fit`."
    )
    max_upload_bytes: int = Field(default=2**30, ge=1, description="Maximum request body of `/fit` in bytes.")
    fit_memory_bytes: int = Field(
        default=8 * 2**30, ge=2**28, description="Memory in bytes that one fit may allocate."
    )
    fit_timeout_seconds: float = Field(default=3600, gt=0, description="Time limit of one fit in seconds.")
    max_pixels: int = Field(default=50_000_000, ge=1, description="Maximum number of pixels in one image.")
    decode_threads: int = Field(default=2, ge=1, description="Number of threads that decode images.")
    timeout_ms: float = Field(
        default=30_000, gt=0, description="Default timeout of a request in milliseconds."
    )
    latency_target_ms: float = Field(
        default=100, gt=0, description="Target for the duration of one batch in milliseconds."
    )
    feedback_rows: int = Field(
        default=50_000, ge=1, description="Predictions to keep for feedback; older ones are deleted."
    )
    auto_refit: Literal["off", "propose", "activate"] = Field(
        default="propose", description="Refit after an alarm: never, to propose a version, or to activate it."
    )
    alarm_webhook: str | None = Field(
        default=None, description="URL that alarms, proposals and activations are posted to."
    )
    alarm_secret: SecretStr | None = Field(
        default=None, description="Key of the signatures of `BOXCAL_ALARM_WEBHOOK`; required with it."
    )
    shutdown_seconds: float = Field(
        default=20.0, gt=0, description="Seconds to finish open requests after SIGTERM."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Format of log lines on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is logged; `debug` adds one line per request."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let arguments come before the environment, and the environment before the config file.

        Raises
        ------
        ConfigFileError
            The config file cannot be read.
        """
        if not (path := os.environ.get(config_file.VARIABLE)):
            return init_settings, env_settings
        found = config_file.read(Path(path), cls.model_fields)
        return init_settings, env_settings, InitSettingsSource(settings_cls, found)

    @model_validator(mode="after")
    def _webhooks_are_signed(self) -> Self:
        if self.alarm_webhook is not None:
            if not self.alarm_webhook.startswith(("http://", "https://")):
                raise ValueError(f"alarm_webhook is {self.alarm_webhook!r}; it must be an http or https URL")
            if self.alarm_secret is None:
                raise ValueError("alarm_webhook needs alarm_secret, the key of its signatures")
        return self

    @model_validator(mode="after")
    def _processes_fit_together(self) -> Self:
        if self.fits == "queue" and self.shared_dir is None:
            raise ValueError("fits is 'queue'; it needs shared_dir, the directory of the validation sets")
        if self.workers > 1 and self.grpc_port == 0:
            raise ValueError("grpc_port is 0; several processes need one port")
        return self

    @field_validator("models")
    @classmethod
    def _can_be_read(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            model_list.read(value)
            for name in ("model", "weights", "labels"):
                if info.data.get(name) != cls.model_fields[name].default:
                    raise ValueError(
                        f"BOXCAL_{name.upper()} is of one model; a `.toml` file can set `{name}` for each"
                    )
        return value

    @field_validator("tls_key")
    @classmethod
    def _belongs_to_a_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if (value is None) != (info.data.get("tls_cert") is None):
            raise ValueError("BOXCAL_TLS_CERT and BOXCAL_TLS_KEY must be set together")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str | None) -> str | None:
        for origin in _entries(value):
            if not ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin such as https://example.org:8443")
        return value

    @property
    def allowed_host_names(self) -> tuple[str, ...]:
        """The entries of `allowed_hosts`."""
        return _entries(self.allowed_hosts)

    @property
    def cors_origin_list(self) -> tuple[str, ...]:
        """The entries of `cors_origins`."""
        return _entries(self.cors_origins)

    @property
    def registry_url(self) -> str:
        """The SQLAlchemy URL of the registry: `database_url`, or SQLite in `data_dir`."""
        return self.database_url or f"sqlite:///{(self.data_dir / 'boxcal.sqlite3').absolute()}"

    def entries(self) -> list[model_list.ModelEntry]:
        """List the models; the first one is the default."""
        return model_list.entries(self)

    def load_backbone(self) -> "Backbone":
        """Load the model of these settings; of several, the first.

        Raises
        ------
        BackboneError
            It cannot be loaded; the message names the file, shape, key or value.
        """
        from boxcal.app.fitting.backbones import BackboneSource  # noqa: PLC0415 - imports numpy

        return BackboneSource.of(self).load()


def _entries(text: str | None) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in (text or "").split(",") if entry.strip())


def unknown_variable(environment: Iterable[str]) -> str | None:
    """Return a message about the first BOXCAL_* variable that is not a setting, or None."""
    given = {name.upper().removeprefix("BOXCAL_") for name in environment if name.upper()[:7] == "BOXCAL_"}
    if "SERVICE_HOST" in given:
        return (
            "BOXCAL_SERVICE_HOST is not a setting: Kubernetes sets it, and BOXCAL_PORT, if a Service is "
            "named boxcal; set `enableServiceLinks: false` in the specification of the pod, or rename "
            "the Service"
        )
    others = ("URL", "API_KEY", "CONFIG")
    known = {*(name.upper() for name in Settings.model_fields), *others}
    for name in sorted(given - known):
        close = nearest(name, known)
        return f"BOXCAL_{name} is not a setting" + (f"; did you mean BOXCAL_{close}?" if close else "")
    return None
