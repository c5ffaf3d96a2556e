"""Real receivers and records shared by the telemetry tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from agentspec_runtime.telemetry.receiver import OtlpReceiver


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No OTEL_* of the machine decides a test."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    """An OTLP receiver that speaks HTTP and gRPC."""
    with OtlpReceiver(grpc=True) as running:
        yield running
