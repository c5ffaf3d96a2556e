"""What the wrapper costs per call: python tests/client/measure_call_overhead.py [rounds]

The SDK talks to a transport in this process that answers at once, so that differences of some
microseconds show. What is measured is the processor time of the calling thread, so that a busy machine
does not disturb it. Plain and instrumented calls alternate in short blocks; told is the median, with the
quartiles, of the differences between the medians of two blocks that follow each other: the speed of a shared
processor drifts by more than what is looked for. The last line is JSON.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx2
import openai

import agentspec_runtime
from agentspec_runtime._scripted import Reply, body_of, chunks_of

BLOCK = 10
WORDS = " ".join(f"word{number}" for number in range(100))
HISTORY: list[dict[str, Any]] = []
for turn in range(100):
    call = {"id": f"c{turn}", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
    HISTORY += [
        {"role": "user", "content": f"question {turn} " * 20},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{turn}", "content": "a line of a file\n" * 40},
    ]


@agentspec_runtime.tool(kind="file")
def read_file() -> str:
    """Has the messages looked through for marks."""
    return ""


def answer(request: httpx2.Request) -> httpx2.Response:
    """The server, without a network."""
    if request.url.path.endswith("/models"):
        return httpx2.Response(200, json={"data": []}, headers={"x-agentspec": "1"})
    body = json.loads(request.content)
    reply = Reply(WORDS if body.get("stream") else "fine")
    if not body.get("stream"):
        return httpx2.Response(200, json=body_of(request.url.path, body, reply))
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks_of(request.url.path, body, reply)]
    text = "".join([*events, "data: [DONE]\n\n"])
    return httpx2.Response(200, text=text, headers={"content-type": "text/event-stream"})


def timed(body: Callable[[], object], count: int) -> list[float]:
    """Microseconds of each call."""
    times = []
    for _ in range(count):
        start = time.thread_time()
        body()
        times.append((time.thread_time() - start) * 1e6)
    return times


def compare(name: str, body: Callable[[], object], rounds: int) -> dict[str, object]:
    """Median of plain calls, and what ours add, in microseconds."""
    plain: list[float] = []
    added: list[float] = []
    timed(body, BLOCK)
    for _ in range(rounds):
        before = statistics.median(timed(body, BLOCK))
        with agentspec_runtime.instrument(), agentspec_runtime.session("s", agent="a"):
            timed(body, 1)
            ours = statistics.median(timed(body, BLOCK))
        plain.append(before)
        added.append(ours - before)
    low, middle, high = (round(value, 1) for value in statistics.quantiles(added, n=4))
    usual = round(statistics.median(plain), 1)
    print(f"{name:24} plain {usual:>9} us   added {middle:>7} us   quartiles {low} .. {high}")
    return {"case": name, "plain_us": usual, "added_us": middle, "quartiles_us": (low, high)}


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    http = openai.DefaultHttpxClient(transport=httpx2.MockTransport(answer))
    client = openai.OpenAI(base_url="http://mock/v1", api_key="x", http_client=http)
    short: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    long: Any = {"model": "m", "messages": HISTORY}
    create = client.chat.completions.create
    results = [
        compare("one message", lambda: create(**short), rounds),
        compare("300 messages, marks", lambda: create(**long), max(rounds // 4, 4)),
        compare("stream of 102 chunks", lambda: list(create(**short, stream=True)), rounds),
        compare(
            "raw response", lambda: client.chat.completions.with_raw_response.create(**short).parse(), rounds
        ),
    ]
    versions = {"python": platform.python_version(), "openai": openai.__version__}
    print(
        json.dumps(
            {"unit": "processor microseconds per call, median", "versions": versions, "results": results}
        )
    )


if __name__ == "__main__":
    main()
