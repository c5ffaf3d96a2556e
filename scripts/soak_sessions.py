"""What soak.py sends: sessions of one or two requests, short, of the kinds that agents send.

Chat, code, forced tool call, JSON schema, log probabilities, sampled; and those that go wrong on purpose: a
stream that is left, a request that is cancelled, a malformed hint. All greedy but "sampled".
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["KINDS", "WEIGHTS", "Body", "turns"]

Body = dict[str, Any]  # a request of the OpenAI API, as JSON
CODE: Final = """def add(a: int, b: int) -> int:
    return a + b


def sub(a: int, b: int) -> int:
    return a - b
"""
PERSON: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
READ_FILE: Final = {
    "name": "read_file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
KINDS: Final = ("chat", "code", "tool", "json", "logprobs", "sampled", "leave", "cancel", "bad hint")
WEIGHTS: Final = (3, 4, 2, 2, 2, 1, 1, 1, 1)


def turns(kind: str, number: str, model: str) -> list[Body]:
    """The requests of a session. `number` makes its text different from that of other sessions."""
    common: Body = {"model": model, "temperature": 0, "return_token_ids": True, "max_tokens": 24}
    first = f"Project {number}. "

    def chat(text: str, **options: object) -> Body:
        return {**common, "messages": [{"role": "user", "content": first + text}], **options}

    edit = f"Rename add to plus and repeat the file.\n```python\n{CODE}```"
    if kind == "chat":
        return [chat("What is the capital of France?"), chat("Name three colours, please.")]
    if kind == "code":
        return [chat(edit, max_tokens=40), chat(edit + "\nKeep the names.", max_tokens=40)]
    if kind == "tool":
        choice = {"type": "function", "function": {"name": "read_file"}}
        tools = [{"type": "function", "function": READ_FILE}]
        return [chat("Read the file notes.txt", tools=tools, tool_choice=choice, max_tokens=32)]
    if kind == "json":
        schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        return [chat("Who wrote the first program?", response_format=schema, max_tokens=32)]
    if kind == "logprobs":
        return [{**common, "prompt": (first + "red green blue ") * 6, "logprobs": 1}]
    if kind == "sampled":
        return [chat("Tell me a story.", temperature=0.8)]
    if kind == "bad hint":
        return [chat("Hi", vllm_xargs={"agentspec": '{"turn": -1}'})]
    return [chat(edit, max_tokens=400, ignore_eos=True)]  # left or cancelled long before its end
