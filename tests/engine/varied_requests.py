"""Any number of different greedy requests, made from a seed: texts that repeat themselves, options by chance.

`request_mix` holds one request for each thing that can go wrong, for every run of the tests; this is for the
long comparison (`compare_servers.py --varied 500`).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from request_mix import PERSON, SYSTEM, TOOLS, Body, chat, completion

WORDS = [
    *("red", "green", "blue", "fox", "lazy", "dog", "über", "naïve", "日本語", "Москва", "🍸", "👩\u200d👧"),
    *("return", "value", "path", "file", "error", "index", "list", "total", "Zürich", "Łódź", "αβγ"),
    *("<|im_end|>", "</tool_call>", "```", "<think>", "0x1f", "3.14", "-7"),
]


def _name(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghijkl") for _ in range(rng.randint(1, 6)))


def _copy(rng: random.Random) -> Body:
    phrase = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    return completion(f"{phrase}\n" * rng.randint(2, 12))


def _code(rng: random.Random) -> Body:
    old, new, other = (_name(rng) for _ in range(3))
    code = f"def {old}(a, b):\n    return a + b\n\n\ndef {other}(a, b):\n    return {old}(a, -b)\n"
    if rng.random() < 0.5:
        return completion(code * 2 + f"def {old}(")
    return chat(f"Rename {old} to {new} and repeat the whole file.\n```python\n{code}```")


def _json_lines(rng: random.Random) -> Body:
    keys = [_name(rng) for _ in range(3)]
    lines = [
        "{" + ", ".join(f'"{key}": {rng.randrange(100)}' for key in keys) + "}"
        for _ in range(rng.randint(2, 8))
    ]
    return completion("\n".join(lines) + "\n")


def _question(rng: random.Random) -> Body:
    about = " ".join(rng.choices(WORDS, k=3))
    asked = chat(f"{rng.choice(['What is', 'Repeat', 'Translate', 'Count'])} {about}?")
    if rng.random() < 0.3:
        asked["messages"] = [SYSTEM, *asked["messages"]]
    return asked


def _tools(rng: random.Random) -> Body:
    path = f"{_name(rng)}.txt"
    call = {"name": "read_file", "arguments": f'{{"path": "{path}"}}'}
    history = [
        {"role": "user", "content": f"Read {path}"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": " ".join(rng.choices(WORDS, k=8))},
        {"role": "user", "content": f"Repeat it, then read {path} again."},
    ]
    return {"messages": history, "tools": TOOLS}


def _tokens(rng: random.Random) -> Body:
    part = [rng.randrange(1, 40_000) for _ in range(rng.randint(1, 20))]
    return completion(part * rng.randint(1, 10))


TEXTS: tuple[Callable[[random.Random], Body], ...] = (_copy, _code, _json_lines, _question, _tools, _tokens)

Option = Callable[[random.Random], Body]
OPTIONS: dict[str, Option] = {
    "stop": lambda rng: {"stop": rng.sample(WORDS, rng.randint(1, 4))},
    "stop kept": lambda rng: {"stop": [rng.choice(WORDS)], "include_stop_str_in_output": True},
    "stop token": lambda rng: {"stop_token_ids": [198, rng.randrange(1000)]},
    "ends ignored": lambda _: {"ignore_eos": True},
    "min_tokens": lambda rng: {"min_tokens": rng.randint(1, 12)},
    "frequency": lambda rng: {"frequency_penalty": rng.choice([-2.0, -0.5, 0.5, 2.0])},
    "presence": lambda rng: {"presence_penalty": rng.choice([-1.0, 1.0])},
    "repetition": lambda rng: {"repetition_penalty": rng.choice([0.8, 1.05, 1.3])},
    "bad words": lambda rng: {"bad_words": [f" {word}" for word in rng.sample(WORDS[:12], 2)]},
    "allowed": lambda rng: {"allowed_token_ids": list(range(300, rng.randint(1000, 20_000)))},
    "seed": lambda rng: {"seed": rng.randrange(2**31)},
    "logprobs": lambda _: {"logprobs": 3},
}
"""Those that go with any text and with each other."""

SHAPES: dict[str, Option] = {
    "schema": lambda _: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    },
    "object": lambda _: {"response_format": {"type": "json_object"}},
    "regex": lambda rng: {"structured_outputs": {"regex": rf"(\d{{1,3}}\.){{{rng.randint(1, 4)}}}\d{{1,3}}"}},
    "choice": lambda rng: {"structured_outputs": {"choice": sorted(rng.sample(WORDS[:8], 3))}},
}
"""Grammars, one at a time, for chat."""


def varied_requests(model: str, count: int, seed: int = 0) -> dict[str, Body]:
    """Name -> body; all different, all greedy, all asking for their token ids."""
    rng = random.Random(seed)
    found: dict[str, Body] = {}
    while len(found) < count:
        make = rng.choice(TEXTS)
        body: Body = {"max_tokens": rng.choice([1, 2, 3, 7, 12, 24, 40]), **make(rng)}
        if rng.random() < 0.6:
            body["max_tokens"] = rng.randint(1, 48)
        parts = [make.__name__.strip("_")]
        if "messages" in body and "tools" not in body and rng.random() < 0.35:
            shape = rng.choice(list(SHAPES))
            parts.append(shape)
            body |= SHAPES[shape](rng)
        else:
            for option in rng.sample(list(OPTIONS), rng.randint(0, 2)):
                parts.append(option)
                body |= OPTIONS[option](rng)
        body["max_tokens"] = max(body["max_tokens"], body.get("min_tokens", 1))
        if "messages" in body and "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": 3}
        name = f"{len(found)}: {', '.join(parts)}"
        found[name] = {"model": model, "temperature": 0, "return_token_ids": True, **body}
    return found
