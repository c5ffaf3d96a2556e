"""`agentspec trace`: from files, from the v3 API of a Jaeger, and to collectors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from engine_records import EPOCH, HEADERS, TRACE_ID, make_request
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner, Result

from agentspec_runtime.errors import AgentSpecError, RecordingError, ServerError
from agentspec_runtime.telemetry.cli import app
from agentspec_runtime.telemetry.engine import build_engine_observer
from agentspec_runtime.telemetry.load import Jaeger, traces_in_file
from agentspec_runtime.telemetry.otlp import SpanRecord
from agentspec_runtime.telemetry.receiver import OtlpReceiver
from agentspec_runtime.telemetry.turn import Trace, totals

OTHER_ID = "ab" * 16


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two engine traces in one file: the later one begins with 4bf9."""
    path = tmp_path / "turns.jsonl"
    early = make_request(seed=1, headers={"traceparent": f"00-{OTHER_ID}-{'cd' * 8}-01"}).request
    with OtlpReceiver() as receiver:
        observer = build_engine_observer(endpoint=receiver.endpoint, registry=CollectorRegistry(), environ={})
        observer.on_request(replace(early, arrival_s=EPOCH - 100.0))
        observer.on_request(make_request(num_blocks=6, seed=2, headers=HEADERS).request)
        observer.close()
        receiver.write_jsonl(path)
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_open_draws_the_timeline_the_blocks_and_the_sources(recorded: Path) -> None:
    """What a person needs is on the screen: every span, sums by block, where drafts came from."""
    text = run("open", f"{recorded}#4bf9").output
    made = make_request(num_blocks=6, seed=2).request
    drafted, accepted = sum(made.per_step_drafted), sum(made.per_step_accepted)
    assert f"trace {TRACE_ID}" in text
    for name in ("agentspec.request", "agentspec.queue", "agentspec.prefill", "agentspec.block tool_call"):
        assert name in text
    assert f"{accepted}/{drafted}" in text
    assert f"{made.num_output_tokens} tokens in 30 steps" in text
    assert "Where drafts came from" in text
    assert "session" in text


def test_sums_on_the_screen_come_from_the_engine_alone(recorded: Path) -> None:
    """Engine and chat spans describe the same tokens: they are never added."""
    trace = next(trace for trace in traces_in_file(recorded) if trace.trace_id == TRACE_ID)
    made = make_request(num_blocks=6, seed=2).request
    chat = SpanRecord(
        trace_id=TRACE_ID, span_id="1" * 16, parent_id="", name="chat m", kind="CLIENT",
        start_ns=trace.start_ns, end_ns=trace.end_ns, service="agent", scope="s",
        attributes={"agentspec.output_tokens": made.num_output_tokens, "agentspec.spec.draft_tokens": 1},
    )  # fmt: skip
    sums = totals(Trace(trace_id=TRACE_ID, spans=(*trace.spans, chat)))
    assert sums.all.tokens == made.num_output_tokens
    assert sums.all.drafted == sum(made.per_step_drafted)
    assert sum(block.tokens for block in sums.blocks) == made.num_output_tokens
    assert sum(source.drafted for source in sums.sources) == sums.all.drafted
    alone = totals(Trace(trace_id=TRACE_ID, spans=(chat,)))
    assert (alone.all.tokens, alone.from_engine) == (made.num_output_tokens, False)


def test_list_and_compare(recorded: Path) -> None:
    """`list` names both traces; `compare` says that they did different work."""
    listed = run("list", str(recorded)).output.splitlines()
    assert [line.split()[0] for line in listed] == [OTHER_ID, TRACE_ID]
    text = run("compare", f"{recorded}#{OTHER_ID[:6]}", f"{recorded}#4bf9").output
    assert "time per token" in text
    assert "2.00x" in next(line for line in text.splitlines() if line.startswith("engine steps"))
    assert "did not do the same work" in text


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_upload_sends_every_span_unchanged(recorded: Path, receiver: OtlpReceiver, protocol: str) -> None:
    """A file that went through a collector is the same set of spans."""
    endpoint = receiver.endpoint if protocol == "http" else receiver.grpc_endpoint
    sent = [span for trace in traces_in_file(recorded) for span in trace.spans]
    if protocol == "grpc":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
            text = run("upload", str(recorded), endpoint).output
    else:
        text = run("upload", str(recorded), endpoint).output
    assert f"{len(sent)} spans sent" in text
    assert sorted(receiver.spans(), key=lambda span: span.span_id) == sorted(
        sent, key=lambda span: span.span_id
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no spans"),
        ("{broken", "line 1: not JSON"),
        ('{"resourceSpans":[]}\n{"a":1}', "line 2: not OTLP"),
        ('{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"zz"}]}]}]}', "line 1: not OTLP"),
        ("[1]", "line 1: not OTLP"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, content: str, reason: str) -> None:
    """The message names the file, the line and the reason."""
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(RecordingError, match=reason) as caught:
        traces_in_file(path)
    assert str(path) in str(caught.value)


def test_what_is_not_there_is_said(recorded: Path) -> None:
    """An unknown id lists what is there; neither file nor id; an ambiguous prefix."""
    with pytest.raises(RecordingError, match=TRACE_ID[:12]):
        run("open", f"{recorded}#0000")
    with pytest.raises(RecordingError, match="neither a file nor a trace id"):
        run("open", "nonsense")
    with pytest.raises(ServerError, match="does not answer"):
        run("open", "--jaeger", "http://127.0.0.1:1")


@pytest.fixture
def jaeger(recorded: Path) -> Iterator[str]:
    """The two traces behind the routes, parameters and envelope of Jaeger's /api/v3."""
    everything = [json.loads(line) for line in recorded.read_text().splitlines()]
    documents = {trace_id: only(trace_id, everything) for trace_id in (OTHER_ID, TRACE_ID)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            if url.path == "/api/v3/services":
                self.answer('{"services":["jaeger","agentspec-engine"]}')
            elif url.path == "/api/v3/traces":
                known = query["query.service_name"] == ["agentspec-engine"]
                bounded = "query.start_time_min" in query and "query.start_time_max" in query
                body = json.dumps(
                    {"result": {"resourceSpans": [part for d in documents.values() for part in d]}}
                )
                self.answer(body if known and bounded else "", 200 if known and bounded else 400)
            elif url.path.startswith("/api/v3/traces/"):
                found = documents.get(url.path.rsplit("/", 1)[1])
                error = {"error": {"httpCode": 404, "message": "No traces found"}}
                body = json.dumps({"result": {"resourceSpans": found}} if found else error)
                self.answer(body, 200 if found else 404)

        def answer(self, body: str, status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def only(trace_id: str, documents: list[Any]) -> list[Any]:
    """The resourceSpans of one trace."""
    found = []
    for document in documents:
        for resource in document["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                spans = [span for span in scope["spans"] if span["traceId"] == trace_id]
                found.append({**resource, "scopeSpans": [{**scope, "spans": spans}]})
    return found


def test_jaeger_newest_and_by_id(jaeger: str, recorded: Path) -> None:
    """The newest of all services, one by id, and a clear word where there is none."""
    assert Jaeger(jaeger).newest().trace_id == traces_in_file(recorded)[-1].trace_id
    assert f"trace {OTHER_ID}" in run("open", OTHER_ID, "--jaeger", jaeger).output
    assert len(Jaeger(jaeger).trace(TRACE_ID).spans) == 9
    with pytest.raises(RecordingError, match="has no trace"):
        run("open", "f" * 32, "--jaeger", jaeger)


def test_errors_reach_the_agentspec_command_as_its_own() -> None:
    """The main command turns errors of this package into one line and exit code 2."""
    with pytest.raises(AgentSpecError):
        run("upload", __file__, "http://127.0.0.1:1")
