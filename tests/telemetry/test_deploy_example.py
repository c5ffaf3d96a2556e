"""examples/deploy names only what exists: files, flags, ports, metrics. It is not run here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from agentspec_runtime.telemetry.metrics import EngineMetrics

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"


@pytest.fixture
def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def exposed_names() -> set[str]:
    registry = CollectorRegistry()
    EngineMetrics(registry)
    names: set[str] = set()
    for family in registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(
            family.type, ("",)
        )
        names.update(family.name + suffix for suffix in suffixes)
    return names


def test_compose_names_files_that_exist_and_services_that_are_there(compose: Any) -> None:
    """Mounted files lie beside it; depends_on, URLs and named volumes point at something declared."""
    services = compose["services"]
    assert set(services) == {"engine", "jaeger", "prometheus", "grafana"}
    for service in services.values():
        assert ("image" in service) != ("build" in service)
        assert set(service.get("depends_on", ())) <= set(services)
        for port in service["ports"]:
            assert re.fullmatch(r"\d+:\d+", port)
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith("./") else source in compose["volumes"]
    published = [port.split(":")[0] for service in services.values() for port in service["ports"]]
    assert len(published) == len(set(published))


def test_the_engine_is_started_with_flags_that_the_command_has(compose: Any) -> None:
    """What stands before `--` is ours; images are pinned."""
    from typer.main import get_command

    from agentspec_runtime.cli import app

    engine = compose["services"]["engine"]
    assert engine["entrypoint"] == ["agentspec", "serve"]
    ours = engine["command"][1 : engine["command"].index("--")]
    command: Any = get_command(app)
    known = {flag for option in command.commands["serve"].params for flag in option.opts}
    assert {flag.split("=")[0] for flag in ours} <= known
    assert f"http://jaeger:{4318}" in "".join(ours)
    images = [service["image"] for service in compose["services"].values() if "image" in service]
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images)


def test_prometheus_scrapes_the_engine(compose: Any) -> None:
    """Target and port are those of the engine service."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in compose["services"]
    assert f"{port}:{port}" in compose["services"][host]["ports"]


def test_grafana_is_provisioned_from_what_is_mounted(compose: Any) -> None:
    """Datasources point at services; the provider's path holds the dashboard."""
    sources = yaml.safe_load((DEPLOY / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert {source["url"].split("//")[1].split(":")[0] for source in sources} <= set(compose["services"])
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounts = compose["services"]["grafana"]["volumes"]
    assert any(mount.split(":")[1].startswith(provider["options"]["path"]) for mount in mounts)


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    """Each agentspec metric of an expression is exposed, and each exposed family has a panel."""
    board = json.loads((DEPLOY / "grafana" / "agentspec.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = set(re.findall(r"agentspec_\w+", " ".join(expressions)))
    assert used <= exposed_names()
    families = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in exposed_names()}
    assert {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in used} == families
    assert all(expression.count("(") == expression.count(")") for expression in expressions)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(places) == len(set(places))
