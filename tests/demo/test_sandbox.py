"""Model-written code runs with limits, without the caller's environment, and leaves no process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from agentspec_runtime.demo.sandbox import Limits, RunResult, run_python


def run(folder: Path, code: str, **limits: float) -> RunResult:
    (folder / "script.py").write_text(code)
    return run_python(folder / "script.py", folder=folder, limits=Limits(**limits) if limits else None)


def test_output_and_status(tmp_path: Path) -> None:
    result = run(tmp_path, "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(3)")
    assert (result.return_code, result.output, result.ok, result.timed_out) == (3, "out\nerr\n", False, False)


def test_imports_come_from_the_folder_and_not_from_the_callers_path(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("value = 7")
    os.environ["PYTHONPATH"] = str(tmp_path / "elsewhere")
    try:
        result = run(
            tmp_path, "import neighbour, sys\nprint(neighbour.value, any('elsewhere' in p for p in sys.path))"
        )
    finally:
        del os.environ["PYTHONPATH"]
    assert result.output == "7 False\n"


def test_the_callers_environment_stays_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    assert "canary" not in run(tmp_path, "import os\nprint(dict(os.environ))").output


def test_an_endless_loop_ends(tmp_path: Path) -> None:
    began = time.monotonic()
    result = run(tmp_path, "print('begun', flush=True)\nwhile True: pass", wall_s=0.5)
    assert result.timed_out
    assert not result.ok
    assert result.output == "begun\n"
    assert time.monotonic() - began < 5


def test_cpu_time_is_limited_where_the_wall_clock_is_generous(tmp_path: Path) -> None:
    result = run(tmp_path, "while True: pass", wall_s=30, cpu_s=1)
    assert not result.ok
    assert not result.timed_out


def test_memory_is_limited(tmp_path: Path) -> None:
    result = run(tmp_path, "x = bytearray(2 << 30)", wall_s=20, memory_mb=256)
    assert "MemoryError" in result.output


def test_endless_output_is_cut_and_keeps_its_end(tmp_path: Path) -> None:
    endless = run(tmp_path, "while True: print('x' * 1000)", wall_s=20, file_mb=1)
    assert not endless.ok
    assert len(endless.output) <= 2000
    long = run(tmp_path, "print('start'); print('y' * 5000); print('end')")
    assert long.output.endswith("end\n")
    assert "start" not in long.output


def test_children_are_ended_with_the_program(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid)\n"
    )
    child = int(run(tmp_path, code).output)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"child {child} is still there")


def test_two_runs_in_different_folders_say_the_same(tmp_path: Path) -> None:
    """Agents put the output into prompts, and prompts are compared."""
    outputs = set()
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        outputs.add(run(folder, "1 / 0").output)
    (output,) = outputs
    assert "ZeroDivisionError" in output
    assert str(tmp_path) not in output
