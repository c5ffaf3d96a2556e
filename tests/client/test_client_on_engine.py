"""The client against the real server: hints change no token, and what the server reports arrives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

import agentspec_runtime

if TYPE_CHECKING:
    from conftest import Server

pytestmark = pytest.mark.engine

CODE = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"
MESSAGES: Any = [
    {"role": "system", "content": "You repeat code exactly."},
    {"role": "user", "content": f"Repeat this file three times:\n```python\n{CODE}```"},
]


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    yield
    agentspec_runtime.uninstrument()


def ask(server: Server, stream: bool) -> tuple[str, Any]:
    """Text and fingerprint of a greedy answer."""
    with openai.OpenAI(base_url=server.base_url, api_key="x", max_retries=0, timeout=120) as client:
        answer: Any = client.chat.completions.create(
            model=server.model, messages=MESSAGES, temperature=0, max_tokens=96, stream=stream
        )
        if not stream:
            return answer.choices[0].message.content, answer.system_fingerprint
        chunks = list(answer)
        assert all(chunk.choices for chunk in chunks), "the usage chunk was not asked for"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return text, chunks[-1].system_fingerprint


@pytest.mark.parametrize("stream", [False, True])
def test_greedy_text_is_the_same_with_and_without_hints(engine_server: Server, stream: bool) -> None:
    plain = ask(engine_server, stream)
    agentspec_runtime.instrument(servers="off")
    watched = ask(engine_server, stream)
    agentspec_runtime.instrument(servers="auto")
    with (
        agentspec_runtime.session("on-engine", agent="coder", expect=["code"], latency="interactive"),
        agentspec_runtime.collect_calls() as calls,
    ):
        hinted = ask(engine_server, stream)
    assert plain[0]
    assert plain == watched == hinted
    (call,) = calls
    assert call.hinted, "the server did not say that it understands hints"
    assert call.outcome == "ok"


@pytest.mark.parametrize("stream", [False, True])
def test_acceptance_arrives_and_adds_up(engine_server: Server, stream: bool) -> None:
    agentspec_runtime.instrument()
    with agentspec_runtime.session(), agentspec_runtime.collect_calls() as calls:
        ask(engine_server, stream)
    (call,) = calls
    assert call.completion_tokens is not None
    assert call.accepted is not None
    assert call.drafted is not None
    assert call.num_steps is not None
    assert call.per_step_accepted is not None
    assert call.num_steps == call.completion_tokens - call.accepted
    assert 0 < call.accepted <= call.drafted
    assert sum(call.per_step_accepted) == call.accepted
    assert sum(call.per_step_drafted or ()) == call.drafted
    assert len(call.per_step_accepted) == call.num_spec_steps
    assert call.ttft_ms is not None


def test_speculation_can_be_switched_off_for_a_block(engine_server: Server) -> None:
    agentspec_runtime.instrument()
    with agentspec_runtime.collect_calls() as calls:
        with agentspec_runtime.session(speculate="off"):
            off = ask(engine_server, False)
        with agentspec_runtime.session(speculate="auto"):
            on = ask(engine_server, False)
    assert off == on
    assert not calls[0].drafted
    assert calls[1].drafted
