"""The wall between our code and vLLM's step: whatever is raised behind it is counted and dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Guard"]

_log = logging.getLogger("agentspec.engine")


class Guard:
    """Calls what may fail. `errors` counts all of it; each place is logged once, with its traceback."""

    def __init__(self, consequence: str) -> None:
        """`consequence`: what an error means, for the log."""
        self.errors = 0
        self._consequence = consequence
        self._logged: set[str] = set()

    def __call__(self, where: str, call: Callable[[], object]) -> bool:
        """Call it. False when it raised."""
        try:
            call()
        except Exception:  # noqa: BLE001  (the reason for this class)
            self.errors += 1
            if where not in self._logged:
                self._logged.add(where)
                _log.exception("agentspec: error in %r; %s (logged once)", where, self._consequence)
            return False
        return True
