"""A client for tests: any request to a server, whole or streamed, as plain data; nothing of it is hidden.

Written on urllib, so that what is compared is what the server sent and not what an SDK makes of it.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 240


@dataclass(slots=True)
class Choice:
    """One sampled sequence. `tool_calls`: [name, arguments] in order."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    tool_calls: list[list[str]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Answer:
    """What a server said. `status` 200, or an error with its `message`."""

    status: int = 200
    message: str = ""
    choices: list[Choice] = field(default_factory=list)
    completion_tokens: int = 0
    prompt_tokens: int = 0
    speculative: dict[str, Any] | None = None
    num_chunks: int = 0


def ask(
    base_url: str, body: Mapping[str, Any], *, stream: bool = False, headers: Mapping[str, str] = {}
) -> Answer:
    """Send a request; a body with `prompt` goes to completions, one with `messages` to chat."""
    sent = dict(body)
    if stream:
        sent |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        with post(base_url, sent, headers) as response:
            return _collect(_events(response)) if stream else _collect([json.load(response)])
    except urllib.error.HTTPError as error:
        with error:
            return Answer(status=error.code, message=error.read().decode())


def post(base_url: str, body: Mapping[str, Any], headers: Mapping[str, str] = {}) -> Any:
    """The open response."""
    path = "completions" if "prompt" in body else "chat/completions"
    request = urllib.request.Request(
        f"{base_url}/{path}", json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def ask_all(
    base_url: str,
    bodies: Mapping[str, Mapping[str, Any]],
    *,
    at_once: int,
    stream: bool = False,
    headers: Mapping[str, str] = {},
) -> dict[str, Answer]:
    """All of them, so many at once."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = pool.map(lambda body: ask(base_url, body, stream=stream, headers=headers), bodies.values())
        return dict(zip(bodies, answers, strict=True))


def metric(root_url: str, name: str, label: str = "") -> float:
    """Sum of a Prometheus counter over its labels, or over those lines that have one (`source="assist"`)."""
    with urllib.request.urlopen(f"{root_url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith((f"{name} ", f"{name}{{")) and label in line
    )


def _events(response: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in response:
        text = line.decode().strip()
        if text.startswith("data: ") and text != "data: [DONE]":
            yield json.loads(text.removeprefix("data: "))


def _collect(parts: Iterable[dict[str, Any]]) -> Answer:
    answer = Answer()
    for part in parts:
        answer.num_chunks += 1
        if "error" in part:
            return Answer(status=int(part["error"].get("code") or 500), message=json.dumps(part))
        usage = part.get("usage") or {}
        answer.completion_tokens = usage.get("completion_tokens", answer.completion_tokens)
        answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
        answer.speculative = (part.get("metrics") or {}).get("speculative_decoding") or answer.speculative
        for item in part["choices"]:
            while len(answer.choices) <= item["index"]:
                answer.choices.append(Choice())
            _add(answer.choices[item["index"]], item)
    return answer


def _add(choice: Choice, item: Mapping[str, Any]) -> None:
    message = item.get("message") or item.get("delta") or {}
    choice.text += item.get("text") or message.get("content") or ""
    choice.token_ids += item.get("token_ids") or []
    for call in message.get("tool_calls") or []:
        index = call.get("index", len(choice.tool_calls))
        while len(choice.tool_calls) <= index:
            choice.tool_calls.append(["", ""])
        choice.tool_calls[index][0] += (call["function"].get("name")) or ""
        choice.tool_calls[index][1] += (call["function"].get("arguments")) or ""
    logprobs = item.get("logprobs") or {}
    choice.logprobs += [(entry["token"], entry["logprob"]) for entry in logprobs.get("content") or []]
    values = logprobs.get("token_logprobs") or []
    choice.logprobs += list(zip(logprobs.get("tokens") or [], values, strict=True))
    choice.finish_reason = item.get("finish_reason") or choice.finish_reason
    choice.stop_reason = item.get("stop_reason") or choice.stop_reason
