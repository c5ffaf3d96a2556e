"""Every exception that this package raises on purpose.

::

    AgentSpecError
    ├── HintError            what a client sent as a hint cannot be used (the server answers HTTP 400)
    ├── ConfigurationError   options that do not fit together, found before anything is started
    │   └── UnsupportedVersionError   vLLM, Python or another package is outside the supported range
    ├── MissingDependencyError        an optional package is needed here; the message names the extra
    ├── ModelError           the embedded model is missing, corrupt or cannot be converted
    ├── RecordingError       a recorded trace file that cannot be read
    └── ServerError          the server did not start, or stopped by itself

A message says what came, what was needed, and what to do next. Nothing here is ever raised inside an
engine step: there, bad input is dropped and counted (see `engine/scheduler.py`).
"""

from __future__ import annotations

__all__ = [
    "AgentSpecError",
    "ConfigurationError",
    "HintError",
    "MissingDependencyError",
    "ModelError",
    "RecordingError",
    "ServerError",
    "UnsupportedVersionError",
]


class AgentSpecError(Exception):
    """Base of all errors of this package."""


class HintError(AgentSpecError, ValueError):
    """A hint that cannot be used; the message is safe to send back to the client."""


class ConfigurationError(AgentSpecError, ValueError):
    """Options that are wrong or do not fit together."""


class UnsupportedVersionError(ConfigurationError):
    """A package outside the range that this release was made for."""


class MissingDependencyError(AgentSpecError, ImportError):
    """An optional dependency is needed for what was asked."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"{module!r} is not installed, and this needs it: pip install 'agentspec-runtime[{extra}]'"
        )
        self.module = module
        self.extra = extra


class ModelError(AgentSpecError):
    """The embedded model cannot be provided."""


class RecordingError(AgentSpecError, ValueError):
    """A trace recording that cannot be read; the message names file, line and reason."""


class ServerError(AgentSpecError, RuntimeError):
    """The server did not start, or stopped by itself."""
