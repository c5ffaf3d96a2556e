"""Recording one's own agent traffic, in the form that `agentspec bench replay` reads.

One JSON object per line and agent run: `messages` in the order in which they came up, each once, and
`requests` that name the messages of every prompt and the one that was generated. It holds prompts and
answers, so it is off unless asked for, and secrets are taken out by rule (see `redaction.py`).

What is recorded: chat completions and completions that were read to their end and have one choice. Calls of
a session form one run; calls outside of a session are put together by their first two messages. A call
that repeats an earlier one of its run, prompt and answer alike, is a replay (a graph that was resumed) and
is written once. An assistant message in a prompt that was not generated here (few-shot examples, an edited
history) becomes a user message with `original_role`, because everything of role assistant is replayed.

A run is written when the recorder is closed, when nothing came for `_IDLE_S`, or when it outgrows its bound;
a session that goes on afterwards starts another one. Writing never raises into a call.
"""

from __future__ import annotations

import atexit
import gzip
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Final
from uuid import uuid4

from agentspec_runtime.client.answer import Answer
from agentspec_runtime.client.redaction import Redactor, without_surrogates
from agentspec_runtime.client.report import CallReport
from agentspec_runtime.client.shield import shielded
from agentspec_runtime.errors import RecordingError

__all__ = ["Recorder", "record"]

Redact = Callable[[str], str]

_IDLE_S: Final = 900.0
"""A run is taken for finished after a quarter of an hour without a call."""
_MAX_OPEN: Final = 256
"""Runs that are kept in memory at once; the one longest idle is written first."""
_MAX_CHARS: Final = 16 << 20
"""Text of one run that is kept in memory before it is written."""


@dataclass(slots=True)
class _Run:
    """One agent run as it grows."""

    id: str
    group: str
    messages: list[dict[str, object]] = field(default_factory=list)
    index_of: dict[str, int] = field(default_factory=dict)
    requests: list[dict[str, object]] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    tools: dict[str, object] = field(default_factory=dict)
    replayed: set[tuple[tuple[int, ...], str]] = field(default_factory=set)
    model: str = ""
    exact: bool = True
    last_end_s: float | None = None
    chars: int = 0


class Recorder:
    """Writes agent runs to one file, appending. Safe to use from several threads.

    Args:
        path: file to write; compressed where it ends in `.gz`.
        redact: applied to every text after the built-in rules.

    Raises:
        RecordingError: the file cannot be written.
    """

    def __init__(self, path: Path, redact: Redact | None = None) -> None:
        self.path: Final = path
        self._redactor = Redactor()
        self._redact = redact
        self._lock = Lock()
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._written: dict[str, int] = {}
        self._name = f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid4().hex[:6]}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                pass
        except OSError as error:
            raise RecordingError(f"{path}: cannot be written: {error.strerror or error}") from error
        atexit.register(self.close)

    def begin(self) -> _CallSink:
        """A call starts."""
        return _CallSink(self)

    def close(self) -> None:
        """Write what is open."""
        atexit.unregister(self.close)
        with self._lock, shielded("writing a recording"):
            while self._runs:
                self._write(self._runs.popitem(last=False)[1])

    def add(
        self,
        body: Mapping[str, object],
        answer: Mapping[str, object],
        report: CallReport,
        times: tuple[float, float],
    ) -> None:
        """A call is over; `times` are its start and end on a monotonic clock, in seconds."""
        prompt = _prompt_of(body)
        if not prompt:
            return
        key = report.session or f"chat-{_digest(prompt[:2])[:16]}"
        with self._lock:
            run = self._runs.get(key)
            if run is None:
                run = self._runs[key] = self._new_run(key)
            self._runs.move_to_end(key)
            self._extend(run, prompt, answer, times)
            run.model = run.model or report.model or ""
            self._add_tools(run, body.get("tools"))
            self._write_idle(times[1])
            if run.chars > _MAX_CHARS:
                self._write(self._runs.pop(key))

    def _new_run(self, key: str) -> _Run:
        number = self._written.get(key, 0)
        self._written[key] = number + 1
        suffix = f"-{number + 1}" if number else ""
        return _Run(id=f"recorded/{self._name}/{key}{suffix}", group=key)

    def _extend(
        self,
        run: _Run,
        prompt: Sequence[Mapping[str, object]],
        answer: Mapping[str, object],
        times: tuple[float, float],
    ) -> None:
        indices = tuple(self._index(run, message) for message in prompt)
        key = _identity(answer)
        wait = 0.0 if run.last_end_s is None else max(0.0, times[0] - run.last_end_s)
        run.last_end_s = times[1]
        if (indices, key) in run.replayed:
            return
        run.replayed.add((indices, key))
        target = self._append(run, answer)
        # The newest of equal answers is the one that later prompts mean.
        run.index_of[key] = target
        run.requests.append({"prompt": list(indices), "target": target})
        run.waits_s.append(round(wait, 3))

    def _index(self, run: _Run, message: Mapping[str, object]) -> int:
        """Position of a prompt message; it is added where it is new."""
        key = _identity(message)
        found = run.index_of.get(key)
        if found is not None:
            return found
        if message["role"] == "assistant":
            run.exact = False
            message = _as_user(message)
        run.index_of[key] = self._append(run, message)
        return run.index_of[key]

    def _append(self, run: _Run, message: Mapping[str, object]) -> int:
        cleaned = self._clean(message)
        run.chars += len(json.dumps(cleaned))
        run.messages.append(cleaned)
        return len(run.messages) - 1

    def _clean(self, message: Mapping[str, object]) -> dict[str, object]:
        cleaned = {
            name: self._text(value) if isinstance(value, str) else value for name, value in message.items()
        }
        calls = cleaned.get("tool_calls")
        if isinstance(calls, list):
            cleaned["tool_calls"] = [
                {**call, "function": {name: self._text(value) for name, value in call["function"].items()}}
                for call in calls
            ]
        return cleaned

    def _text(self, text: str) -> str:
        text = self._redactor.clean(without_surrogates(text))
        return self._redact(text) if self._redact is not None else text

    def _add_tools(self, run: _Run, tools: object) -> None:
        for tool in tools if isinstance(tools, Sequence) and not isinstance(tools, str) else ():
            function = tool.get("function") if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            # Once per name: requests repeat their tools, and schemas are long.
            if isinstance(name, str) and name not in run.tools:
                run.tools[name] = self._redactor.clean_json(tool, self._text)

    def _write_idle(self, now_s: float) -> None:
        while self._runs:
            key, run = next(iter(self._runs.items()))
            idle = run.last_end_s is not None and now_s - run.last_end_s > _IDLE_S
            if not idle and len(self._runs) <= _MAX_OPEN:
                return
            del self._runs[key]
            self._write(run)

    def _write(self, run: _Run) -> None:
        if not run.requests:
            return
        line = json.dumps(
            {
                "id": run.id,
                "group": run.group,
                "source": {"recorded_by": "agentspec-runtime"},
                "workload": "recorded",
                "model": run.model,
                "fidelity": "exact" if run.exact else "reconstructed_prompt",
                "tools": list(run.tools.values()),
                "messages": run.messages,
                "requests": run.requests,
                "waits_s": run.waits_s,
            },
            default=str,
        )
        data = f"{line}\n".encode()
        with self.path.open("ab") as file:
            file.write(gzip.compress(data) if self.path.suffix == ".gz" else data)


class _CallSink:
    """Collects one answer for the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._answer = Answer()
        self._start_s = time.monotonic()

    def absorb(self, body: object) -> None:
        """A body or a chunk."""
        self._answer.absorb(body)

    def finish(self, body: Mapping[str, object], report: CallReport) -> None:
        """The call is over."""
        message = self._answer.message()
        if report.outcome == "ok" and message is not None and self._answer.num_choices == 1:
            self._recorder.add(body, message, report, (self._start_s, time.monotonic()))


def _prompt_of(body: Mapping[str, object]) -> list[dict[str, object]]:
    """Prompt messages in the recording's form."""
    messages = body.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        prompt = body.get("prompt")
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
    return [_message(message) for message in messages if isinstance(message, Mapping)]


_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})


def _message(message: Mapping[str, object]) -> dict[str, object]:
    role = message.get("role")
    if role not in _ROLES:
        role = "tool" if role == "function" else "user"
    plain: dict[str, object] = {"role": role, "content": _content(message.get("content"))}
    calls = [call for call in map(_call, _sequence(message.get("tool_calls"))) if call is not None]
    if calls:
        plain["tool_calls"] = calls
    elif plain["content"] is None:
        plain["content"] = ""
    for name in ("tool_call_id", "name"):
        if isinstance(value := message.get(name), str):
            plain[name] = value
    return plain


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _content(content: object) -> str | None:
    """Content as text; blocks joined by newlines, what is no text named by its type."""
    if content is None or isinstance(content, str):
        return content
    parts = []
    for block in _sequence(content):
        text = block.get("text") if isinstance(block, Mapping) else block
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        parts.append(text if isinstance(text, str) else f"[{kind}]")
    return "\n".join(parts)


def _call(call: object) -> dict[str, object] | None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return None
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
    named = {"name": str(function.get("name", "")), "arguments": text}
    return {"id": str(call.get("id", "")), "type": "function", "function": named}


def _as_user(message: Mapping[str, object]) -> dict[str, object]:
    calls = message.get("tool_calls")
    functions = [call["function"] for call in calls] if isinstance(calls, list) else []
    lines = [
        str(message.get("content") or ""),
        *(f"{function['name']} {function['arguments']}" for function in functions),
    ]
    return {"role": "user", "content": "\n".join(filter(None, lines)), "original_role": "assistant"}


def _identity(message: Mapping[str, object]) -> str:
    """Equal for a message and for the same message after a framework has rendered it again."""
    calls = message.get("tool_calls")
    plain = {
        "role": message["role"],
        "content": message.get("content") or "",
        "call": message.get("tool_call_id"),
        "calls": [
            [call["id"], call["function"]["name"], _canonical(call["function"]["arguments"])]
            for call in (calls if isinstance(calls, list) else [])
        ],
    }
    return _digest(plain)


def _canonical(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _digest(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def record(path: str | Path, *, redact: Redact | None = None) -> Iterator[Recorder]:
    """Record all model calls of the process while the block is open.

    ::

        with agentspec_runtime.record("runs.jsonl.gz"):
            agent.invoke(...)

    The file holds prompts and answers. Secrets are taken out by rule, personal details are not: pass
    `redact` for those.

    Raises:
        RecordingError: the file cannot be written.
    """
    from agentspec_runtime.client.instrument import recording_to  # it imports this module

    recorder = Recorder(Path(path), redact)
    try:
        with recording_to(recorder):
            yield recorder
    finally:
        recorder.close()
