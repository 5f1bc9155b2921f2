"""Every setting of the service, read once from the environment (`BOXCAL_*`) before anything is built."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What an operator may set; each field is the environment variable `BOXCAL_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix="BOXCAL_", extra="forbid", frozen=True)

    model: str = Field("digits", description="`digits`, `torchvision:NAME`, `onnx:PATH` or `pt2:PATH`.")
    weights: str | None = Field(None, description="Path of the weights, or `DEFAULT` or `random`.")
    labels: Path | None = Field(None, description="File with one label a line, for models that bring none.")
    device: str = Field("auto", description="`auto`, `cpu`, `cuda` or `cuda:N`.")
    precision: Literal["float32", "bfloat16", "float16"] = "float32"

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535)
    data_dir: Path = Field(Path("data"), description="Where the database lives unless DATABASE_URL says.")
    database_url: str | None = Field(None, description="SQLAlchemy URL, when replicas share a registry.")

    max_batch_size: int = Field(32, ge=1, description="Most samples in one forward pass.")
    max_queue_samples: int = Field(1024, ge=1, description="Most samples waiting or in work.")
    max_body_bytes: int = Field(32 * 2**20, ge=1, description="Largest body of /predict and /calibrate.")
    max_upload_bytes: int = Field(2**30, ge=1, description="Largest body of /fit.")
    max_pixels: int = Field(50_000_000, ge=1, description="Most pixels of one picture.")
    decode_threads: int = Field(2, ge=1)
    shutdown_seconds: float = Field(20.0, gt=0, description="How long SIGTERM waits for work in progress.")

    @property
    def registry_url(self) -> str:
        """SQLAlchemy URL of the registry."""
        return self.database_url or f"sqlite:///{(self.data_dir / 'boxcal.sqlite3').absolute()}"
