"""Every question that the dashboard and the rules put to Prometheus, with Grafana's variables filled in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
VARIABLES = {"$__rate_interval": "15s", "$instance": ".*"}


@dataclass(frozen=True)
class Query:
    """A PromQL expression and where it stands."""

    where: str
    expression: str


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / "boxcal.json").read_text())
    return board


def fill_in(expression: str) -> str:
    """Replace Grafana's variables as Grafana would with every replica selected."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    if "$" in expression:
        raise ValueError(f"a variable without a value in {expression}")
    return expression


def dashboard_queries() -> list[Query]:
    return [
        Query(f"{panel['title']} ({target['legendFormat']})", fill_in(target["expr"]))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def annotation_queries() -> list[Query]:
    """Return the queries behind the marks on the time axis."""
    return [Query(each["name"], fill_in(each["expr"])) for each in dashboard()["annotations"]["list"]]


def rule_queries() -> list[Query]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    return [
        Query(rule.get("record") or rule["alert"], rule["expr"])
        for group in groups
        for rule in group["rules"]
    ]


def metrics_read(queries: list[Query]) -> set[str]:
    """Return the names of the service's own series that the queries read."""
    return {
        name for query in queries for name in re.findall(r"(?<![\w:])boxcal_\w+(?!\w*:)", query.expression)
    }
