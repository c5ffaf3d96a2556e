"""Putting an answer together out of a body or the chunks of a stream, whatever dialect the server speaks.

Tool calls of one answer are told apart by id where there is one, else by index, else by order: servers send
index 0 for every call, leave the index out, or send the id with the first fragment only. Arguments are text;
nothing here needs them to be JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentspec_runtime.client.received import pick

__all__ = ["Answer", "AnswerCall"]


@dataclass(slots=True, kw_only=True)
class AnswerCall:
    """One tool call."""

    id: str = ""
    index: int | None = None
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def wire(self) -> dict[str, object]:
        """In OpenAI's form."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class Answer:
    """The first choice of an answer, as an assistant message."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: list[AnswerCall] = []
        self._choices: set[object] = set()

    @property
    def num_choices(self) -> int:
        """Choices seen; more than one means that this is not a single answer."""
        return len(self._choices)

    def absorb(self, body: object) -> None:
        """Take a body or a chunk, of chat completions or completions."""
        for choice in _items(pick(body, "choices")):
            self._choices.add(pick(choice, "index"))
            if pick(choice, "index") not in (None, 0):
                continue
            message = pick(choice, "message")
            part = message if message is not None else pick(choice, "delta")
            for text in (pick(choice, "text"), pick(part, "content")):
                if isinstance(text, str):
                    self._content.append(text)
            for call in _items(pick(part, "tool_calls")):
                self._fragment(call)

    def _fragment(self, fragment: object) -> None:
        function = pick(fragment, "function")
        name, arguments = pick(function, "name"), pick(function, "arguments")
        call = self._call_of(pick(fragment, "id"), pick(fragment, "index"), starts=bool(name))
        if isinstance(name, str) and not call.name:
            call.name = name
        if isinstance(arguments, str):
            call.arguments.append(arguments)

    def _call_of(self, call_id: object, index: object, *, starts: bool) -> AnswerCall:
        number = index if isinstance(index, int) else None
        if isinstance(call_id, str) and call_id:
            found = next((call for call in self._calls if call.id == call_id), None)
        elif number is not None:
            found = next((call for call in reversed(self._calls) if call.index == number), None)
        else:
            found = None if starts or not self._calls else self._calls[-1]
        if found is None:
            found = AnswerCall(id=call_id if isinstance(call_id, str) else "", index=number)
            self._calls.append(found)
        return found

    def message(self) -> dict[str, object] | None:
        """The assistant message; None where nothing was generated."""
        content = "".join(self._content)
        if self._calls:
            calls = [call.wire() for call in self._calls]
            return {"role": "assistant", "content": content or None, "tool_calls": calls}
        return {"role": "assistant", "content": content} if content else None


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()
