"""The whole chain: agent -> our client -> real vLLM engine -> spans of both sides in one tree, sums exact."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from agentspec_runtime import CallReport, collect_calls, configure_tracing, instrument, session, tool
from agentspec_runtime.observe import DraftSource
from agentspec_runtime.telemetry.client import Tracing
from agentspec_runtime.telemetry.otlp import SpanRecord
from agentspec_runtime.telemetry.receiver import OtlpReceiver

pytestmark = pytest.mark.engine

COPY = "Repeat this list three times, word for word:\n" + "\n".join(
    f"item {number}: the quick brown fox jumps over the lazy dog" for number in range(6)
)


@pytest.fixture
def tracing(engine_spans: OtlpReceiver) -> Iterator[Tracing]:
    """Both sides send to one receiver, as they would to one Jaeger."""
    with instrument(), configure_tracing(engine_spans.endpoint, service_name="agent", environ={}) as running:
        yield running


@pytest.fixture
def client(engine_server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine_server.base_url, api_key="unused", timeout=120) as running:
        yield running


def ask(client: openai.OpenAI, text: str = COPY, **more: Any) -> Any:
    settings: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": 64, **more}
    return client.chat.completions.create(messages=[{"role": "user", "content": text}], **settings)


def tree_of(spans: OtlpReceiver, tracing: Tracing, *, requests: int = 1) -> list[SpanRecord]:
    """Spans of the newest trace of the agent, once the engine's requests have arrived."""
    assert tracing.flush()
    own = {span.trace_id: span.start_ns for span in spans.spans() if span.service == "agent"}
    trace_id = max(own, key=lambda key: own[key])

    def complete(found: Any) -> bool:
        mine = [span for span in found if span.trace_id == trace_id]
        return sum(span.name == "agentspec.request" for span in mine) >= requests

    return [span for span in spans.wait_for(complete, timeout_s=15) if span.trace_id == trace_id]


def named(spans: list[SpanRecord], first_word: str) -> list[SpanRecord]:
    return [span for span in spans if span.name.split()[0] == first_word]


def total(spans: list[SpanRecord], name: str) -> int:
    return sum(value for span in spans if isinstance(value := span.attributes.get(name, 0), int))


def check_sums(spans: list[SpanRecord], completion_tokens: int, *, behind_end: int = 0) -> None:
    """Tokens over blocks = usage; accepted + rejected = drafted, in total, per block and per source.

    `behind_end`: how many tokens the engine may have emitted behind the end of the answer.
    """
    requests, blocks = named(spans, "agentspec.request"), named(spans, "agentspec.block")
    assert total(blocks, "agentspec.output_tokens") == completion_tokens
    assert total(requests, "agentspec.output_tokens") == completion_tokens
    for span in (*requests, *blocks):
        one = [span]
        drafted = total(one, "agentspec.spec.draft_tokens")
        assert drafted == total(one, "agentspec.spec.accepted_tokens") + total(
            one, "agentspec.spec.rejected_tokens"
        )
        assert drafted == sum(total(one, f"agentspec.spec.{source}.draft_tokens") for source in DraftSource)
    for name in ("draft_tokens", "accepted_tokens", "rejected_tokens", "steps"):
        assert total(blocks, f"agentspec.spec.{name}") == total(requests, f"agentspec.spec.{name}")
    for request in requests:
        per_step = request.attributes["agentspec.spec.per_step_accepted"]
        assert isinstance(per_step, list)
        assert sum(per_step) == total([request], "agentspec.spec.accepted_tokens")
        # Each step emits what it accepted and one token more; no answer ends inside a draft.
        emitted = total([request], "agentspec.spec.steps") + sum(per_step)
        assert 0 <= emitted - total([request], "agentspec.output_tokens") <= behind_end


@pytest.mark.parametrize("stream", [False, True])
def test_agent_call_and_engine_are_one_tree(
    tracing: Tracing, client: openai.OpenAI, engine_spans: OtlpReceiver, stream: bool
) -> None:
    """invoke_agent -> chat -> agentspec.request -> queue, prefill, blocks; both sides say the same."""
    with session(f"chain-{stream}", agent="coder"), collect_calls() as calls:
        answer = ask(client, stream=stream)
        if stream:
            assert list(answer)
    (call,) = calls
    spans = tree_of(engine_spans, tracing)
    (agent,), (chat,) = named(spans, "invoke_agent"), named(spans, "chat")
    (request,) = named(spans, "agentspec.request")
    assert chat.parent_id == agent.span_id
    assert request.parent_id == chat.span_id
    children = [span for span in spans if span.parent_id == request.span_id]
    assert [span.name for span in children[:2]] == ["agentspec.queue", "agentspec.prefill"]
    assert len(children) == 2 + len(named(spans, "agentspec.block"))
    assert chat.start_ns <= request.start_ns <= request.end_ns <= chat.end_ns
    assert call.completion_tokens is not None
    check_sums(spans, call.completion_tokens)
    assert_sides_agree(chat, request, call)


def assert_sides_agree(chat: SpanRecord, request: SpanRecord, call: CallReport) -> None:
    """What vLLM reports to the client is what our engine counted."""
    for name in ("draft_tokens", "accepted_tokens", "rejected_tokens", "steps", "steps_saved"):
        assert chat.attributes[f"agentspec.spec.{name}"] == request.attributes[f"agentspec.spec.{name}"], name
    assert chat.attributes["gen_ai.usage.output_tokens"] == request.attributes["agentspec.output_tokens"]
    assert chat.attributes["agentspec.session"] == request.attributes["agentspec.session"] == call.session
    assert call.drafted, "a copying answer that drafted nothing proves nothing"


@pytest.mark.parametrize("case", ["stop", "length", "eos", "off"])
def test_sums_are_exact_however_an_answer_ends(
    tracing: Tracing, client: openai.OpenAI, engine_spans: OtlpReceiver, case: str
) -> None:
    """A stop string inside an accepted draft, the token limit, the model's own end, and no drafting."""
    more: dict[str, Any] = {
        "stop": {"stop": ["lazy dog"], "max_tokens": 96},
        "length": {"max_tokens": 37, "extra_body": {"ignore_eos": True}},
        "eos": {"text": "Say hello.", "max_tokens": 128},
        "off": {},
    }[case]
    with session(f"end-{case}", agent="coder", speculate="off" if case == "off" else "auto"):
        answer = ask(client, **more)
    spans = tree_of(engine_spans, tracing)
    # The API finds a stop string while the engine is already some steps further.
    check_sums(spans, answer.usage.completion_tokens, behind_end=4 if case == "stop" else 0)
    (request,) = named(spans, "agentspec.request")
    assert request.attributes["agentspec.finish_reason"] == answer.choices[0].finish_reason
    if case == "off":
        assert request.attributes["agentspec.spec.draft_tokens"] == 0


@pytest.mark.parametrize("case", ["eos", "length"])
def test_both_sides_count_the_same_steps(
    tracing: Tracing, client: openai.OpenAI, engine_spans: OtlpReceiver, case: str
) -> None:
    """Also where the second answer copies the first one to its very end, which is the end token."""
    more: dict[str, Any] = {
        "eos": {"text": "Say hello.", "max_tokens": 128},
        "length": {"max_tokens": 37, "extra_body": {"ignore_eos": True}},
    }[case]
    with session(f"steps-{case}"), collect_calls() as calls:
        for _ in range(2):
            answer = ask(client, **more)
            spans = tree_of(engine_spans, tracing)
    assert answer.choices[0].finish_reason == {"eos": "stop", "length": "length"}[case]
    (chat,), (request,) = named(spans, "chat"), named(spans, "agentspec.request")
    assert_sides_agree(chat, request, calls[-1])
    assert calls[-1].num_steps == request.attributes["agentspec.spec.steps"]


def test_an_answer_has_the_same_blocks_without_drafting(
    tracing: Tracing, client: openai.OpenAI, engine_spans: OtlpReceiver
) -> None:
    """Speculation off and on give the same text, and `agentspec trace compare` the same blocks."""
    text = "Write a Python function add(a, b) in a ```python block, then say what it does."
    found = []
    for speculate in ("off", "auto", "auto"):
        with session("compared", agent="coder", speculate=speculate):
            ask(client, text, max_tokens=96)
        blocks = named(tree_of(engine_spans, tracing), "agentspec.block")
        blocks.sort(key=lambda span: span.attributes["agentspec.block.index"])
        found.append([(span.name, span.attributes["agentspec.output_tokens"]) for span in blocks])
        drafted = total(blocks, "agentspec.spec.draft_tokens")
    assert found[0] == found[1] == found[2]
    assert "agentspec.block code" in dict(found[0])
    assert drafted > 0


def test_n_gives_one_request_span_each(
    tracing: Tracing, client: openai.OpenAI, engine_spans: OtlpReceiver
) -> None:
    """n = 3: three sequences under one chat, together the tokens of the usage."""
    with session("several", agent="coder"):
        answer = ask(client, n=3, temperature=0.8, seed=1, max_tokens=24)
    spans = tree_of(engine_spans, tracing, requests=3)
    requests, (chat,) = named(spans, "agentspec.request"), named(spans, "chat")
    assert {request.parent_id for request in requests} == {chat.span_id}
    check_sums(spans, answer.usage.completion_tokens)


def test_an_abandoned_stream_is_an_abort(
    tracing: Tracing, client: openai.OpenAI, engine_spans: OtlpReceiver
) -> None:
    """The client leaves: incomplete there, abort in the engine, an error nowhere, sums still exact."""
    with session("left", agent="coder"):
        stream = ask(client, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
        for index, _ in enumerate(stream):
            if index == 5:
                break
        stream.close()
    spans = tree_of(engine_spans, tracing)
    (chat,), (request,) = named(spans, "chat"), named(spans, "agentspec.request")
    assert chat.attributes["agentspec.outcome"] == "incomplete"
    assert request.attributes["agentspec.finish_reason"] == "abort"
    assert {span.status for span in spans} == {"UNSET"}
    tokens = request.attributes["agentspec.output_tokens"]
    assert isinstance(tokens, int)
    check_sums(spans, tokens)


def test_a_refused_request_is_an_error_of_the_call(
    tracing: Tracing, client: openai.OpenAI, engine_spans: OtlpReceiver
) -> None:
    """HTTP 400: the chat span has the error's type, and no engine span exists for it."""
    with session("refused", agent="coder"), pytest.raises(openai.BadRequestError):
        ask(client, max_tokens=-1)
    spans = tree_of(engine_spans, tracing, requests=0)
    (chat,) = named(spans, "chat")
    assert (chat.status, chat.attributes["error.type"]) == ("ERROR", "BadRequestError")
    assert named(spans, "agentspec.request") == []


def test_parallel_requests_keep_their_traces(
    tracing: Tracing, client: openai.OpenAI, engine_spans: OtlpReceiver
) -> None:
    """Eight agents at once: eight trees, each with its own request and exact sums."""
    tokens: dict[str, int] = {}

    def run(name: str) -> None:
        with session(name, agent=name):
            tokens[name] = ask(client, max_tokens=16 + len(tokens)).usage.completion_tokens

    threads = [threading.Thread(target=run, args=(f"agent-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracing.flush()

    def complete(found: Any) -> bool:
        return (
            sum(
                s.name == "agentspec.request" and str(s.attributes.get("agentspec.agent")) in tokens
                for s in found
            )
            == 8
        )

    found = engine_spans.wait_for(complete, timeout_s=15)
    for name, count in tokens.items():
        (agent,) = [span for span in found if span.name == f"invoke_agent {name}"]
        check_sums([span for span in found if span.trace_id == agent.trace_id], count)


def test_a_langgraph_agent_is_one_tree_with_its_tools(
    tracing: Tracing, engine_server: Any, engine_spans: OtlpReceiver
) -> None:
    """A graph with a model node and a tool node, both sides' spans under one agent."""
    graph = pytest.importorskip("langgraph.graph")
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        model="SmolLM2-135M-Instruct",
        base_url=engine_server.base_url,
        api_key="unused",
        temperature=0,
        max_tokens=24,
    )

    @tool
    def look_up(word: str) -> str:
        """Say what is known of a word."""
        return f"{word} is a word"

    def think(state: dict[str, Any]) -> dict[str, Any]:
        return {"text": model.invoke(f"Repeat: {state['text']}").content}

    def act(state: dict[str, Any]) -> dict[str, Any]:
        return {"text": look_up("fox") + str(state["text"])[:40]}

    builder = graph.StateGraph(dict)
    builder.add_node("think", think)
    builder.add_node("act", act)
    builder.add_edge(graph.START, "think")
    builder.add_edge("think", "act")
    builder.add_edge("act", graph.END)
    with session("graph", agent="thinker"):
        builder.compile().invoke({"text": "the quick brown fox"})
    spans = tree_of(engine_spans, tracing)
    (agent,) = named(spans, "invoke_agent")
    parents = {span.name: span.parent_id for span in spans}
    assert parents["chat SmolLM2-135M-Instruct"] == parents["execute_tool look_up"] == agent.span_id
    (request,) = named(spans, "agentspec.request")
    check_sums(spans, total([request], "agentspec.output_tokens"))


def test_no_text_of_a_request_reaches_the_spans(
    tracing: Tracing, client: openai.OpenAI, engine_spans: OtlpReceiver
) -> None:
    """A canary in the prompt, the stop string and the user field appears in no byte of either side."""
    with session("private", agent="coder"):
        ask(client, "CANARY-51c2 say it again", stop=["CANARY-51c3"], user="CANARY-51c4")
    assert tree_of(engine_spans, tracing)
    assert b"CANARY-51" not in engine_spans.raw()


def test_metrics_of_the_engine_show_under_metrics(client: openai.OpenAI, engine_server: Any) -> None:
    """The API process exposes what the engine process counts, and it grows with the tokens drafted."""

    def drafted() -> float:
        with urllib.request.urlopen(f"{engine_server.root_url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith("agentspec_draft_tokens_total")]
        assert values, "no agentspec metrics under /metrics"
        return sum(map(float, values))

    before = drafted()
    with instrument(), session("metrics"), collect_calls() as calls:
        ask(client, max_tokens=128)
    want = calls[0].drafted
    assert want
    deadline = time.monotonic() + 5
    while drafted() < before + want and time.monotonic() < deadline:
        time.sleep(0.1)
    assert drafted() == before + want
