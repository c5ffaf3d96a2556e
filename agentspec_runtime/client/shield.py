"""`with shielded("what"):` keeps a fault of ours, or of an observer, away from the user's call.

One place, so that the rule is the same everywhere: an `Exception` raised inside is logged once per key
with its traceback and dropped; `KeyboardInterrupt`, cancellation and the like pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

__all__ = ["attempt", "shielded"]

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("agentspec")
_logged: set[object] = set()
_MAX_LOGGED = 1_000
"""Keys may hold ids of objects; beyond this many, nothing new is logged."""


class shielded:  # noqa: N801 - read as a keyword: `with shielded(...)`
    """Drop and log once what the block raises; see the module docstring."""

    __slots__ = ("_key", "_what")

    def __init__(self, what: str, key: object = None) -> None:
        self._what = what
        self._key = what if key is None else (what, key)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if self._key not in _logged and len(_logged) < _MAX_LOGGED:
            _logged.add(self._key)
            _log.error(
                "%s raised; the call goes on without it, and this is logged once", self._what, exc_info=error
            )
        return True


def attempt(what: str, otherwise: R, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `function`, or `otherwise` where it raises."""
    result = otherwise
    with shielded(what):
        result = function(*args, **kwargs)
    return result  # noqa: RET504 - the block above may be left without a value
