"""The child process that holds an engine: started, listened to, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from agentspec_runtime.engine.args import JsonValue
from agentspec_runtime.errors import ServerError

__all__ = ["engine_events"]

_LOG_LINES: Final = 15
"""Last lines of an engine's log in the error about its end: enough for a Python exception."""

_STOP_TIMEOUT_S: Final = 20.0


def engine_events(
    job_file: Path, log_file: Path, environment: Mapping[str, str]
) -> Iterator[Mapping[str, JsonValue]]:
    """Events of an engine process until it ends; it is stopped when the reader stops.

    Raises:
        ServerError: it ended with an error.
    """
    command = [sys.executable, "-m", "agentspec_runtime.bench.replay_engine", str(job_file)]
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            assert process.stdout is not None  # noqa: S101 - a pipe was asked for
            for line in process.stdout:
                yield json.loads(line)
            code = process.wait()
        finally:
            _stop(process)
    if code != 0:
        tail = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        raise ServerError(
            f"the engine process ended with code {code}; finished cells are kept, and the same command "
            f"continues from there. Its log is {log_file}, and ends with:\n" + "\n".join(tail)
        )


def _stop(process: subprocess.Popen[str]) -> None:
    """End an engine process, politely first, and whatever it started: all of it is one process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
