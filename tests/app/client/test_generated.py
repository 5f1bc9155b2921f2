"""Clients that other tools generate from the OpenAPI document, against the running service."""

from __future__ import annotations

import base64
import importlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

LOGITS = [[3.0, 1.0, *[0.0] * 8]]
TYPESCRIPT = Path(__file__).parent / "typescript"


def encoded_image() -> str:
    file = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def validation_csv() -> bytes:
    rows = ["label," + ",".join(map(str, range(10)))]
    rows += [f"{n % 10}," + ",".join(str(3.0 * (n % 10 == k) + n / 40) for k in range(10)) for n in range(40)]
    return "\n".join(rows).encode()


@pytest.fixture(scope="module")
def document(service: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("openapi") / "openapi.json"
    path.write_bytes(httpx.get(f"{service.url}/openapi.json").content)
    return path


def test_openapi_python_client(document: Path, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model reads images, so rows of features and texts are refused."""
    package = "generated_boxcal"
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", str(document)]
    target = document.with_name(package)
    subprocess.run([*command, "--output-path", str(target), "--meta", "none"], check=True, timeout=60)
    monkeypatch.syspath_prepend(document.parent)

    def route(path: str) -> Any:
        return importlib.import_module(f"{package}.api.{path}")

    models, types = (importlib.import_module(f"{package}.{name}") for name in ("models", "types"))
    expected = httpx.post(f"{service.url}/calibrate", json={"logits": LOGITS}).json()
    with importlib.import_module(f"{package}.client").Client(
        base_url=service.url, timeout=httpx.Timeout(60)
    ) as client:
        body = models.CalibrateJsonBodyType0.from_dict({"logits": LOGITS})
        answer = route("predict.calibrate").sync(client=client, body=body)
        assert answer.to_dict()["predictions"] == expected["predictions"]
        options = {"options": {"probabilities": True, "bounds": {"upper": 0.5}}}
        body = models.CalibrateJsonBodyType0.from_dict({"logits": LOGITS} | options)
        answer = route("predict.calibrate").sync(client=client, body=body)
        assert max(answer.predictions[0].probabilities) == 0.5
        body = models.PredictJsonBody.from_dict({"inputs": [{"image": encoded_image()}]})
        predicted = route("predict.predict").sync(client=client, body=body)
        assert predicted.predictions[0].label in set("0123456789")
        body = models.CalibrateJsonBodyType0.from_dict({"logits": [[1.0, 2.0]]})
        problem = route("predict.calibrate").sync(client=client, body=body)
        assert (problem.status, type(problem).__name__) == (422, "Problem")
        listed = route("calibrators.list_calibrators").sync(client=client).calibrators
        assert 0 in [one.version for one in listed]
        assert route("model.get_model").sync(client=client).name == "digits"
        start_fit = route("fits.start_fit").sync
        file = types.File(io.BytesIO(validation_csv()), "validation.csv", "text/csv")
        never = models.StartFitFilesBodyActivate.NEVER
        queued = start_fit(client=client, body=models.StartFitFilesBody(file, method="ts", activate=never))
        assert (queued.samples, queued.method) == (40, "ts"), queued
        for member, samples, says in (
            ("logits", LOGITS, "20"),
            ("texts", ["a"] * 40, ""),
            ("features", [{"age": 3}] * 40, ""),
        ):
            wrong = {member: samples, "labels": [0] * len(samples), "method": "ts"}
            refused = start_fit(client=client, body=models.StartFitJsonBody.from_dict(wrong))
            assert (refused.status, says in refused.detail) == (422, True)


@pytest.mark.long
def test_openapi_typescript(document: Path, service: Any) -> None:
    """Redocly's linter, openapi-typescript and openapi-fetch; needs Node.js and the npm registry."""
    folder = document.with_name("typescript")
    shutil.copytree(TYPESCRIPT, folder)
    options = "--strict --target es2022 --module nodenext --skipLibCheck --lib es2022,dom"
    for command in (
        "npm install --no-audit --no-fund",
        f"npx redocly lint {document} --max-problems 20",
        f"npx openapi-typescript {document} -o schema.d.ts",
        f"npx tsc {options} check.ts",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, timeout=120)
    ran = ["node", "check.js", service.url, encoded_image(), validation_csv().decode()]
    answer = json.loads(
        subprocess.run(ran, cwd=folder, check=True, timeout=60, stdout=subprocess.PIPE).stdout
    )
    assert max(answer["probabilities"]) == 0.5
    assert answer["label"] in set("0123456789")
    assert answer["error"] == 422
    assert 0 in answer["calibrators"]
    assert answer["uploaded"] == 40
    assert "texts" in answer["refused"]
