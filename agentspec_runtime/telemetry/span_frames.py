"""What travels between the engine and its span worker, in both directions.

To the worker: frames of a length and a pickle (of a `RequestReport` or a `Flush`). From it: lines of JSON
(`WorkerCounts`), the first as soon as it is ready. Both ends are of one installation, on a private pipe.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from typing import BinaryIO, Final, TypeAlias, cast

from agentspec_runtime.observe import RequestReport

__all__ = ["Flush", "Frame", "WorkerCounts", "read_frame", "write_frame"]

_LENGTH_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Flush:
    """Asks for an answer once everything before it was sent, or lost."""

    number: int


Frame: TypeAlias = RequestReport | Flush


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """Totals since the worker's start, in spans, and the number of the last `Flush` that was answered."""

    exported: int = 0
    lost: int = 0
    flushed: int = 0

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps({"exported": self.exported, "lost": self.lost, "flushed": self.flushed}) + "\n"

    @classmethod
    def parse(cls, line: bytes) -> WorkerCounts:
        """Out of a `line`."""
        found = json.loads(line)
        return cls(exported=found["exported"], lost=found["lost"], flushed=found["flushed"])


def write_frame(stream: BinaryIO, frame: Frame) -> None:
    """Write one frame and flush it; may wait for the reader.

    Raises:
        OSError: the reader is gone.
    """
    body = pickle.dumps(frame, pickle.HIGHEST_PROTOCOL)
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> Frame | None:
    """The next frame; None at the end, also in the middle of a frame."""
    head = stream.read(_LENGTH_BYTES)
    size = int.from_bytes(head, "little")
    body = stream.read(size) if len(head) == _LENGTH_BYTES else b""
    if not body or len(body) < size:
        return None
    return cast("Frame", pickle.loads(body))  # noqa: S301 - from our own process, on a private pipe
