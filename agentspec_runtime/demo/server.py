"""Start `agentspec serve` for the time of a block, and leave nothing behind.

The server runs in a process group of its own: Ctrl-C reaches the demo only, which then ends the group,
with the signal that a user would send first and by force after a while. Its output goes to a log file
that is kept; when it fails, the end of that file is in the error.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentspec_runtime.errors import ServerError

__all__ = ["RunningServer", "ServerCommand", "end_of_log", "free_port", "running_server"]

_START_TIMEOUT_S: Final = 600.0
"""Half a minute for the embedded model on two cores; a large model that is compiled takes minutes."""
_STOP_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.25
_LOG_TAIL_LINES: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """What to start. `model` None is the embedded one; `options` are further ones of `agentspec serve`,
    `vllm_flags` are passed on word for word.
    """

    plain: bool
    port: int
    otlp_endpoint: str
    model: str | None = None
    options: tuple[str, ...] = ()
    vllm_flags: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Command line of the server."""
        serve = [sys.executable, "-m", "agentspec_runtime", "serve"]
        if self.model is not None:
            serve.append(self.model)
        if self.plain:
            serve.append("--plain")
        serve.append(f"--otlp-endpoint={self.otlp_endpoint}")
        return [*serve, *self.options, "--", f"--port={self.port}", *self.vllm_flags]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that answers. `base_url` ends in /v1, as OpenAI clients want it."""

    base_url: str
    pid: int
    started_s: float


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running_server(
    command: ServerCommand, *, log: Path, on_wait: Callable[[float], None]
) -> Iterator[RunningServer]:
    """Start the server, wait until it answers, and end it with the block.

    Args:
        command: what to start.
        log: file for all that the server prints.
        on_wait: called with the seconds so far while the server is loading.

    Raises:
        ServerError: it ended by itself or did not answer in time; the message holds the end of its log.
    """
    # The servers of a comparison get the same environment, whatever tracing this process was told to do.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment |= {"VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command.arguments(),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        started_s = _wait_until_ready(process, command.port, log, on_wait)
        yield RunningServer(
            base_url=f"http://127.0.0.1:{command.port}/v1", pid=process.pid, started_s=started_s
        )
    finally:
        _stop(process)


def _wait_until_ready(
    process: subprocess.Popen[bytes], port: int, log: Path, on_wait: Callable[[float], None]
) -> float:
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < _START_TIMEOUT_S:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode}; {end_of_log(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return waited_s
        except (urllib.error.URLError, OSError):
            pass
        on_wait(waited_s)
        time.sleep(_POLL_S)
    raise ServerError(f"the server did not answer within {_START_TIMEOUT_S:.0f} s; {end_of_log(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server's process group, politely first. A second Ctrl-C meanwhile skips the politeness."""
    try:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_of_log(log: Path) -> str:
    """The last lines of a server's log, for an error message."""
    lines: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return f"the end of its log ({log}):\n" + "\n".join(lines)
