"""The engine's child process: what is said when it fails, and that nothing outlives its reader."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

from agentspec_runtime.bench import engine_process
from agentspec_runtime.bench.engine_process import engine_events
from agentspec_runtime.errors import ServerError


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of the Python that would run the engine: its script is the job file."""
    runner = tmp_path / "python"
    runner.write_text(f'#!/bin/sh\nexec {sys.executable} "$3"\n')
    runner.chmod(0o755)
    monkeypatch.setattr(engine_process.sys, "executable", str(runner))
    return tmp_path / "job.py"


def test_events_come_as_they_are_told_and_a_clean_end_is_silent(fake_engine: Path, tmp_path: Path) -> None:
    fake_engine.write_text(
        'import os\nprint(\'{"event": "ready"}\')\nprint(\'{"x": "%s"}\' % os.environ["A"])'
    )
    events = list(engine_events(fake_engine, tmp_path / "log", {"A": "b"}))
    assert events == [{"event": "ready"}, {"x": "b"}]


def test_a_failure_shows_the_end_of_the_log_and_where_it_is(fake_engine: Path, tmp_path: Path) -> None:
    fake_engine.write_text("print('{}')\nraise ValueError('no room for the model')")
    log = tmp_path / "engine.log"
    with pytest.raises(ServerError, match="no room for the model") as failed:
        list(engine_events(fake_engine, log, {}))
    assert str(log) in str(failed.value)
    assert "code 1" in str(failed.value)


def test_a_reader_that_stops_leaves_no_process_behind(fake_engine: Path, tmp_path: Path) -> None:
    """Also not a grandchild, which is what vLLM's engine core is."""
    fake_engine.write_text(
        textwrap.dedent("""
            import json, subprocess, sys, time
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print(json.dumps({"pid": child.pid}), flush=True)
            time.sleep(600)
        """)
    )
    events = engine_events(fake_engine, tmp_path / "log", {})
    pid = next(events)["pid"]
    assert isinstance(pid, int)
    os.kill(pid, 0)
    events.close()  # type: ignore[attr-defined]  # a generator
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _alive(pid):
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
