import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BUILT_HERE = {"boxcal", "boxcal-gpu"}


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_alone(name: str) -> None:
    assert SERVICES[name]["ports"]
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


@pytest.mark.parametrize("name", SERVICES)
def test_containers_restart_and_hold_no_more_rights_than_they_need(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged", False)


@pytest.mark.parametrize("name", sorted(set(SERVICES) - BUILT_HERE))
def test_images_of_others_are_pinned_and_have_a_health_check(name: str) -> None:
    tag = SERVICES[name]["image"].partition(":")[2].lstrip("v")
    assert len(tag.split(".")) == 3, f"{tag} is not an exact version"
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", SERVICES)
def test_everything_that_is_mounted_exists(name: str) -> None:
    for mount in SERVICES[name]["volumes"]:
        if mount["type"] == "volume":
            assert mount["source"] in COMPOSE["volumes"]
        else:
            assert (ROOT / mount["source"]).is_dir()
            assert mount["read_only"] is True


def test_compose_passes_on_every_setting_that_the_image_does_not_have() -> None:
    from boxcal.app.settings.service import Settings

    known = {f"BOXCAL_{field.upper()}" for field in Settings.model_fields}
    image = set(re.findall(r"\b(BOXCAL_[A-Z_]+)=", (ROOT / "Dockerfile").read_text()))
    assert image == {"BOXCAL_HOST", "BOXCAL_PORT", "BOXCAL_DATA_DIR"}
    for name in BUILT_HERE:
        environment = SERVICES[name]["environment"]
        passed = {key: value for key, value in environment.items() if key != "IF_NO_MODEL"}
        assert passed == dict.fromkeys(known - image | {"BOXCAL_CONFIG"}), "values are taken from the shell"


@pytest.mark.parametrize(
    ("service", "given", "model"),
    [
        ("boxcal", {}, None),
        ("boxcal-gpu", {}, "torchvision:vit_b_16 DEFAULT bfloat16"),
        ("boxcal-gpu", {"BOXCAL_WEIGHTS": "/models/v.pth"}, "torchvision:vit_b_16 /models/v.pth bfloat16"),
        ("boxcal-gpu", {"BOXCAL_MODEL": "onnx:/models/m.onnx"}, "onnx:/models/m.onnx"),
        ("boxcal-gpu", {"BOXCAL_MODEL": "a=digits"}, "a=digits"),
        ("boxcal-gpu", {"BOXCAL_CONFIG": "/models/boxcal.toml"}, None),
    ],
)
def test_the_gpu_profile_has_a_model_of_its_own_unless_one_is_set(
    tmp_path: Path, service: str, given: dict[str, str], model: str | None
) -> None:
    for name, says in (("boxcal", 'echo "$BOXCAL_MODEL $BOXCAL_WEIGHTS $BOXCAL_PRECISION"'), ("chmod", ":")):
        (tmp_path / name).write_text(f"#!/bin/sh\n[ $1 = keys ] || {says}\n")
        (tmp_path / name).chmod(0o755)
    # As Compose does: ${NAME:-default}, and $$ for a dollar.
    default = re.sub(
        r"\$\{(\w+):-(\w+)\}",
        lambda found: given.get(found[1], found[2]),
        SERVICES[service]["environment"].get("IF_NO_MODEL", ""),
    )
    *shell, script = SERVICES[service]["command"]
    ended = subprocess.run(
        [*shell, script.replace("$$", "$")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **given, **({"IF_NO_MODEL": default} if default else {})},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stdout.split() == (model or "").split()


def test_grafana_finds_its_data_source_and_dashboard_where_they_are_mounted() -> None:
    mounts = {mount["target"]: ROOT / mount["source"] for mount in SERVICES["grafana"]["volumes"]}
    provisioning = mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/boxcal.yml").read_text())["providers"]
    board = mounts[provider["options"]["path"]] / "boxcal.json"
    assert json.loads(board.read_text())["uid"] == "boxcal"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{board.name}"
