"""Every setting of the service, read once from the environment (`BOXCAL_*`) before anything is built."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What an operator may set; each field is the environment variable `BOXCAL_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix="BOXCAL_", extra="forbid", frozen=True)

    model: str = Field(default="digits", description="`digits`, `torchvision:NAME`, `onnx:PATH`, `pt2:PATH`.")
    weights: str | None = Field(default=None, description="Path of the weights, or `DEFAULT` or `random`.")
    labels: Path | None = Field(
        default=None, description="File with one label a line, where the model has none."
    )
    device: str = Field(default="auto", description="`auto`, `cpu`, `cuda` or `cuda:N`.")
    precision: Literal["float32", "bfloat16", "float16"] = "float32"

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535)
    data_dir: Path = Field(default=Path("data"), description="Where the service keeps what it keeps.")
    database_url: str | None = Field(default=None, description="SQLAlchemy URL of a shared registry.")

    max_batch_size: int = Field(default=32, ge=1, description="Most samples in one forward pass.")
    max_queue_samples: int = Field(default=1024, ge=1, description="Most samples waiting or in work.")
    max_body_bytes: int = Field(default=32 * 2**20, ge=1, description="Largest body that is no upload.")
    max_upload_bytes: int = Field(default=2**30, ge=1, description="Largest body of /fit.")
    max_pixels: int = Field(default=50_000_000, ge=1, description="Most pixels of one image.")
    decode_threads: int = Field(default=2, ge=1, description="Threads that decode images.")
    timeout_ms: float = Field(default=30_000, gt=0, description="For requests that name no timeout.")
    latency_target_ms: float = Field(default=100, gt=0, description="How long one batch should take at most.")
    shutdown_seconds: float = Field(default=20.0, gt=0, description="How long SIGTERM waits for work.")

    @property
    def registry_url(self) -> str:
        """SQLAlchemy URL of the registry."""
        return self.database_url or f"sqlite:///{(self.data_dir / 'boxcal.sqlite3').absolute()}"
