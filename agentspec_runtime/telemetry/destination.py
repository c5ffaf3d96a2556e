"""Where spans go: endpoint and protocol from the standard `OTEL_EXPORTER_OTLP_*` variables.

Two wrong pairs are common and silent, so they are repaired: port 4317 without a protocol means gRPC (the
specification's default would be HTTP), and an HTTP endpoint without a path gets `/v1/traces`.

Needs no SDK: the command line asks this before anything heavy is loaded, or installed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, Literal
from urllib.parse import urlsplit

from agentspec_runtime.errors import ConfigurationError, MissingDependencyError

__all__ = ["Destination", "Protocol", "destination", "require_exporter", "tracing_disabled"]

_GRPC_PORT: Final = 4317

Protocol = Literal["grpc", "http/protobuf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where spans go. `endpoint` is what the exporter gets: with a path for HTTP, a target for gRPC."""

    endpoint: str
    protocol: Protocol


def tracing_disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the standard variables switch tracing off."""
    return (
        environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        or environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    )


def destination(endpoint: str | None = None, environ: Mapping[str, str] = os.environ) -> Destination | None:
    """Where to send spans: the argument, else the standard variables, else None (nobody asked).

    Raises:
        ConfigurationError: the protocol is not one that can be sent.
    """
    traces = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip()
    general = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    chosen = endpoint or traces or general
    if not chosen:
        return None
    protocol = _protocol(chosen, environ)
    if protocol == "grpc":
        return Destination(endpoint=chosen, protocol=protocol)
    url = chosen if "://" in chosen else f"http://{chosen}"
    path = urlsplit(url).path
    if path in ("", "/") or (chosen == general and not endpoint and not traces):
        url = url.rstrip("/") + "/v1/traces"
    return Destination(endpoint=url, protocol=protocol)


def _protocol(endpoint: str, environ: Mapping[str, str]) -> Protocol:
    asked = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if asked:
        name = asked.strip().lower()
        if name == "grpc":
            return "grpc"
        if name == "http/protobuf":
            return "http/protobuf"
        raise ConfigurationError(
            f"OTLP protocol {asked!r} cannot be sent: set OTEL_EXPORTER_OTLP_PROTOCOL to 'grpc' or"
            " 'http/protobuf'"
        )
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    return "grpc" if parts.port == _GRPC_PORT and parts.path in ("", "/") else "http/protobuf"


def require_exporter(target: Destination) -> None:
    """Raise if the exporter package of this protocol is not installed, without loading it.

    Raises:
        MissingDependencyError: it is not.
    """
    package = "http" if target.protocol == "http/protobuf" else "grpc"
    try:
        found = find_spec(f"opentelemetry.exporter.otlp.proto.{package}")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MissingDependencyError(f"opentelemetry-exporter-otlp-proto-{package}", "otel")
