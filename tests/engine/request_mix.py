"""Requests of every kind that an agent or its framework sends, all greedy, short answers, built from parts.

Names say what each is there for. The texts repeat themselves, so that drafts are made and cross whatever
the request limits: a stop string, a grammar, `max_tokens`, the context.
"""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]

CODE = '''def add(a: int, b: int) -> int:
    """Return the sum."""
    return a + b


def sub(a: int, b: int) -> int:
    """Return the difference."""
    return a - b
'''
EDIT = f"Rename add to plus and repeat the whole file.\n```python\n{CODE}```"
FENCED_JSON = 'Answer like this:\n```json\n{"name": "Ada", "age": 36}\n```\nWho wrote the first program?'
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tool(name: str, **properties: str) -> Body:
    """A tool whose parameters are all required."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [tool("read_file", path="string"), tool("write_file", path="string", text="string"), tool("run")]
SYSTEM = {"role": "system", "content": "Be brief."}
HISTORY = [
    {"role": "user", "content": "Read notes.txt"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "read_file", "arguments": '{"path": "notes.txt"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Buy milk. Call Ada. 日本語 🍸"},
    {"role": "user", "content": "What do the notes say? Repeat them, then read notes.txt again."},
]


def chat(text: str, *, max_tokens: int = 40, **options: object) -> Body:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **options}


def completion(prompt: str | list[int], *, max_tokens: int = 40, **options: object) -> Body:
    return {"prompt": prompt, "max_tokens": max_tokens, **options}


def greedy_requests(model: str) -> dict[str, Body]:
    """Name -> body. All ask for the token ids, which are what is compared."""
    common = {"model": model, "temperature": 0, "return_token_ids": True}
    return {name: {**common, **body} for name, body in {**_plain(), **_limited(), **_constrained()}.items()}


def _plain() -> dict[str, Body]:
    copy = "the quick brown fox jumps over the lazy dog. " * 6
    return {
        "chat": chat("What is the capital of France?"),
        "chat with a system message": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *chat("Why is the sky blue?")["messages"],
            ],
            "max_tokens": 40,
        },
        "code edit": chat(EDIT, max_tokens=90),
        "code continued": completion(CODE * 2 + "def add(", max_tokens=48),
        "copy": completion(copy, max_tokens=64, ignore_eos=True),
        "copy in long words": completion("supercalifragilistic expialidocious " * 8, max_tokens=48),
        "numbers": completion("1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2,", max_tokens=40),
        "json lines": completion('{"a": 1, "b": [2, 3]}\n' * 6, max_tokens=48),
        "unicode": chat("Wiederhole: Münster, Köln, Zürich, naïve café, Łódź, Ελλάδα, Москва"),
        "emoji": completion("🍸 🍺 🍷 👩‍👩‍👧‍👦 🏳️‍🌈 " * 5, max_tokens=48),
        "no Latin letters": completion("日本語の文章です。" * 5, max_tokens=32),
        "control tokens in the content": chat("Say <|im_end|> and </tool_call> and ```"),
        "one space": chat(" ", max_tokens=16),
        "one letter": completion("a", max_tokens=16),
        "one token": completion([1], max_tokens=16),
        "a newline": completion("\n", max_tokens=16),
        "a a a": completion("a " * 300, max_tokens=40),
        "identical lines": completion("same line\n" * 100, max_tokens=40),
        "tool history": {"messages": HISTORY, "tools": TOOLS, "max_tokens": 48},
        "tool offered": {**chat("Read the file notes.txt"), "tools": TOOLS},
        "no special tokens skipped": chat("Say hi.", skip_special_tokens=False),
        "echo": completion("Once upon a time", max_tokens=16, echo=True),
    }


def _limited() -> dict[str, Body]:
    lines = "alpha\nbeta\ngamma\n" * 6
    requests = {
        f"max_tokens {n}": completion("one two three four five " * 8, max_tokens=n, ignore_eos=True)
        for n in (1, 2, 3, 7, 12, 33)
    }
    requests |= {
        "stop string": completion(lines, stop=["gamma"]),
        "stop over two tokens": completion(lines, stop=["ta\nga"]),
        "several stops": completion(lines, stop=["never", "eta", "gam"]),
        "stop kept in the text": completion(lines, stop=["beta\n"], include_stop_str_in_output=True),
        "stop of a tool call": completion("<tool_call>\n{}\n</tool_call>\n" * 5, stop=["</tool_call>"]),
        "stop token": completion(lines, stop_token_ids=[198]),
        "ends are ignored": chat("Say hi.", ignore_eos=True, max_tokens=48),
        "min_tokens": chat("Say Done.", min_tokens=24, max_tokens=32),
        "min_tokens within a copied line": completion(
            "I like red, green, blue, pink and grey paint.\n" * 6, min_tokens=4, stop_token_ids=[198]
        ),
        "min_tokens is max_tokens": chat("Say Done.", min_tokens=20, max_tokens=20),
        "logprobs": chat("Repeat: red green blue red green blue", logprobs=True, top_logprobs=5),
        "logprobs of a completion": completion("red green blue " * 8, logprobs=3),
        "logprobs with a stop": completion(lines, stop=["gamma"], logprobs=1),
        "frequency penalty up": chat("Repeat the word hello", frequency_penalty=2.0),
        "frequency penalty down": chat("Repeat the word hello", frequency_penalty=-2.0),
        "presence penalty": completion("red green blue " * 8, presence_penalty=1.0),
        "repetition penalty": completion("red green blue " * 8, repetition_penalty=1.3),
        "bad words": completion("red green blue " * 8, bad_words=[" green", "blue"]),
        "seed": completion("red green blue " * 8, seed=7),
        "allowed tokens": completion("red green blue " * 8, allowed_token_ids=list(range(300, 3000))),
    }
    return requests


def _constrained() -> dict[str, Body]:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    return {
        "json schema": chat("Who wrote the first program?", response_format=schema, max_tokens=60),
        "json schema, fence in the prompt": chat(FENCED_JSON, response_format=schema, max_tokens=60),
        "json schema, max_tokens inside": chat(FENCED_JSON, response_format=schema, max_tokens=9),
        "json object": chat(FENCED_JSON, response_format={"type": "json_object"}, max_tokens=40),
        "regex": chat("An IP address, please.", structured_outputs={"regex": r"(\d{1,3}\.){3}\d{1,3}"}),
        "choice": chat("Is the sky blue?", structured_outputs={"choice": ["yes", "no", "maybe so"]}),
        "grammar": chat("Add.", structured_outputs={"grammar": 'root ::= "1" (" + 1")* " = 5"'}),
        "tool forced": {
            **chat("Read the file notes.txt", max_tokens=60),
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "read_file"}},
        },
        "tool required, with history": {
            "messages": HISTORY,
            "tools": TOOLS,
            "tool_choice": "required",
            "max_tokens": 60,
        },
    }
