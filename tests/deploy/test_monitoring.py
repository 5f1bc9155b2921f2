import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from boxcal.models.digits_data import load_digits_split
from tests.app.fitting.service import Service, free_port
from tests.app.fitting.validation_data import validation_npz
from tests.deploy.processes import ROOT, SCRAPE_SECONDS, probe, running, wait_until
from tests.deploy.queries import annotation_queries, dashboard, dashboard_queries, metrics_read, rule_queries

ALL_QUERIES = [*dashboard_queries(), *annotation_queries(), *rule_queries()]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"


def ask(prometheus: str, expression: str) -> list[float]:
    """Return the values of an instant query; what Prometheus refuses fails the test with its reason."""
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    return [float(series["value"][1]) for series in answer["data"]["result"]]


def use(client: httpx.Client) -> None:
    """Do once what makes every series move: predictions, bounds that hold, and a refusal."""
    digits = load_digits_split().test
    for seed in range(4):
        headers = {"content-type": "image/png"}
        client.post("/predict", content=digits.png(seed), headers=headers).raise_for_status()
    bounds = {"upper": 0.3, "lower": 0.01}
    logits = [[6.0] + [0.0] * 9]
    client.post("/calibrate", json={"logits": logits, "options": {"bounds": bounds}}).raise_for_status()
    assert client.post("/calibrate", json={"logits": [[1.0, 2.0]]}).status_code == 422


@pytest.fixture(scope="module")
def used_service(service: str, prometheus: str) -> str:
    """The service after a fit and some traffic, in several scrapes of Prometheus."""
    with httpx.Client(base_url=service, timeout=300) as client:
        fit = client.post(
            "/fit",
            params={"wait": 240},
            files={"file": ("validation.npz", validation_npz(600))},
            data={"method": "ts", "activate": "always"},
        )
        assert fit.json()["state"] == "succeeded", fit.text

        def shows_a_rate() -> bool:
            """Whether series have moved between two scrapes, which a busy machine may delay."""
            use(client)
            time.sleep(SCRAPE_SECONDS)
            return any(map(math.isfinite, ask(prometheus, "stage:boxcal_stage_seconds:p99_5m")))

        wait_until(shows_a_rate, "a recorded rule with a number", 60)
    return service


def test_every_metric_asked_for_is_one_the_service_has(used_service: str) -> None:
    exposition = httpx.get(f"{used_service}/metrics").text
    exposed = {line.split("{")[0].split(" ")[0] for line in exposition.splitlines() if line[:1] != "#"}
    read = metrics_read(ALL_QUERIES)
    assert len(read) >= 12
    assert read <= exposed


@pytest.mark.parametrize("query", dashboard_queries(), ids=lambda query: query.where)
def test_every_panel_shows_something(query: Any, prometheus: str, used_service: str) -> None:
    """A busy machine may be late, so that no request lies in the seconds of a rate: some are sent."""

    def shows_something() -> bool:
        values = ask(prometheus, query.expression)
        assert values
        if any(math.isfinite(value) for value in values):
            return True
        with httpx.Client(base_url=used_service, timeout=300) as client:
            use(client)
        time.sleep(SCRAPE_SECONDS)
        return False

    wait_until(shows_something, "a number", 30)


@pytest.mark.parametrize("query", [*annotation_queries(), *rule_queries()], ids=lambda query: query.where)
def test_annotations_and_rules_are_understood(query: Any, prometheus: str, used_service: str) -> None:
    ask(prometheus, query.expression)


def test_the_dashboard_says_which_calibrator_answers(prometheus: str, used_service: str) -> None:
    (expression,) = [each.expression for each in dashboard_queries() if each.where.startswith("Active calib")]
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}).json()
    active = httpx.get(f"{used_service}/calibrators/1").json()
    assert [series["metric"] for series in answer["data"]["result"]] == [
        {"method": active["method"], "version": "1"}
    ]


def test_rules_are_evaluated_and_a_working_service_raises_no_alarm(
    prometheus: str, used_service: str
) -> None:
    groups = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    alerts = httpx.get(f"{prometheus}/api/v1/alerts").json()["data"]["alerts"]
    assert [
        alert["labels"]["alertname"] for alert in alerts if alert["labels"]["severity"] == "critical"
    ] == []


@pytest.mark.parametrize("cases", ["rules_test.yml", "rules_over_days_test.yml"])
def test_each_alert_fires_when_it_should_and_only_then(
    cases: str, prometheus_tools: None, tmp_path: Path
) -> None:
    for source in (RULES, Path(__file__).with_name(cases)):
        (tmp_path / source.name).write_text(source.read_text())
    tested = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / cases)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_deployed_configuration_is_valid(prometheus_tools: None, tmp_path: Path) -> None:
    """In the container, the key is in a volume; here it is an empty file."""
    (key := tmp_path / "key").touch()
    folder = ROOT / "deploy" / "prometheus"
    text = (folder / "prometheus.yml").read_text()
    assert "/run/boxcal-keys/prometheus.key" in text
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/boxcal-keys/prometheus.key", str(key)))
    shutil.copy(folder / "rules.yml", tmp_path)
    subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")], check=True, capture_output=True
    )


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert grid["x"] + grid["w"] <= 24
        assert not cells & taken
        taken |= cells


def test_the_health_check_tells_a_ready_service_from_none(service: str, tmp_path: Path) -> None:
    port, none = service.rsplit(":", 1)[1], str(free_port())
    assert probe(BOXCAL_PORT=port).returncode == 0
    nobody = probe(BOXCAL_PORT=none)
    assert nobody.returncode == 1
    assert "refused" in nobody.stderr
    config = tmp_path / "boxcal.toml"
    config.write_text(f"port = {port}\n")
    assert probe(BOXCAL_CONFIG=str(config)).returncode == 0
    assert probe(BOXCAL_CONFIG=str(config), BOXCAL_PORT=none).returncode == 1
    config.write_text('tls_cert = "none.pem"\n')
    assert "https://127.0.0.1:8000/health/ready" in probe(BOXCAL_CONFIG=str(config)).stderr


@pytest.mark.parametrize(("host", "workers"), [("::", "1"), ("::", "2"), ("::1", "1")])
def test_the_addresses_of_ipv6_are_served_and_checked(tmp_path: Path, host: str, workers: str) -> None:
    grpc_port = str(free_port())
    settings = {"host": host, "workers": workers, "grpc_port": grpc_port, "allow_anonymous": "1"}
    settings["allowed_hosts"] = "api.example.org"
    with Service(tmp_path / "data", model="logits:3", **settings) as service:
        port = service.url.rsplit(":", 1)[1]
        names = ["[::1]"] if host == "::1" else ["127.0.0.1", "[::1]"]
        for name in names:
            assert httpx.get(f"http://{name}:{port}/health/ready").status_code == 200
            with grpc.insecure_channel(f"{name}:{grpc_port}") as channel:
                grpc.channel_ready_future(channel).result(timeout=10)
        assert probe(BOXCAL_HOST=host, BOXCAL_PORT=port).returncode == 0
        nobody = probe(BOXCAL_HOST="::1", BOXCAL_PORT=str(free_port()))
        assert "http://[::1]:" in nobody.stderr
        assert f"gRPC on [{host}]:{grpc_port}" in service.log()


def test_a_unix_socket_is_checked(tmp_path: Path) -> None:
    """The service has no port then; after its end nobody accepts from the socket."""
    path = tmp_path / "boxcal.sock"
    names = {"BOXCAL_ALLOWED_HOSTS": "api.example.org"}
    settings = {"BOXCAL_HOST": f"unix:{path}", "BOXCAL_MODEL": "logits:3", **names}
    program = "from boxcal.app.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "--data-dir", str(tmp_path / "data")]
    with running(command, tmp_path / "log", **settings) as service:
        wait_until(lambda: probe(**settings).returncode == 0, "the socket is ready", 60, service)
    refused = probe(**settings)
    assert refused.returncode == 1
    assert f"http://unix:{path}/health/ready" in refused.stderr
