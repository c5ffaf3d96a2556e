"""Run Python that a model wrote, in a child process with limits.

What it guards against: endless loops (wall clock and CPU time), memory growth, endless output, files
that grow without bound, the caller's environment variables (keys, tokens), packages of the user's site
folder, and children left behind. What it does **not** do: it is no security boundary. The child runs
as the same user, can read what that user can read, and the network is not blocked. For code that you
would not run yourself, put the whole process into a container or a virtual machine.

Output is the same for the same code: no times and no temporary paths, so that two runs of an agent
see the same prompts and can be compared.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Limits", "RunResult", "run_python"]

_MAX_OUTPUT_CHARS: Final = 2000
"""What an agent gets to see of a run: about 600 tokens, the tail (errors stand at the end)."""

# Limits are set by the child itself before it runs anything: `preexec_fn` may deadlock in a process
# with threads, and agents run tools in threads. A limit that the system does not know is left out.
_BOOTSTRAP: Final = """
import resource, runpy, sys
folder, script, cpu_s, memory_mb, file_mb = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
for name, value in (
    ("RLIMIT_CPU", cpu_s), ("RLIMIT_AS", memory_mb << 20), ("RLIMIT_FSIZE", file_mb << 20),
    ("RLIMIT_CORE", 0), ("RLIMIT_NOFILE", 64),
):
    try:
        resource.setrlimit(getattr(resource, name), (value, value))
    except (AttributeError, ValueError, OSError):
        pass
sys.path.insert(0, folder)
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one run. The defaults suit the unit tests of a small function."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_mb: int = 512
    file_mb: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run left behind. `output` is standard output and error together, the last part of it."""

    return_code: int
    output: str
    timed_out: bool
    wall_s: float

    @property
    def ok(self) -> bool:
        """True when the program ended by itself with exit status 0."""
        return self.return_code == 0 and not self.timed_out


def run_python(script: Path, *, folder: Path, limits: Limits | None = None) -> RunResult:
    """Run one Python file with `folder` as working directory and first import path.

    The interpreter runs in isolated mode (`-I`): no `PYTHON*` variables, no user site packages.
    """
    limits = limits or Limits()
    command = [sys.executable, "-I", "-B", "-u", "-c", _BOOTSTRAP, str(folder), str(script)]
    command += [str(limits.cpu_s), str(limits.memory_mb), str(limits.file_mb)]
    started = time.monotonic()
    # A file, not a pipe: the child's file size limit bounds it, and a grandchild that keeps it open
    # cannot keep us waiting.
    with tempfile.TemporaryFile() as sink:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": str(folder), "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return_code, timed_out = process.wait(timeout=limits.wall_s), False
        except subprocess.TimeoutExpired:
            return_code, timed_out = -signal.SIGKILL, True
        finally:
            _kill_group(process)
        size = sink.seek(0, os.SEEK_END)
        sink.seek(max(0, size - 4 * _MAX_OUTPUT_CHARS))
        text = sink.read().decode("utf-8", "replace")
    text = text.replace(f"{folder}{os.sep}", "")[-_MAX_OUTPUT_CHARS:]
    return RunResult(
        return_code=return_code, output=text, timed_out=timed_out, wall_s=time.monotonic() - started
    )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started in its own process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
