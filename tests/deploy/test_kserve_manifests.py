"""The manifests for KServe, against the schemas in the Python packages of KServe and Kubernetes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from boxcal.app.settings.service import Settings, unknown_variable

FOLDER = Path(__file__).parents[2] / "deploy" / "kserve"
RUNTIME, SERVICE, REPLICAS = "serving-runtime.yaml", "inference-service.yaml", "replicas.yaml"
# In a process of its own: the package registers messages of the same names as Triton's.
PROGRAM = """
import json, re, sys
import kserve.models, kubernetes.client.models
NAMES = {"ServingRuntime": "V1alpha1ServingRuntime", "InferenceService": "V1beta1InferenceService"}
SCALARS = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object, "datetime": str}

def check(value, kind, place):
    if found := re.fullmatch(r"[Ll]ist\\[(.+)\\]", kind):
        assert isinstance(value, list), f"{place} is no list"
        return [check(one, found[1], f"{place}[{n}]") for n, one in enumerate(value)]
    if found := re.fullmatch(r"[Dd]ict[(\\[]str, (.+)[)\\]]", kind):
        return [check(one, found[1], f"{place}.{name}") for name, one in value.items()]
    if kind in SCALARS:
        assert isinstance(value, SCALARS[kind]), f"{place} is {value!r}, no {kind}"
        return
    model = getattr(kserve.models, kind, None) or getattr(kubernetes.client.models, kind)
    types = {model.attribute_map[name]: wanted for name, wanted in model.openapi_types.items()}
    for name, one in value.items():
        assert name in types, f"{place}.{name} is unknown"
        check(one, types[name], f"{place}.{name}")

problems = []
for document in json.load(sys.stdin):
    try:
        check(document, NAMES[document["kind"]], document["kind"])
        problems.append("")
    except AssertionError as error:
        problems.append(str(error))
print(json.dumps(problems))
"""


def manifest(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return document


def test_manifests_follow_the_published_schemas() -> None:
    wrong = manifest(RUNTIME)
    wrong["spec"]["containers"][0]["livenesProbe"] = {}
    documents = [*map(manifest, (RUNTIME, SERVICE, REPLICAS)), wrong]
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, check=True, input=json.dumps(documents), capture_output=True, text=True)
    problems = json.loads(ran.stdout)
    assert problems == ["", "", "", "ServingRuntime.spec.containers[0].livenesProbe is unknown"]


def test_the_runtime_sets_settings_that_exist_and_the_service_names_it() -> None:
    runtime, service = manifest(RUNTIME), manifest(SERVICE)
    (container,) = runtime["spec"]["containers"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert unknown_variable(given) is None
    values = {name.removeprefix("BOXCAL_").lower(): value for name, value in given.items() if value}
    assert Settings(**values).port == container["ports"][0]["containerPort"]
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    formats = [
        {"name": one["name"], "version": one["version"]} for one in runtime["spec"]["supportedModelFormats"]
    ]
    assert model["modelFormat"] in formats
    # Variables of a Service named boxcal would be settings that do not exist.
    assert [manifest(one)["spec"]["predictor"]["enableServiceLinks"] for one in (SERVICE, REPLICAS)] == [
        False
    ] * 2
    assert container["securityContext"]["runAsUser"] == 10001
    (replica,) = manifest(REPLICAS)["spec"]["predictor"]["containers"]
    assert unknown_variable(one["name"] for one in replica["env"]) is None
