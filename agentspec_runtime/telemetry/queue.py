"""Handing records from a thread that must not wait to one that may.

`BoundedQueue.put` is what the engine's step and the agent's call pay: a length check and an append. It
takes no lock (a deque's append is atomic), wakes nobody (the reader polls) and never blocks; a full queue
drops the new record and counts it. `Worker` is the reader's thread. It is a daemon and its `stop` is
bounded, so that a collector that hangs can hold neither a step nor the exit of the process.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["BoundedQueue", "Worker"]

_T = TypeVar("_T")
_log = logging.getLogger("agentspec.telemetry")


class BoundedQueue(Generic[_T]):
    """First in, first out, never more than `limit` items, any number of writers, one reader."""

    __slots__ = ("_dropped", "_dropped_lock", "_items", "_limit")

    def __init__(self, limit: int) -> None:
        self._items: deque[_T] = deque()
        self._limit = limit
        self._dropped = 0
        self._dropped_lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def dropped(self) -> int:
        """Items refused since the start because the queue was full."""
        return self._dropped

    def put(self, item: _T) -> bool:
        """Append, or count the item as dropped and return False.

        Several writers that meet at the limit may exceed it by one item each; nobody waits for exactness.
        """
        if len(self._items) >= self._limit:
            with self._dropped_lock:
                self._dropped += 1
            return False
        self._items.append(item)
        return True

    def take(self, at_most: int) -> list[_T]:
        """Oldest items, at most that many; empty if there are none."""
        taken: list[_T] = []
        while len(taken) < at_most:
            try:
                taken.append(self._items.popleft())
            except IndexError:
                break
        return taken


class Worker:
    """A daemon thread that runs `work` every `period_s` seconds, and once more when stopped.

    An exception of `work` is counted in `failures` and logged once; the thread lives on.
    """

    def __init__(self, name: str, work: Callable[[], None], *, period_s: float) -> None:
        self.failures = 0
        self._work = work
        self._period_s = period_s
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called: a long `work` may look at it and hurry."""
        return self._stopping

    def wake(self) -> None:
        """Run soon instead of at the end of the period."""
        self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """Run `work` a last time and end; False if it was not over within the time (it is left behind)."""
        self._stopping = True
        self._wake.set()
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._period_s)
            self._wake.clear()
            self._once()
        self._once()

    def _once(self) -> None:
        try:
            self._work()
        except Exception:  # noqa: BLE001 - the thread must outlive whatever an exporter or a registry raises
            self.failures += 1
            if self.failures == 1:
                _log.exception("telemetry: this kind of failure is logged once; records were lost")
