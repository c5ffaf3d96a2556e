"""Structure-aware speculative decoding for LLM agents on your own vLLM.

What an agent process needs is here; importing it loads nothing heavy (no SDK, no vllm, no torch): each name
is looked up when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agentspec_runtime.client.instrument import instrument, uninstrument
    from agentspec_runtime.client.recording import record
    from agentspec_runtime.client.report import CallReport, collect_calls, on_call
    from agentspec_runtime.client.session import session
    from agentspec_runtime.client.tool import tool
    from agentspec_runtime.hints import Hint, SegmentKind
    from agentspec_runtime.telemetry.client import configure_tracing

    __version__: str

__all__ = [
    "CallReport",
    "Hint",
    "SegmentKind",
    "__version__",
    "collect_calls",
    "configure_tracing",
    "instrument",
    "on_call",
    "record",
    "session",
    "tool",
    "uninstrument",
]

_HOMES: Final = {
    "CallReport": "client.report",
    "Hint": "hints",
    "SegmentKind": "hints",
    "collect_calls": "client.report",
    "configure_tracing": "telemetry.client",
    "instrument": "client.instrument",
    "on_call": "client.report",
    "record": "client.recording",
    "session": "client.session",
    "tool": "client.tool",
    "uninstrument": "client.instrument",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("agentspec-runtime")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
