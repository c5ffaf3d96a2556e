"""An unmodified OpenAI client: nothing of ours is imported, and the server drafts all the same.

    agentspec serve                    # in another terminal
    python examples/openai_client.py   # OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are honoured

The server infers the structure of a request by itself. What it did comes back in the response, in vLLM's
own field `metrics`; another server leaves that out.
"""

import os
from typing import Any

from openai import OpenAI

PROGRAM = '''
def total(items):
    """Sum of price times amount over all items."""
    result = 0
    for item in items:
        result += item["price"] * item["amount"]
    return result
'''


def what_drafting_did(answer: Any) -> str:
    """A line about a response or the last chunk of a stream."""
    metrics = getattr(answer, "metrics", None)
    if not isinstance(metrics, dict) or not metrics.get("speculative_decoding"):
        return f"{answer.usage.completion_tokens} tokens; this server says nothing about drafting"
    spec = metrics["speculative_decoding"]
    return (
        f"{answer.usage.completion_tokens} tokens, {spec['num_draft_tokens']} drafted, "
        f"{spec['num_accepted_draft_tokens']} accepted"
    )


def main() -> None:
    """Ask for a change of a program, and then, in a stream, for another one."""
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
    )
    model = os.environ.get("OPENAI_MODEL") or client.models.list().data[0].id
    messages: list[Any] = [
        {"role": "user", "content": f"Rename total to order_total:\n```python{PROGRAM}```"}
    ]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=160, temperature=0)
    text = answer.choices[0].message.content or ""
    print(text)
    print(f"--> {what_drafting_did(answer)}\n")

    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "Write the function again and round the result to two digits."},
    ]
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=160, temperature=0,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    last: Any = None
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            last = chunk
    print(f"\n--> {what_drafting_did(last)}")


if __name__ == "__main__":
    main()
