"""What the machine has: memory that a process may still take, free ports, a GPU, bfloat16, OpenMP."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final

__all__ = [
    "available_memory_bytes",
    "has_fast_bfloat16",
    "has_gpu",
    "intel_openmp",
    "port_problem",
    "usable_cores",
]

# A driver that has not answered by then is as good as none.
_DRIVER_TIMEOUT_S: Final = 10
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int | None:
    """Memory that can be taken without swapping, within the limit of a container; None if unknown."""
    free = _meminfo_available()
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is None:  # cgroup v1
        limit = _number(_CGROUP / "memory/memory.limit_in_bytes")
        used = _number(_CGROUP / "memory/memory.usage_in_bytes")
    left = None if limit is None or used is None else max(limit - used, 0)
    known = [value for value in (free, left) if value is not None]
    return min(known) if known else None


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers here."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, timeout=_DRIVER_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def has_fast_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor is made for bfloat16; True where that cannot be told.

    vLLM computes in bfloat16 on a CPU unless told otherwise. Without AVX-512 (x86) or the BF16 extension
    (Arm) every product is emulated: measured on AVX2, 200 tokens of a prompt per second became 39.
    """
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return not {"avx512f", "amx_bf16", "bf16"}.isdisjoint(value.split())
    return True


def intel_openmp() -> Path | None:
    """Intel's OpenMP runtime of this Python environment (vLLM's CPU wheel brings it along on x86), if any."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("intel-openmp") or ():
            if file.name == "libiomp5.so" and (path := Path(str(file.locate())).resolve()).is_file():
                return path
    return None


def usable_cores() -> frozenset[int]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def port_problem(host: str, port: int) -> str | None:
    """Why a server cannot listen there, or None when it can. Tried by binding, and given back at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        return f"{host!r} is not an address of this machine ({error.strerror})"
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use{_owner(port)}"
            return f"cannot listen on {host or '0.0.0.0'}:{port} ({error.strerror})"  # noqa: S104 - only named
    return None


def _owner(port: int) -> str:
    """Which process listens there, where the system tells us (psutil comes with vLLM)."""
    try:
        import psutil
    except ImportError:
        return ""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                name = psutil.Process(connection.pid).name() if connection.pid else "unknown"
                return f" by process {connection.pid} ({name})"
    return ""


def _meminfo_available() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _number(path: Path) -> int | None:
    """Content of a one-number file; None where there is none, or no limit ("max")."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None
