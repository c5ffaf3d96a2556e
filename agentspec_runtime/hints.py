"""The hint: what an agent may tell the server about the structure of a request.

A hint is advice from outside. It may change speed, never tokens; it can narrow what drafts are made
from, never widen it; and everything in it is optional, because the server infers structure by itself
(roles, chat-template tokens, fences, tool-call markers). It carries no text of the request.

Wire form: compact JSON of at most `MAX_HINT_BYTES` bytes under one key of vLLM's `vllm_xargs`
(which takes only scalars and flat lists, hence the string)::

    {"vllm_xargs": {"agentspec": "{\"v\":1,\"session\":\"s-1\",\"turn\":3,\"expect\":[\"code\"]}"}}

Unknown fields and unknown segment kinds survive a decode/encode round trip, so that client and server
may be of different versions. A hint of a newer major version is ignored by the server, not refused.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentspec_runtime.errors import HintError

__all__ = [
    "HINT_VERSION",
    "MAX_HINT_BYTES",
    "XARGS_KEY",
    "Hint",
    "MessageMark",
    "SegmentKind",
    "decode_hint",
    "encode_hint",
]

HINT_VERSION: Final = 1
XARGS_KEY: Final = "agentspec"
MAX_HINT_BYTES: Final = 4096
"""A hint rides on every request; 4 KiB holds about 100 message marks."""

_MAX_NAME = 128
_MAX_MARKS = 128
_MAX_EXPECTED = 16


class SegmentKind(StrEnum):
    """Structural role of a span of tokens, in a prompt or in an answer. The set is closed."""

    SYSTEM = "system"
    TOOL_SCHEMA = "tool_schema"
    USER = "user"
    REASONING = "reasoning"
    TEXT = "text"
    CODE = "code"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    FILE = "file"


Name = Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]


class MessageMark(BaseModel):
    """What one message of the request is, where its role alone does not say it.

    `index` counts `messages` from 0. `kind` is a `SegmentKind`, or the name of a kind that a newer
    version knows. `call_id` is the id of the tool call that a tool result answers.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    index: int = Field(ge=0, le=1_000_000)
    kind: Name
    call_id: Name | None = None


class Hint(BaseModel):
    """Structure of one request, as its agent knows it. See the module docstring for the wire form.

    Attributes:
        v: version of the vocabulary.
        session: one agent run; requests of one session draft from each other's text.
        agent: name or role of the agent that makes this call; `parent` is the agent that called it.
        turn: number of this model call in its session, from 0.
        expect: block kinds that the answer is expected to hold, in order.
        marks: messages whose role does not tell what they are.
        tools: number of tools offered.
        speculate: "auto" (default), "off" (no drafts for this request), or the greatest draft length.
        latency: "interactive" weighs this request's slots up, "batch" down.
        scope: the widest text that drafts may come from: "corpus" (all that shares the prefix cache),
            "session" or "request". It narrows what the server allows, never widens it.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    v: int = Field(default=HINT_VERSION, ge=1, le=1_000)
    session: Name | None = None
    agent: Name | None = None
    parent: Name | None = None
    turn: int | None = Field(default=None, ge=0, le=1_000_000)
    expect: tuple[Name, ...] = Field(default=(), max_length=_MAX_EXPECTED)
    marks: tuple[MessageMark, ...] = Field(default=(), max_length=_MAX_MARKS)
    tools: int | None = Field(default=None, ge=0, le=100_000)
    speculate: Literal["auto", "off"] | Annotated[int, Field(ge=0, le=1024)] = "auto"
    latency: Literal["interactive", "normal", "batch"] = "normal"
    scope: Literal["corpus", "session", "request"] = "corpus"

    @field_validator("v", "turn", "tools", "speculate", mode="before")
    @classmethod
    def _no_booleans(cls, value: object) -> object:
        # JSON true would otherwise count as 1: a client that writes it means something else.
        if isinstance(value, bool):
            raise ValueError("a boolean is not a number here")
        return value


def encode_hint(hint: Hint) -> str:
    """Wire form of a hint: compact JSON without defaults.

    Raises:
        HintError: the result is larger than `MAX_HINT_BYTES` bytes.
    """
    text = hint.model_dump_json(exclude_defaults=True)
    if '"v":' not in text:
        text = f'{{"v":{hint.v}' + ("," + text[1:] if len(text) > 2 else "}")
    size = len(text.encode())
    if size > MAX_HINT_BYTES:
        raise HintError(f"hint of {size} bytes, at most {MAX_HINT_BYTES}: send fewer message marks")
    return text


def decode_hint(value: object) -> Hint:
    """Hint out of what stood under `XARGS_KEY`.

    Raises:
        HintError: not a string, too large, not JSON, or outside the limits. The message names the
            field and never repeats more than a few characters of what was sent.
    """
    if not isinstance(value, str):
        raise HintError(f"{XARGS_KEY}: expected one JSON string, got {type(value).__name__}")
    # Length in characters first: a lone surrogate cannot be encoded, and a huge value should not be.
    if len(value) > MAX_HINT_BYTES or len(value.encode("utf-8", "surrogatepass")) > MAX_HINT_BYTES:
        raise HintError(f"{XARGS_KEY}: larger than {MAX_HINT_BYTES} bytes")
    try:
        hint = Hint.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "hint"
        raise HintError(f"{XARGS_KEY}: {where[:80]}: {first['msg'][:200]}") from None
    if "NaN" in value or "Infinity" in value:  # pydantic takes them in fields that it does not know
        json.loads(value, parse_constant=_refuse_constant)
    return hint


def _refuse_constant(name: str) -> None:
    raise HintError(f"{XARGS_KEY}: hint: {name} is not JSON")
