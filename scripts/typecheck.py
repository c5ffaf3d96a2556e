"""Run mypy over the package as it is installed, adapters included.

The folder `adapters/` is installed as `agentspec_runtime.adapters` (see pyproject.toml), a mapping that mypy
cannot see in the tree. So the package is laid out once more with links, and the paths in mypy's report are
turned back.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGE = ROOT / ".mypy_cache" / "stage"


def main() -> int:
    """Exit code of mypy."""
    shutil.rmtree(STAGE, ignore_errors=True)
    package = STAGE / "agentspec_runtime"
    package.mkdir(parents=True)
    for entry in (ROOT / "agentspec_runtime").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())
    (package / "adapters").symlink_to(ROOT / "adapters", target_is_directory=True)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "-p", "agentspec_runtime", *sys.argv[1:]]
    done = subprocess.run(command, cwd=STAGE, capture_output=True, text=True, check=False)
    report = done.stdout.replace("agentspec_runtime/adapters/", "adapters/")
    sys.stdout.write(report)
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
