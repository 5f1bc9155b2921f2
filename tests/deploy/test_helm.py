"""The Helm chart is linted by Helm, rendered, and checked against the schemas of Kubernetes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from boxcal.app.settings.service import Settings

pytestmark = pytest.mark.long

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "boxcal"
RAY = CHART.parents[1] / "ray"
RAY_SERVICE = {
    "serveConfigV2",
    "rayClusterConfig",
    "upgradeStrategy",
    "serveService",
    "excludeHeadPodFromServeSvc",
}
RAY_CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "authOptions"}
RAY_HEAD = {"rayStartParams", "template", "serviceType"}
RAY_WORKERS = RAY_HEAD | {"groupName", "replicas", "minReplicas", "maxReplicas"}
"""Members of the types of KubeRay (ray.io/v1) that are used or useful here."""
SCALED_OBJECT = {
    "scaleTargetRef", "minReplicaCount", "maxReplicaCount", "idleReplicaCount", "pollingInterval",
    "cooldownPeriod", "fallback", "advanced", "triggers",
}  # fmt: skip
"""Members of KEDA's ScaledObjectSpec (keda.sh/v1alpha1)."""
CUSTOM = {"PodMonitor", "ScaledObject"}
"""Kinds that Kubernetes itself does not have."""
VALUES: dict[str, dict[str, Any]] = {
    "one pod with SQLite": {},
    "replicas with PostgreSQL": {
        "replicas": 3,
        "database": {"secret": "boxcal-database"},
        "sharedClaim": "boxcal-shared",
        "fitWorkers": 2,
        "settings": {"MODEL": "torchvision:resnet50", "LOG_FORMAT": "json", "MAX_BATCH_SIZE": 64},
        "networkPolicy": {"from": [{"podSelector": {"matchLabels": {"app": "gateway"}}}]},
    },
    "replicas that share a bucket": {
        "replicas": 2,
        "database": {"secret": "boxcal-database"},
        "sharedBucket": {"url": "s3://calibration/boxcal", "secret": "boxcal-bucket"},
        "fitWorkers": 1,
    },
    "GPUs, autoscaling and monitoring": {
        "database": {"secret": "boxcal-database"},
        "gpus": 1,
        "settings": {"MODEL": "torchvision:vit_b_16", "PRECISION": "bfloat16"},
        "autoscaling": {"enabled": True},
        "monitoring": {"podMonitor": True, "keySecret": "prometheus-key"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "nodeSelector": {"accelerator": "h100"},
    },
}
VALUES_OF_AFFINITY = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [
            {"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}]}
        ]
    }
}
PROGRAM = """
import json, sys, yaml
import kubernetes_validate
from helm_python import Chart, lint
request = json.load(sys.stdin)
found = lint(request["chart"], request["values"], strict=True)["messages"]
result = {"lint": [message for message in found if message["severity"] > 1]}
try:
    with Chart.load(request["chart"]) as chart:
        files = chart.render(values=request["values"], name="demo", namespace="serving")
    result["manifests"] = [m for text in files.values() for m in yaml.safe_load_all(text) if m]
except Exception as error:
    result["error"] = str(error)
def check(manifest):
    try:
        kubernetes_validate.validate(manifest, "1.31", strict=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
result["checked"] = [check(manifest) for manifest in request["manifests"]]
print(json.dumps(result))
"""


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Helm as a library and the schemas; 360 MB that nothing else needs."""
    folder = tmp_path_factory.mktemp("helm")
    wanted = Path(__file__).with_name("helm-requirements.txt")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, "-r", wanted],
        check=True,
    )
    return folder


def ask(packages: Path, values: dict[str, Any], manifests: list[dict[str, Any]]) -> dict[str, Any]:
    program = f"import sys; sys.path.insert(0, {str(packages)!r})\n{PROGRAM}"
    request = {"chart": str(CHART), "values": values, "manifests": manifests}
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(request), capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def rendered(packages: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    result = ask(packages, values, [])
    assert "error" not in result, result["error"]
    assert result["lint"] == []
    manifests: list[dict[str, Any]] = result["manifests"]
    return manifests


def of_kind(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(manifest for manifest in manifests if manifest["kind"] == kind)


def environment(deployment: dict[str, Any]) -> dict[str, Any]:
    entries = deployment["spec"]["template"]["spec"]["containers"][0]["env"] or []
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


@pytest.mark.parametrize("name", VALUES)
def test_manifests_are_valid_and_a_misspelt_member_of_each_is_not(packages: Path, name: str) -> None:
    manifests = [m for m in rendered(packages, VALUES[name]) if m["kind"] not in CUSTOM]
    misspelt = [{**m, "spec": {**m["spec"], "selectr": {}}} for m in manifests]
    checked = ask(packages, VALUES[name], manifests + misspelt)["checked"]
    assert checked[: len(manifests)] == [None] * len(manifests)
    assert all("selectr" in message for message in checked[len(manifests) :])
    known = {f"BOXCAL_{field.upper()}" for field in Settings.model_fields}
    assert set(environment(of_kind(manifests, "Deployment"))) <= known


def test_one_pod_keeps_its_registry_in_a_volume(packages: Path) -> None:
    manifests = rendered(packages, VALUES["one pod with SQLite"])
    kinds = {manifest["kind"] for manifest in manifests}
    assert kinds == {"Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget", "NetworkPolicy"}
    deployment = of_kind(manifests, "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = deployment["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False
    assert pod["terminationGracePeriodSeconds"] == 35
    command = pod["initContainers"][0]["command"]
    assert command == shlex.split("boxcal keys create admin --scope admin --output /var/lib/boxcal/admin.key")
    assert "BOXCAL_ALLOW_ANONYMOUS" not in environment(deployment)
    anonymous = of_kind(rendered(packages, {"allowAnonymous": True}), "Deployment")
    assert environment(anonymous)["BOXCAL_ALLOW_ANONYMOUS"] == "1"
    assert "initContainers" not in anonymous["spec"]["template"]["spec"]


def test_replicas_migrate_once_and_share_validation_sets(packages: Path) -> None:
    manifests = rendered(packages, VALUES["replicas with PostgreSQL"])
    deployment = of_kind(manifests, "Deployment")
    settings = environment(deployment)
    assert settings["BOXCAL_MIGRATE"] == "off"
    assert settings["BOXCAL_DATABASE_URL"]["secretKeyRef"] == {"name": "boxcal-database", "key": "url"}
    assert settings["BOXCAL_SHARED_DIR"] == "/var/lib/boxcal-shared"
    assert settings["BOXCAL_MAX_BATCH_SIZE"] == "64"
    assert settings["BOXCAL_FITS"] == "queue"
    workers = next(m for m in manifests if m["metadata"]["name"] == "demo-workers")
    assert workers["spec"]["template"]["spec"]["containers"][0]["command"] == ["boxcal", "worker"]
    job = of_kind(manifests, "Job")
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == ["boxcal", "migrate"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    service, labels = of_kind(manifests, "Service"), deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    # The pod of the migration must not receive requests.
    assert not service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_replicas_and_workers_share_a_bucket_without_a_volume(packages: Path) -> None:
    deployments = [
        m for m in rendered(packages, VALUES["replicas that share a bucket"]) if m["kind"] == "Deployment"
    ]
    assert len(deployments) == 2
    for deployment in deployments:
        assert environment(deployment)["BOXCAL_SHARED_DIR"] == "s3://calibration/boxcal"
        pod = deployment["spec"]["template"]["spec"]
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "boxcal-bucket"}}]
        assert {volume["name"] for volume in pod["volumes"]} == {"data", "tmp"}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {"data", "tmp"}


def test_autoscaling_uses_the_length_of_the_queue(packages: Path) -> None:
    manifests = rendered(packages, VALUES["GPUs, autoscaling and monitoring"])
    assert "replicas" not in of_kind(manifests, "Deployment")["spec"]
    metric = of_kind(manifests, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]
    assert metric["metric"]["name"] == "boxcal_queue_samples"
    monitor = of_kind(manifests, "PodMonitor")
    assert monitor["spec"]["podMetricsEndpoints"] == [
        {
            "port": "http",
            "path": "/metrics",
            "interval": "15s",
            "authorization": {"credentials": {"name": "prometheus-key", "key": "key"}},
        }
    ]


def test_keda_scales_by_the_length_of_the_queue_that_prometheus_has(packages: Path) -> None:
    values = VALUES["GPUs, autoscaling and monitoring"]
    address = "http://prometheus.monitoring:9090"
    keda = {"enabled": True, "queueSamples": 32, "keda": {"prometheus": address}}
    manifests = rendered(packages, {**values, "autoscaling": keda})
    assert not [one for one in manifests if one["kind"] == "HorizontalPodAutoscaler"]
    assert "replicas" not in of_kind(manifests, "Deployment")["spec"]
    scaled = of_kind(manifests, "ScaledObject")
    assert set(scaled["spec"]) <= SCALED_OBJECT
    assert scaled["spec"]["scaleTargetRef"]["name"] == of_kind(manifests, "Deployment")["metadata"]["name"]
    (trigger,) = scaled["spec"]["triggers"]
    query = 'sum(boxcal_queue_samples{namespace="serving",pod=~"demo-[a-z0-9]+-[a-z0-9]{5}"})'
    assert trigger["metadata"] == {"serverAddress": address, "query": query, "threshold": "32"}
    assert (
        "does not match pattern"
        in ask(packages, {"autoscaling": {"enabled": True, "keda": {"prometheus": "prometheus:9090"}}}, [])[
            "error"
        ]
    )


def test_the_manifests_for_ray_are_valid_and_misspelt_members_are_not(packages: Path) -> None:
    service = yaml.safe_load((RAY / "ray-service.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert set(service["spec"]) <= RAY_SERVICE
    cluster = service["spec"]["rayClusterConfig"]
    assert set(cluster) <= RAY_CLUSTER
    (workers,) = cluster["workerGroupSpecs"]
    assert set(workers) <= RAY_WORKERS
    assert set(cluster["headGroupSpec"]) <= RAY_HEAD
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        for group in (cluster["headGroupSpec"], workers)
    ]
    policy = yaml.safe_load((RAY / "network-policy.yaml").read_text())
    right = [*pods, policy]
    wrong = [{**one, "spec": {**one["spec"], "containrs": []}} for one in right]
    checked = ask(packages, {}, right + wrong)["checked"]
    assert checked[:3] == [None] * 3
    assert all("containrs" in message for message in checked[3:])
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        given = {entry["name"] for entry in container["env"] if entry["name"].startswith("BOXCAL_")}
        assert given == {"BOXCAL_DATABASE_URL"}
        assert {port["containerPort"] for port in container["ports"]} == {8000, 30000}
    open_ports = [{port["port"] for port in rule["ports"]} for rule in policy["spec"]["ingress"][1:]]
    assert open_ports == [{8265}, {8000}, {30000}]


def test_every_pod_is_scheduled_as_the_values_say(packages: Path) -> None:
    affinity = {"nodeAffinity": VALUES_OF_AFFINITY}
    scheduling = {
        "tolerations": VALUES["GPUs, autoscaling and monitoring"]["tolerations"],
        "nodeSelector": {"accelerator": "h100"},
        "affinity": affinity,
    }
    annotations = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    values = VALUES["replicas that share a bucket"] | scheduling | {"podAnnotations": annotations}
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]
        for one in rendered(packages, values)
        if one["kind"] in {"Deployment", "Job"}
    }
    assert set(pods) == {"demo", "demo-workers", "demo-migrate"}
    for pod in pods.values():
        assert {name: pod["spec"][name] for name in scheduling} == scheduling
        assert pod["metadata"]["annotations"] == annotations


def test_numbers_are_exact(packages: Path) -> None:
    """YAML numbers reach a template as floats, of which Helm prints 5e+07."""
    values = {
        **VALUES["replicas with PostgreSQL"],
        "settings": {"FEEDBACK_ROWS": 50_000_000, "FIT_MEMORY_BYTES": 8_589_934_592, "GRPC_PORT": 9000},
        "replicas": 1_000_001,
        "fitWorkers": 2_000_000,
        "preStopSeconds": 4_000_000,
        "gpus": 1_000_000,
        "resources": {"requests": {"memory": 8_589_934_592}, "limits": {"memory": 8_589_934_592}},
        "disruptionBudget": {"maxUnavailable": 5_000_000},
    }
    text = json.dumps(rendered(packages, values))
    assert "e+" not in text
    deployment = of_kind(json.loads(text), "Deployment")
    settings = environment(deployment)
    names = ("FEEDBACK_ROWS", "FIT_MEMORY_BYTES")
    assert [settings[f"BOXCAL_{name}"] for name in names] == ["50000000", "8589934592"]
    assert deployment["spec"]["replicas"] == 1_000_001
    autoscaling = {"enabled": True, "minReplicas": 1_000_000, "maxReplicas": 2_000_000}
    scaled = {"database": {"secret": "one"}, "autoscaling": autoscaling}
    spec = of_kind(rendered(packages, scaled), "HorizontalPodAutoscaler")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1_000_000, 2_000_000)
    claim = of_kind(rendered(packages, {"volume": {"size": 8_589_934_592}}), "PersistentVolumeClaim")
    assert claim["spec"]["resources"]["requests"]["storage"] == 8_589_934_592


def test_grpc_is_a_port_of_container_service_and_network_policy(packages: Path) -> None:
    manifests = rendered(packages, {"settings": {"GRPC_PORT": 9000}})
    (container,) = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {"name": "grpc", "containerPort": 9000} in container["ports"]
    ports = of_kind(manifests, "Service")["spec"]["ports"]
    assert {"name": "grpc", "port": 9000, "targetPort": "grpc"} in ports
    (rule,) = of_kind(manifests, "NetworkPolicy")["spec"]["ingress"]
    assert rule["ports"] == [{"port": "http"}, {"port": "grpc"}]
    (rule,) = of_kind(rendered(packages, {}), "NetworkPolicy")["spec"]["ingress"]
    assert rule["ports"] == [{"port": "http"}]


def test_the_secret_of_alarms_is_a_reference(packages: Path) -> None:
    values = {"settings": {"ALARM_WEBHOOK": "https://example.org/hook"}, "alarmSecret": "boxcal-alarm"}
    settings = environment(of_kind(rendered(packages, values), "Deployment"))
    assert settings["BOXCAL_ALARM_SECRET"] == {"secretKeyRef": {"name": "boxcal-alarm", "key": "key"}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 2}, "additional properties 'replica' not allowed"),
        ({"image": {"tagg": "1"}}, "additional properties 'tagg' not allowed"),
        ({"settings": {"PORT": 9000}}, "invalid propertyName 'PORT'"),
        ({"settings": {"MAX_PIXEL": 9000}}, "invalid propertyName 'MAX_PIXEL'"),
        ({"settings": {"ALARM_SECRET": "k" * 32}}, "invalid propertyName 'ALARM_SECRET'"),
        ({"settings": {"GRPC_PORT": 0}}, "minimum"),
        (
            {"tolerations": [{"key": "gpu", "operater": "Exists"}]},
            "additional properties 'operater' not allowed",
        ),
        (
            {"affinity": {"podAntiAffinity": {"requiredDuringScheduling": []}}},
            "additional properties 'requiredDuringScheduling' not allowed",
        ),
        ({"networkPolicy": {"from": [{"podSelectr": {}}]}}, "additional properties 'podSelectr' not allowed"),
        (
            {
                "database": {"secret": "one"},
                "autoscaling": {"enabled": True, "minReplicas": 4, "maxReplicas": 3},
            },
            "autoscaling.minReplicas is greater than autoscaling.maxReplicas",
        ),
        ({"fitWorkers": 1}, "fitWorkers need PostgreSQL and shared validation sets"),
        (
            {"sharedClaim": "one", "sharedBucket": {"url": "s3://two"}},
            "validation sets have one place: set sharedClaim or sharedBucket.url",
        ),
        ({"sharedBucket": {"url": "gs://one"}}, "does not match pattern"),
        ({"sharedBucket": {"bucket": "one"}}, "additional properties 'bucket' not allowed"),
        ({"replicas": 2}, "more than one replica needs PostgreSQL: set database.secret"),
        ({"service": {"type": "ClusterIp"}}, "value must be one of"),
    ],
)
def test_wrong_values_are_refused(packages: Path, values: dict[str, Any], message: str) -> None:
    assert message in ask(packages, values, [])["error"]
