"""Switching on spans in the agent process.

`install_span_observers` makes spans with whatever tracer provider the program has; without one every
observer returns at once. `configure_tracing` is for programs that have no OpenTelemetry set-up: it makes
a provider of its own, leaves the global one alone unless told otherwise, and ends within a bound.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final, Self

from opentelemetry import trace
from opentelemetry.trace import TracerProvider

from agentspec_runtime.client.observer import register_boundary_observer, register_call_observer
from agentspec_runtime.errors import ConfigurationError, MissingDependencyError
from agentspec_runtime.telemetry.genai import GenAi
from agentspec_runtime.telemetry.observers import BoundarySpans, CallSpans, Mode
from agentspec_runtime.telemetry.origins import Origins

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from agentspec_runtime.telemetry.export import BoundedSpanProcessor

__all__ = ["Tracing", "configure_tracing", "ensure_span_observers", "install_span_observers"]

_VARIABLE: Final = "AGENTSPEC_SPANS"
_DEFAULT_ENDPOINT: Final = "http://localhost:4318/v1/traces"

_log = logging.getLogger("agentspec.telemetry")
_lock = Lock()
_remove_installed: Callable[[], None] | None = None


class Tracing:
    """Tracing that `configure_tracing` has set up; a context manager that shuts it down."""

    def __init__(
        self,
        provider: SdkTracerProvider,
        processors: tuple[BoundedSpanProcessor, ...],
        uninstall: Callable[[], None],
    ) -> None:
        self.provider = provider
        self._processors = processors
        self._uninstall = uninstall
        atexit.register(self.shutdown)

    @property
    def spans_lost(self) -> int:
        """Spans that did not arrive so far."""
        return sum(processor.lost for processor in self._processors)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all ended spans are sent or written; False if that took too long."""
        return all(processor.force_flush(int(timeout_s * 1e3)) for processor in self._processors)

    def shutdown(self) -> None:
        """Send what is left within two seconds per destination and stop observing. Safe to call twice."""
        atexit.unregister(self.shutdown)
        self._uninstall()
        for processor in self._processors:
            processor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def configure_tracing(
    endpoint: str | None = None,
    *,
    file: str | Path | None = None,
    service_name: str = "agent",
    make_global: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Tracing:
    """Set up tracing of agents, tools and model calls.

    ::

        agentspec_runtime.configure_tracing()                      # a collector on this machine
        agentspec_runtime.configure_tracing(file="turn.jsonl")     # a file for the Jaeger UI's upload

    Args:
        endpoint: OTLP endpoint. None takes the standard variables, then `http://localhost:4318`, unless a
            file is given.
        file: also, or instead, append OTLP JSON lines to this file.
        service_name: service of the spans unless `OTEL_SERVICE_NAME` says otherwise.
        make_global: also make this the program's tracer provider, so that its own spans join the tree.
        environ: where the standard variables are looked up.

    Raises:
        MissingDependencyError: the packages of the extra `otel` are not installed.
        ConfigurationError: an endpoint or protocol that cannot be used, or a global provider that exists
            already and was to be replaced.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider as SdkProvider

        from agentspec_runtime.telemetry.export import BoundedSpanProcessor, JsonLinesExporter
    except ImportError as error:
        raise MissingDependencyError("opentelemetry-sdk", "otel") from error
    if make_global and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        raise ConfigurationError(
            "make_global=True, but this program has a global tracer provider: leave it out to trace beside"
            " that provider, or do not call configure_tracing at all to use it"
        )
    exporters: list[tuple[str, SpanExporter]] = []
    if file is not None:
        exporters.append((str(file), JsonLinesExporter(Path(file))))
    exporters += _otlp(endpoint, environ, default=None if file is not None else _DEFAULT_ENDPOINT)
    processors = tuple(BoundedSpanProcessor(exporter, endpoint=where) for where, exporter in exporters)
    name = environ.get("OTEL_SERVICE_NAME") or service_name
    provider = SdkProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
    for processor in processors:
        provider.add_span_processor(processor)
    if make_global:
        trace.set_tracer_provider(provider)
    return Tracing(provider, processors, install_span_observers(provider, environ=environ))


def _otlp(
    endpoint: str | None, environ: Mapping[str, str], *, default: str | None
) -> list[tuple[str, SpanExporter]]:
    from agentspec_runtime.telemetry.destination import destination, tracing_disabled
    from agentspec_runtime.telemetry.export import make_exporter

    if tracing_disabled(environ):
        return []
    target = destination(endpoint, environ) or destination(default, environ)
    return [] if target is None else [(target.endpoint, make_exporter(target, environ))]


def install_span_observers(
    provider: TracerProvider | None = None, *, environ: Mapping[str, str] = os.environ
) -> Callable[[], None]:
    """Observe model calls, tools and agents with spans; returns the function that stops it.

    Installed once per process: a later call replaces the earlier one, so that nothing is drawn twice.
    `AGENTSPEC_SPANS=off` or `OTEL_SDK_DISABLED=true` installs nothing.

    Args:
        provider: tracer provider of the spans, None for the global one at the time of each call.
        environ: where the variables are looked up.

    Raises:
        MissingDependencyError: `opentelemetry-util-genai` is not installed.
        ConfigurationError: `AGENTSPEC_SPANS` is none of own, enrich, off.
    """
    global _remove_installed
    mode = _mode(environ)
    with _lock:
        if _remove_installed is not None:
            _remove_installed()
            _remove_installed = None
        if mode is None:
            return _nothing
        genai, origins, private = GenAi(provider), Origins(), provider is not None
        removers = (
            register_call_observer(CallSpans(genai, mode=mode, origins=origins, private=private)),
            register_boundary_observer(BoundarySpans(genai, mode=mode, origins=origins, private=private)),
        )

        def remove() -> None:
            global _remove_installed
            for remover in removers:
                remover()
            if _remove_installed is remove:
                _remove_installed = None

        _remove_installed = remove
        return remove


def ensure_span_observers() -> None:
    """Observe with the program's own tracer provider, unless something is installed; never raises for lack.

    `agentspec_runtime.instrument()` calls this, so that a program which has OpenTelemetry needs no second
    line. Without the extra `otel` there are no spans.
    """
    if _remove_installed is not None:
        return
    try:
        install_span_observers()
    except MissingDependencyError as error:
        _log.debug("no spans of agents and model calls: %s", error)
    except ConfigurationError as error:
        _log.warning("no spans of agents and model calls: %s", error)


def _mode(environ: Mapping[str, str]) -> Mode | None:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    match environ.get(_VARIABLE, "own").strip().lower():
        case "own" | "":
            return "own"
        case "enrich":
            return "enrich"
        case "off":
            return None
        case other:
            raise ConfigurationError(f"{_VARIABLE}={other!r}: use own, enrich or off")


def _nothing() -> None:
    return None
