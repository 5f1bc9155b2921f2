"""Tables of the documents that are generated from the code."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from annotated_types import Ge, Gt, Le, Lt
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic.fields import FieldInfo

from boxcal.app.http.problems import PROBLEMS
from boxcal.app.main import create_app
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.settings.service import Settings

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yml"
SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def settings() -> str:
    """List every setting with its variable, default and meaning."""
    return table(
        ["variable", "default", "meaning"],
        (
            [f"`BOXCAL_{name.upper()}`", _default(field.default), _meaning(field)]
            for name, field in Settings.model_fields.items()
        ),
    )


def metrics() -> str:
    """List every metric of the service that has the prefix `boxcal_`."""
    telemetry = Telemetry({"/predict": [200]})
    telemetry.calibrator_active(0, "uncalibrated")
    families = text_string_to_metric_families(generate_latest(telemetry.registry).decode())
    return table(
        ["metric", "type", "meaning"],
        (
            [f"`{_series(family.name, family.type)}`", family.type, family.documentation]
            for family in families
            if family.name.startswith("boxcal_")
        ),
    )


def alerts() -> str:
    """List every alert of `deploy/prometheus/rules.yml`."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return table(
        ["alert", "severity", "after", "meaning"],
        (
            [
                f"`{rule['alert']}`",
                rule["labels"]["severity"],
                rule.get("for", "at once"),
                rule["annotations"]["description"],
            ]
            for group in groups
            for rule in group["rules"]
            if "alert" in rule
        ),
    )


def routes() -> str:
    """List every route of the service with its description."""
    paths = create_app(Settings()).openapi()["paths"]
    return table(
        ["route", "meaning"],
        (
            [f"`{method.upper()} {path}`", operation["description"].partition("\n")[0]]
            for path, operations in paths.items()
            for method, operation in operations.items()
        ),
    )


def problems() -> str:
    """List every problem type with its status and meaning."""
    return table(
        ["status", "type", "meaning"],
        ([str(one.status), f"`{one.type}`", one.meaning] for one in PROBLEMS),
    )


def _series(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def _default(value: Any) -> str:
    if value in (None, ""):
        return ""
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"`{value}` ({value // 2**20} MiB)"
    return f"`{value.as_posix() if isinstance(value, Path) else value}`"


def _meaning(field: FieldInfo) -> str:
    parts = [field.description or ""]
    choices = getattr(field.annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        parts.append(f"One of {', '.join(f'`{choice}`' for choice in choices)}.")
    limits = [_limit(rule) for rule in field.metadata if type(rule) in SIGNS]
    if limits:
        parts.append(f"({', '.join(limits)})")
    return " ".join(part for part in parts if part)


def _limit(rule: Any) -> str:
    return f"{SIGNS[type(rule)]} {getattr(rule, type(rule).__name__.lower())}"


PARTS: Mapping[str, Callable[[], str]] = {
    "settings": settings,
    "metrics": metrics,
    "alerts": alerts,
    "routes": routes,
    "problems": problems,
}
