"""Recordings: agent runs that can be replayed, one JSON object per line, gzip-compressed or plain.

Rules of the format (docs/measuring.md describes it for users):
    without `requests`, a recording is one growing chat: every assistant message was generated, and its
    prompt is everything before it;
    with `requests`, the agent made separate calls: each names the messages of its prompt, in order,
    and the one message that was generated. Every assistant message is the target of exactly one.

A reader checks everything that a replay relies on, because a recording that is silently misread gives
wrong numbers, not an error. Fields that it does not know are ignored.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Final, NotRequired, TypedDict, cast

from agentspec_runtime.errors import RecordingError

__all__ = [
    "Message",
    "Recording",
    "RecordingRequest",
    "ToolCall",
    "ToolFunction",
    "ToolSchema",
    "file_sha256",
    "read_recordings",
]

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
_GZIP_MAGIC: Final = b"\x1f\x8b"


class ToolFunction(TypedDict):
    """Name and arguments of a call, the arguments as the model wrote them (a JSON string)."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One call of an assistant message, in OpenAI's form."""

    id: str
    type: str
    function: ToolFunction


class Message(TypedDict):
    """One chat message, in OpenAI's form."""

    role: str
    content: str | None
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


ToolSchema = dict[str, object]
"""OpenAI tool schema, handed to the chat template as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRequest:
    """One model call: indices into `Recording.messages`, and what the agent waited before it.

    `wait_s` is the time in seconds between the end of the previous call and this one (a tool ran, a
    person typed); 0.0 where it was not recorded.
    """

    prompt: tuple[int, ...]
    target: int
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One agent run. `group` is the task: runs of one task must never be on both sides of a split."""

    id: str
    group: str
    workload: str
    model: str
    fidelity: str
    tools: tuple[ToolSchema, ...]
    messages: tuple[Message, ...]
    requests: tuple[RecordingRequest, ...]

    def prompt(self, request: RecordingRequest) -> list[Message]:
        """Messages that the model was given."""
        return [self.messages[index] for index in request.prompt]

    def target(self, request: RecordingRequest) -> Message:
        """The message that the model answered with."""
        return self.messages[request.target]

    def calls(self) -> Iterator[tuple[list[Message], Message]]:
        """(prompt messages, recorded answer) of every model call, in order."""
        for request in self.requests:
            yield self.prompt(request), self.target(request)


def read_recordings(path: Path | str, limit: int | None = None) -> Iterator[Recording]:
    """Recordings of one file, in its order; `limit` stops after that many.

    Raises:
        RecordingError: the file cannot be read, or a line is not a recording. The message names file,
            line and reason.
    """
    source = Path(path)
    seen: set[str] = set()
    count = 0
    for number, line in _lines(source):
        if limit is not None and count >= limit:
            return
        if not line.strip():
            continue
        recording = _parse(line, f"{source}:{number}")
        if recording.id in seen:
            raise RecordingError(
                f"{source}:{number}: id {recording.id!r} appeared before: ids must be unique"
            )
        seen.add(recording.id)
        count += 1
        yield recording
    if count == 0 and limit != 0:
        raise RecordingError(f"{source}: holds no recording; needed one JSON object per line")


def file_sha256(path: Path | str) -> str:
    """Hash of a file as it lies on disk, for provenance and cache keys."""
    digest = sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == _GZIP_MAGIC
        opened: IO[str] = (
            gzip.open(path, "rt", encoding="utf-8")  # noqa: SIM115 - closed by the `with` below
            if packed
            else path.open("r", encoding="utf-8")
        )
        with opened as file:
            yield from enumerate(file, start=1)
    except (EOFError, zlib.error) as error:
        raise RecordingError(
            f"{path}: gzip data is cut off or corrupt ({error}): copy the file again"
        ) from error
    except UnicodeDecodeError as error:
        raise RecordingError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(line: str, where: str) -> Recording:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise RecordingError(f"{where}: is not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise RecordingError(f"{where}: is nested too deeply") from error
    if not isinstance(data, dict):
        raise RecordingError(f"{where}: needed a JSON object, got {type(data).__name__}")
    fields = cast("dict[str, object]", data)
    messages = tuple(_messages(fields.get("messages"), where))
    identity = _text(fields, "id", where)
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordingError(f"{where}: 'tools' must be a list of tool schemas")
    return Recording(
        id=identity,
        group=_text(fields, "group", where, default=identity),
        workload=_text(fields, "workload", where, default="recorded"),
        model=_text(fields, "model", where, default=""),
        fidelity=_text(fields, "fidelity", where, default="exact"),
        tools=tuple(cast("list[ToolSchema]", tools)),
        messages=messages,
        requests=tuple(_requests(fields, messages, where)),
    )


def _text(fields: dict[str, object], name: str, where: str, default: str | None = None) -> str:
    value = fields.get(name, default)
    if not isinstance(value, str) or (not value and default is None):
        raise RecordingError(f"{where}: {name!r} must be a non-empty string, got {value!r:.60}")
    return value


def _messages(value: object, where: str) -> Iterator[Message]:
    if not isinstance(value, list) or not value:
        raise RecordingError(f"{where}: 'messages' must be a non-empty list of chat messages")
    for index, item in enumerate(value):
        here = f"{where}: messages[{index}]"
        if not isinstance(item, dict):
            raise RecordingError(f"{here} must be an object, got {type(item).__name__}")
        role, content = item.get("role"), item.get("content")
        if role not in _ROLES:
            raise RecordingError(f"{here}: role {role!r:.40} is none of {', '.join(sorted(_ROLES))}")
        if content is not None and not isinstance(content, str):
            raise RecordingError(f"{here}: content must be text or null, got {type(content).__name__}")
        calls = item.get("tool_calls")
        if calls:
            _check_calls(calls, here)
        elif content is None:
            raise RecordingError(f"{here}: has neither content nor tool calls")
        yield cast("Message", item)


def _check_calls(calls: object, here: str) -> None:
    if not isinstance(calls, list):
        raise RecordingError(f"{here}: tool_calls must be a list")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordingError(f"{here}: a tool call needs function.name and function.arguments")
        if not isinstance(function.get("arguments"), str):
            raise RecordingError(f"{here}: function.arguments must be the JSON string that the model wrote")


def _requests(
    fields: dict[str, object], messages: Sequence[Message], where: str
) -> Iterable[RecordingRequest]:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise RecordingError(f"{where}: holds no assistant message, so there is nothing to replay")
    listed = fields.get("requests")
    if listed is None:
        requests = [RecordingRequest(prompt=tuple(range(index)), target=index) for index in answers]
    else:
        if not isinstance(listed, list):
            raise RecordingError(f"{where}: 'requests' must be a list")
        requests = [_request(item, messages, f"{where}: requests[{n}]") for n, item in enumerate(listed)]
        if sorted(request.target for request in requests) != answers:
            raise RecordingError(
                f"{where}: every assistant message must be the target of exactly one request"
            )
    if any(not request.prompt for request in requests):
        raise RecordingError(f"{where}: an assistant message without anything before it has no prompt")
    return _with_waits(requests, fields.get("waits_s"), where)


def _request(item: object, messages: Sequence[Message], where: str) -> RecordingRequest:
    prompt = item.get("prompt") if isinstance(item, dict) else None
    target = item.get("target") if isinstance(item, dict) else None
    if not isinstance(target, int) or not isinstance(prompt, list):
        raise RecordingError(f"{where}: needed {{'prompt': [indices], 'target': index}}")
    if not all(isinstance(index, int) and 0 <= index < target for index in prompt):
        raise RecordingError(f"{where}: prompt indices must be smaller than the target, {target}")
    if not 0 <= target < len(messages):
        raise RecordingError(f"{where}: target {target} is outside the {len(messages)} messages")
    return RecordingRequest(prompt=tuple(prompt), target=target)


def _with_waits(requests: list[RecordingRequest], waits: object, where: str) -> list[RecordingRequest]:
    if waits is None:
        return requests
    if not isinstance(waits, list) or len(waits) != len(requests):
        raise RecordingError(f"{where}: 'waits_s' needs one entry per request ({len(requests)})")
    if not all(isinstance(wait, int | float) and math.isfinite(wait) and wait >= 0 for wait in waits):
        raise RecordingError(f"{where}: 'waits_s' must hold seconds, 0 or more")
    return [
        RecordingRequest(prompt=request.prompt, target=request.target, wait_s=float(wait))
        for request, wait in zip(requests, waits, strict=True)
    ]
