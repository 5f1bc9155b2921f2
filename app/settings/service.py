"""Settings of the service, read once at startup: options, environment variables `BOXCAL_*`, a config file."""

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from boxcal.app.settings import config_file, model_list
from boxcal.calibrators.errors import nearest

UNIX = "unix:"
CONSTANT = "its value is fixed (boxcal.app.settings.limits)"
REMOVED = {
    "UDS": "set BOXCAL_HOST=unix:PATH",
    "MODELS": "BOXCAL_MODEL takes the list of models",
    "DECODE_THREADS": "the device decides how many threads decode",
    "OPTIMIZE": "models are always optimized",
    **dict.fromkeys(
        ("KEEP_DAYS", "MAX_QUEUE_SAMPLES", "MAX_BODY_BYTES", "MAX_UPLOAD_BYTES", "FIT_TIMEOUT_SECONDS"),
        CONSTANT,
    ),
    **dict.fromkeys(("LATENCY_TARGET_MS", "MAX_PIXELS", "SHUTDOWN_SECONDS", "TIMEOUT_MS"), CONSTANT),
}
"""Settings of earlier versions, and what replaces them."""
MAY_BE_EMPTY = ("root_path", "allowed_hosts", "cors_origins")
"""An empty path or list is one; an empty address, file or secret is a template that was not filled in."""
BUCKET = re.compile(r"s3://[^/\s]")
ORIGIN = re.compile(r"https?://[^/\s]+")


class Settings(BaseSettings):
    """Settings of the service; the field `name` is the environment variable `BOXCAL_NAME`."""

    model_config = SettingsConfigDict(env_prefix="BOXCAL_", extra="forbid", frozen=True)

    model: str = Field(
        default="digits",
        description="Model: `digits`, `torchvision:NAME`, `timm:NAME`, `transformers:FOLDER`, `onnx:PATH` or "
        "`pt2:PATH`; without a model, `logits:K` for K classes, or `logits` with `BOXCAL_LABELS`. Several: "
        "`NAME=MODEL,...`, or a `.toml` file with a table for each; the first one is the default.",
    )
    weights: str | None = Field(
        default=None,
        description="Weights of a torchvision or timm model: a path or `random`; torchvision: or `DEFAULT`.",
    )
    labels: Path | None = Field(
        default=None, description="File with one class label per line; replaces the labels of the model."
    )
    device: str = Field(default="auto", description="Device: `auto`, `cpu`, `cuda` or `cuda:N`.")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Floating-point type of the backbone."
    )

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on, or `unix:PATH` for a socket instead of a port.",
    )
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

    max_batch_size: int = Field(
        default=32, ge=1, description="Maximum number of samples in one forward pass."
    )
    fit_memory_bytes: int = Field(
        default=8 * 2**30, ge=2**28, description="Memory in bytes that one fit may allocate."
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
        """Let arguments come before the environment, and the environment before the config file."""
        if not (path := os.environ.get(config_file.VARIABLE)):
            return init_settings, env_settings
        found = config_file.read(Path(path), cls.model_fields)
        return init_settings, env_settings, InitSettingsSource(settings_cls, found)

    @model_validator(mode="after")
    def _webhooks_are_signed(self) -> Self:
        if self.alarm_webhook is not None:
            try:
                parsed = urlsplit(self.alarm_webhook)
                is_one = parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
            except ValueError:
                is_one = False
            if not is_one:
                raise ValueError("alarm_webhook must be an http or https URL with a host and a valid port")
            if self.alarm_secret is None:
                raise ValueError("alarm_webhook needs alarm_secret, the key of its signatures")
        return self

    @model_validator(mode="after")
    def _processes_fit_together(self) -> Self:
        if self.fits == "queue" and self.shared_dir is None:
            raise ValueError("fits is 'queue'; it needs shared_dir, the directory of the validation sets")
        if self.grpc_port and self.grpc_port == self.port and self.uds is None:
            raise ValueError(f"grpc_port is {self.grpc_port}, which is the port of HTTP")
        if self.workers > 1 and self.grpc_port == 0:
            raise ValueError("grpc_port is 0; several processes need one port")
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _is_filled_in(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and not value.strip() and info.field_name not in MAY_BE_EMPTY:
            raise ValueError("it is empty; leave it out for the default")
        return value

    @field_validator("model")
    @classmethod
    def _can_be_read(cls, value: str) -> str:
        if model_list.is_list(value):
            model_list.read(value)
        return value

    @model_validator(mode="after")
    def _models_have_their_files(self) -> Self:
        if model_list.is_list(self.model):
            for name in ("weights", "labels"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"BOXCAL_{name.upper()} is of one model; a `.toml` file can set `{name}` for each"
                    )
        return self

    @field_validator("tls_key")
    @classmethod
    def _belongs_to_a_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if (value is None) != (info.data.get("tls_cert") is None):
            raise ValueError("BOXCAL_TLS_CERT and BOXCAL_TLS_KEY must be set together")
        return value

    @field_validator("host")
    @classmethod
    def _names_a_socket(cls, value: str) -> str:
        if value == UNIX:
            raise ValueError("'unix:' names no socket; write unix:PATH")
        return value

    @field_validator("tls_client_ca")
    @classmethod
    def _is_asked_for(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("tls_cert") is None:
            raise ValueError("it needs BOXCAL_TLS_CERT: without HTTPS no client shows a certificate")
        return value

    @field_validator("shared_dir")
    @classmethod
    def _is_a_folder_or_bucket(cls, value: str | None) -> str | None:
        if value is not None and ("://" in value or value.startswith("s3:")) and not BUCKET.match(value):
            raise ValueError(f"{value!r} is neither a directory nor s3://BUCKET/PREFIX")
        return value

    @field_validator("data_dir")
    @classmethod
    def _is_text(cls, value: Path) -> Path:
        try:
            str(value).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{str(value)!a} holds bytes that are no text in this locale") from error
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str | None) -> str | None:
        for origin in _entries(value):
            if not ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin such as https://example.org:8443")
        return value

    @property
    def uds(self) -> Path | None:
        """The Unix socket to listen on; None for the address and the port."""
        return Path(self.host.removeprefix(UNIX)) if self.host.startswith(UNIX) else None

    @property
    def address(self) -> str:
        """The address to listen on; beside a Unix socket, gRPC listens on the loopback interface."""
        return "127.0.0.1" if self.uds is not None else self.host

    @property
    def host_of_urls(self) -> str:
        """The address as it stands before a port: one of IPv6 in brackets."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def listen(self, port: int) -> socket.socket:
        """Listen on a port of the address; `::` is every address, also those of IPv4."""
        family, both = socket.AF_INET6 if ":" in self.address else socket.AF_INET, self.address == "::"
        return socket.create_server((self.address, port), family=family, dualstack_ipv6=both)

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
        file = str((self.data_dir / "boxcal.sqlite3").absolute())
        return self.database_url or "sqlite:///" + file.replace("%", "%25").replace("?", "%3F")

    def entries(self) -> list["ModelEntry"]:
        """List the models; the first one is the default."""
        if not model_list.is_list(self.model):
            return [ModelEntry("", self)]
        found = []
        for name, table in model_list.read(self.model).items():
            values = table.model_dump(exclude={"share", "lower", "upper"}, exclude_none=True)
            of_model = self.model_copy(update=values)
            found.append(ModelEntry(name, of_model, table.share, table.lower, table.upper))
        return found


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of the service."""

    name: str  # Empty if only `BOXCAL_MODEL` is set: the model then has the name of its backbone
    settings: Settings  # Of the service, with those of this model
    share: float = 1.0
    lower: Any = 0.0
    upper: Any = 1.0


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
    if removed := next((name for name in REMOVED if name in given), None):
        return f"BOXCAL_{removed} is no longer a setting: {REMOVED[removed]}"
    others = ("URL", "API_KEY", "CONFIG")
    known = {*(name.upper() for name in Settings.model_fields), *others}
    for name in sorted(given - known):
        close = nearest(name, known)
        return f"BOXCAL_{name} is not a setting" + (f"; did you mean BOXCAL_{close}?" if close else "")
    return None
