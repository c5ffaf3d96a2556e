"""Chat messages to tokens, as a server with this model would see them.

A prompt is the model's chat template over the messages (tools rendered by the template), encoded without
added special tokens, which is what vLLM's chat endpoint does. A forced answer is what the template makes
of the recorded message: tool calls in the model's own syntax, and the end token last.

Encoding text piece by piece between added tokens gives the same ids as encoding it whole, because a
tokenizer splits at added tokens before anything else. That turns the quadratic cost of growing chats into
a linear one. It is checked against the whole text on the first prompts, and dropped where it fails.
"""

from __future__ import annotations

import contextlib
import json
import re
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from agentspec_runtime.bench.recordings import Message, ToolSchema
from agentspec_runtime.errors import ConfigurationError, MissingDependencyError, RecordingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentspec_runtime.drafting import TokenTable

__all__ = ["ChatTokenizer", "Tokens", "load_chat_tokenizer", "load_vocabulary", "tokenizer_fingerprint"]

Tokens = NDArray[np.int32]

_RULES_VERSION: Final = 1
"""Part of the cache key: raise it when the same recording would give other tokens."""

_CHECKED_PROMPTS: Final = 8
"""Prompts that are also encoded whole; enough to meet every role and the tools once."""

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "tokenizer.model",
)


class _HubTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    eos_token_id: int | None
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(
        self,
        conversation: Sequence[object],
        *,
        tools: Sequence[object] | None,
        chat_template: str,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> str: ...


class ChatTokenizer:
    """Tokenizer and chat template of one model."""

    def __init__(self, tokenizer: _HubTokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._knows_tools = "tools" in template and "tool_calls" in template
        added = tokenizer.get_added_vocab()
        self._added = added
        pattern = "|".join(re.escape(text) for text in sorted(added, key=len, reverse=True))
        self._split = re.compile(f"({pattern})") if added else None
        self._pieces: dict[str, list[int]] = {}
        self._left_to_check = _CHECKED_PROMPTS

    def forget(self) -> None:
        """Drop the pieces kept from earlier texts; call it between recordings to bound memory."""
        self._pieces.clear()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens."""
        return self._tokenizer.decode(token_ids)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Tokens:
        """Tokens of a prompt, generation header included.

        Raises:
            RecordingError: the template refuses these messages.
        """
        return self._encode(self._render(messages, tools, opened=True))

    def answer(self, messages: Sequence[Message], target: Message, tools: Sequence[ToolSchema]) -> Tokens:
        """Tokens of a recorded answer to `messages`, with exactly one end token, as the last one."""
        before = self._render(messages, tools, opened=True)
        whole = self._render([*messages, target], tools, opened=False)
        if not whole.startswith(before):
            # A template that rewrites history (drops earlier reasoning, say): render the answer alone.
            opening: list[Message] = [{"role": "user", "content": "."}]
            before = self._render(opening, tools, opened=True)
            whole = self._render([*opening, target], tools, opened=False)
            if not whole.startswith(before):
                raise RecordingError(
                    "the chat template does not render an answer as a continuation of its prompt, so the "
                    "answer cannot be replayed with it: give another --chat-template"
                )
        body, end = self._cut_end(whole[len(before) :])
        ids = self._encode(body)
        return np.append(ids[ids != end], np.int32(end)).astype(np.int32)

    def _cut_end(self, text: str) -> tuple[str, int]:
        """Answer text without its end token, and that token (the template's, else the tokenizer's)."""
        trimmed = text.rstrip()
        for special, token_id in self._added.items():
            if special and trimmed.endswith(special):
                return trimmed[: -len(special)], token_id
        if self._tokenizer.eos_token_id is None:
            raise ConfigurationError("neither the chat template nor the tokenizer names an end token")
        return text, self._tokenizer.eos_token_id

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, opened: bool) -> str:
        if self._knows_tools:
            conversation: list[object] = [_parsed_arguments(message) for message in messages]
        else:
            conversation = list(_as_plain_chat(messages, tools))
        try:
            return self._tokenizer.apply_chat_template(
                conversation,
                tools=list(tools) or None if self._knows_tools else None,
                chat_template=self._template,
                add_generation_prompt=opened,
                tokenize=False,
            )
        except Exception as error:  # a template may raise anything
            raise RecordingError(f"the chat template refuses a recorded prompt: {error}") from error

    def _encode(self, text: str) -> Tokens:
        if self._split is None:
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece:
                ids.extend(self._piece(piece))
        if self._left_to_check > 0:
            self._left_to_check -= 1
            whole = self._tokenizer.encode(text, add_special_tokens=False)
            if whole != ids:
                self._split = None
                ids = whole
        return np.asarray(ids, dtype=np.int32)

    def _piece(self, piece: str) -> list[int]:
        known = self._pieces.get(piece)
        if known is None:
            known = self._tokenizer.encode(piece, add_special_tokens=False)
            self._pieces[piece] = known
        return known


def load_chat_tokenizer(model: str, chat_template: Path | None = None) -> ChatTokenizer:
    """Tokenizer of a model directory or hub name.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigurationError: no tokenizer or no chat template there.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", "bench") from error
    try:
        tokenizer = cast("_HubTokenizer", AutoTokenizer.from_pretrained(model))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"no tokenizer found for model {model!r}: {error}") from error
    template = chat_template.read_text(encoding="utf-8") if chat_template else tokenizer.chat_template
    if not template:
        raise ConfigurationError(f"model {model!r} has no chat template: give one with --chat-template")
    return ChatTokenizer(tokenizer, template)


@cache
def load_vocabulary(model: str) -> TokenTable:
    """The drafter's vocabulary of a model, made as the server makes it."""
    from transformers import AutoTokenizer

    from agentspec_runtime.engine.token_table import build_token_table

    tokenizer = AutoTokenizer.from_pretrained(model)
    return build_token_table(tokenizer, len(tokenizer))


def tokenizer_fingerprint(model: str, chat_template: Path | None = None) -> str:
    """Cache key of what decides tokens, without loading the tokenizer where the model is a directory."""
    digest = sha256(f"rules {_RULES_VERSION}\n".encode())
    folder = Path(model)
    if folder.is_dir():
        for name in _TOKENIZER_FILES:
            file = folder / name
            if file.is_file():
                digest.update(name.encode() + file.read_bytes())
    else:
        digest.update(model.encode())
    if chat_template:
        digest.update(chat_template.read_bytes())
    return digest.hexdigest()


def _parsed_arguments(message: Message) -> object:
    """Message with tool arguments as objects, the form that vLLM gives to chat templates."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed: list[object] = []
    for call in calls:
        arguments: object = call["function"]["arguments"]
        # What the model wrote may not be JSON: the template then shows it as text.
        with contextlib.suppress(json.JSONDecodeError):
            arguments = json.loads(call["function"]["arguments"])
        parsed.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": parsed}


def _as_plain_chat(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[dict[str, str]]:
    """Messages for a template that knows no tools, written in the widespread Hermes form."""
    chat: list[dict[str, str]] = []
    if tools:
        listing = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        chat.append({"role": "system", "content": f"# Tools\n\n<tools>\n{listing}\n</tools>"})
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        for call in message.get("tool_calls") or ():
            function = call["function"]
            name = json.dumps(function["name"], ensure_ascii=False)
            text = f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"]}}}\n</tool_call>'
            content = f"{content}\n{text}" if content else text
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        elif role in ("system", "developer"):
            role = "system"
            if tools and len(chat) == 1:
                content = f"{content}\n\n{chat.pop()['content']}"
        chat.append({"role": role, "content": content})
    return chat
