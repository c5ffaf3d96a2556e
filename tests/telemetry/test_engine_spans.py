"""Spans of the engine through real OTLP receivers: shape, parents, sums, limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_records import EPOCH, HEADERS, PARENT_ID, TRACE_ID, make_request
from prometheus_client import CollectorRegistry

from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.observe import DraftSource, RequestReport
from agentspec_runtime.telemetry.engine import EngineObserver, build_engine_observer
from agentspec_runtime.telemetry.otlp import SpanRecord
from agentspec_runtime.telemetry.receiver import OtlpReceiver


def observe(
    endpoint: str | None, *reports: RequestReport, environ: dict[str, str] | None = None
) -> EngineObserver:
    observer = build_engine_observer(endpoint=endpoint, registry=CollectorRegistry(), environ=environ or {})
    assert isinstance(observer, EngineObserver)
    for report in reports:
        observer.on_request(report)
    assert observer.flush(30)
    observer.close()
    return observer


def blocks_of(spans: list[SpanRecord]) -> list[SpanRecord]:
    return [span for span in spans if span.name.startswith("agentspec.block")]


def total(spans: list[SpanRecord], name: str) -> int:
    values = [span.attributes.get(name, 0) for span in spans]
    assert all(type(value) is int for value in values)
    return sum(value for value in values if isinstance(value, int))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_one_request_is_one_tree_under_the_callers_span(receiver: OtlpReceiver, protocol: str) -> None:
    """Queue, prefill and blocks under the request span, that under the caller's; times are the report's."""
    made = make_request()
    if protocol == "http":
        observe(receiver.endpoint, made.request)
    else:
        grpc = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
        observe(receiver.grpc_endpoint, made.request, environ=grpc)
    spans = receiver.spans()
    (request,) = [span for span in spans if span.name == "agentspec.request"]
    assert (request.trace_id, request.parent_id, request.kind) == (TRACE_ID, PARENT_ID, "SERVER")
    assert request.service == "agentspec-engine"
    children = [span for span in spans if span.parent_id == request.span_id]
    assert [span.name for span in children] == [
        "agentspec.queue",
        "agentspec.prefill",
        "agentspec.block text",
        "agentspec.block code",
        "agentspec.block tool_call",
    ]
    assert len(spans) == 6
    assert {span.trace_id for span in spans} == {TRACE_ID}
    assert request.start_ns == int(EPOCH) * 10**9
    assert request.duration_s == pytest.approx(made.request.end_s - EPOCH, abs=1e-6)
    queue, prefill, *_ = children
    assert queue.duration_s == pytest.approx(0.5, abs=1e-6)
    assert prefill.duration_s == pytest.approx(1.0, abs=1e-6)
    assert all(request.start_ns <= span.start_ns <= span.end_ns <= request.end_ns for span in children)


def test_prefill_and_blocks_do_not_overlap(receiver: OtlpReceiver) -> None:
    """The step that ends the prefill emits the first token of a block: its time counts once, as prefill."""
    made = make_request().request
    first, *others = made.blocks
    early = replace(first, start_s=made.scheduled_s)
    observe(receiver.endpoint, replace(made, blocks=(early, *others)))
    (prefill,) = receiver.spans("agentspec.prefill")
    blocks = blocks_of(receiver.spans())
    assert blocks[0].start_ns == prefill.end_ns
    whole = receiver.spans("agentspec.request")[0].duration_s
    parts = sum(span.duration_s for span in (*blocks, prefill, *receiver.spans("agentspec.queue")))
    assert parts == pytest.approx(whole, abs=1e-6)


def test_queue_and_prefill_are_times_of_the_request_and_in_no_step_of_a_block(receiver: OtlpReceiver) -> None:
    """A block of the prompt's step alone has no step time: absent, not zero."""
    made = make_request().request
    first, *others = made.blocks
    observe(
        receiver.endpoint, replace(made, blocks=(replace(first, step_s_p50=0.0, step_s_p95=0.0), *others))
    )
    (request,) = receiver.spans("agentspec.request")
    assert request.attributes["agentspec.queue_s"] == pytest.approx(0.5)
    assert request.attributes["agentspec.prefill_s"] == pytest.approx(1.0)
    assert request.attributes["agentspec.time_to_first_token_s"] == pytest.approx(1.5)
    steps = [
        span.attributes.get(f"agentspec.step_s_{p}")
        for span in blocks_of(receiver.spans())
        for p in ("p50", "p95")
    ]
    assert steps == [None, None, 0.010, 0.012, 0.010, 0.012]


def test_sums_over_blocks_are_exact(receiver: OtlpReceiver) -> None:
    """Tokens over blocks = output tokens; accepted + rejected = drafted, in total and per source."""
    made = make_request(num_blocks=9, steps_per_block=40, seed=7)
    observe(receiver.endpoint, made.request)
    spans = receiver.spans()
    (request,) = receiver.spans("agentspec.request")
    blocks = blocks_of(spans)
    assert total(blocks, "agentspec.output_tokens") == made.request.num_output_tokens
    assert request.attributes["agentspec.output_tokens"] == made.request.num_output_tokens
    for group in (blocks, [request]):
        drafted = total(group, "agentspec.spec.draft_tokens")
        assert drafted == sum(made.request.per_step_drafted) > 0
        assert total(group, "agentspec.spec.accepted_tokens") == sum(made.request.per_step_accepted)
        assert (
            total(group, "agentspec.spec.accepted_tokens") + total(group, "agentspec.spec.rejected_tokens")
            == drafted
        )
        assert total(group, "agentspec.spec.discarded_tokens") <= total(
            group, "agentspec.spec.rejected_tokens"
        )
        by_source = {
            key: sum(total(group, f"agentspec.spec.{source}.{key}") for source in DraftSource)
            for key in ("draft_tokens", "accepted_tokens", "rejected_tokens")
        }
        assert by_source["draft_tokens"] == drafted
        assert by_source["accepted_tokens"] + by_source["rejected_tokens"] == drafted
    assert total(blocks, "agentspec.spec.steps") == request.attributes["agentspec.spec.steps"] == 360


def test_a_5000_step_request_keeps_exact_arrays_within_limits(receiver: OtlpReceiver) -> None:
    """Arrays are folded, not cut: same sums, at most 1024 entries, nothing dropped by the SDK."""
    made = make_request(num_blocks=1, steps_per_block=5000, seed=3)
    observe(receiver.endpoint, made.request)
    (request,) = receiver.spans("agentspec.request")
    drafted, accepted = (
        request.attributes[f"agentspec.spec.per_step_{name}"] for name in ("drafted", "accepted")
    )
    assert isinstance(drafted, list)
    assert isinstance(accepted, list)
    assert len(drafted) == len(accepted) == 1000
    assert request.attributes["agentspec.spec.per_step_stride"] == 5
    assert sum(drafted) == sum(made.request.per_step_drafted)
    assert sum(accepted) == request.attributes["agentspec.spec.accepted_tokens"]
    histogram = request.attributes["agentspec.spec.accepted_histogram"]
    assert isinstance(histogram, list)
    assert sum(histogram) == request.attributes["agentspec.spec.steps"] == 5000
    assert sum(count * entry for entry, count in enumerate(histogram)) == sum(accepted)
    assert all(span.dropped == 0 for span in receiver.spans())


def test_blocks_beyond_the_cap_are_folded_into_the_last(receiver: OtlpReceiver) -> None:
    """500 blocks give 64 block spans whose sums are still exact."""
    made = make_request(num_blocks=500, steps_per_block=3, seed=5)
    observe(receiver.endpoint, made.request)
    blocks = blocks_of(receiver.spans())
    (request,) = receiver.spans("agentspec.request")
    assert len(blocks) == 64
    assert blocks[-1].name == "agentspec.block mixed"
    assert request.attributes["agentspec.blocks_merged"] == 500 - 63
    assert total(blocks, "agentspec.output_tokens") == made.request.num_output_tokens
    assert total(blocks, "agentspec.spec.draft_tokens") == sum(made.request.per_step_drafted)
    assert total(blocks, "agentspec.spec.steps") == 1500
    assert blocks[-1].attributes["agentspec.mean_batch"] == pytest.approx(4.0)


def test_without_trace_headers_the_request_is_its_own_trace(receiver: OtlpReceiver) -> None:
    """No caller, no parent; a broken header is the same as none."""
    observe(
        receiver.endpoint,
        make_request(headers=None, req_id="a").request,
        make_request(headers={"traceparent": "nonsense"}, req_id="b").request,
    )
    requests = receiver.spans("agentspec.request")
    assert [span.parent_id for span in requests] == ["", ""]
    assert len({span.trace_id for span in requests}) == 2


def test_a_callers_decision_not_to_sample_is_respected(receiver: OtlpReceiver) -> None:
    """traceparent with flags 00 makes no spans; the next sampled request does."""
    unsampled = {"traceparent": HEADERS["traceparent"][:-2] + "00"}
    observe(receiver.endpoint, make_request(headers=unsampled).request, make_request(req_id="second").request)
    assert [span.attributes["agentspec.request_id"] for span in receiver.spans("agentspec.request")] == [
        "second"
    ]


def test_several_sequences_of_one_call_are_told_apart(receiver: OtlpReceiver) -> None:
    """n > 1: one request span per sampled sequence, all under the same chat span."""
    observe(receiver.endpoint, *(make_request(seed=i, req_id=f"{i}_req").request for i in range(3)))
    requests = receiver.spans("agentspec.request")
    assert {span.attributes["agentspec.request_id"] for span in requests} == {"0_req", "1_req", "2_req"}
    assert {span.parent_id for span in requests} == {PARENT_ID}


@pytest.mark.parametrize(("reason", "status"), [("stop", "UNSET"), ("abort", "UNSET"), ("error", "ERROR")])
def test_only_an_engine_error_is_an_error(receiver: OtlpReceiver, reason: str, status: str) -> None:
    """A client that goes away is no fault of the engine."""
    observe(receiver.endpoint, make_request(finish_reason=reason).request)
    (request,) = receiver.spans("agentspec.request")
    assert request.status == status
    assert request.attributes["agentspec.finish_reason"] == reason


def test_a_request_aborted_in_the_queue_still_has_a_sound_tree(receiver: OtlpReceiver) -> None:
    """Never scheduled: a queue span that lasts to the end, no prefill, no blocks."""
    report = RequestReport(
        req_id="r", trace_headers=None, session=None, agent=None, turn=None, arrival_s=EPOCH, scheduled_s=0.0,
        first_token_s=0.0, end_s=EPOCH + 3.0, num_prompt_tokens=5, num_cached_tokens=0, num_output_tokens=0,
        num_preemptions=0, finish_reason="abort", blocks=(),
    )  # fmt: skip
    observe(receiver.endpoint, report)
    assert sorted(span.name for span in receiver.spans()) == ["agentspec.queue", "agentspec.request"]
    (queue,) = receiver.spans("agentspec.queue")
    assert queue.duration_s == pytest.approx(3.0, abs=1e-6)
    assert "agentspec.session" not in receiver.spans("agentspec.request")[0].attributes


def test_engine_spans_carry_nothing_of_the_convention(receiver: OtlpReceiver) -> None:
    """Backends take a span with gen_ai.* for a model call and add up its tokens: the caller has that span."""
    observe(receiver.endpoint, make_request().request)
    names = {name for span in receiver.spans() for name in span.attributes}
    assert not [name for name in names if name.startswith(("gen_ai.", "llm."))]
    assert receiver.spans("agentspec.request")[0].attributes["agentspec.model"] == "tiny"


def test_no_endpoint_means_no_spans_and_no_export_thread() -> None:
    """Prometheus alone: nothing is built for spans."""
    observer = observe(None, make_request().request)
    assert observer.losses.spans == 0
    assert observer._spans is None


def test_standard_variables_choose_the_endpoint(receiver: OtlpReceiver) -> None:
    """OTEL_EXPORTER_OTLP_ENDPOINT is a base URL; OTEL_SDK_DISABLED switches everything off."""
    base = receiver.endpoint.removesuffix("/v1/traces")
    observe(
        None,
        make_request().request,
        environ={"OTEL_EXPORTER_OTLP_ENDPOINT": base, "OTEL_SERVICE_NAME": "llm"},
    )
    assert {span.service for span in receiver.spans()} == {"llm"}
    receiver.clear()
    off = {"OTEL_EXPORTER_OTLP_ENDPOINT": base, "OTEL_SDK_DISABLED": "true"}
    observe(None, make_request().request, environ=off)
    assert receiver.spans() == []


def test_an_unknown_protocol_is_refused_if_asked_for_and_tolerated_if_inherited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A variable meant for another program must not keep a server from starting."""
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}
    with pytest.raises(ConfigurationError, match="http/json"):
        build_engine_observer(endpoint="http://c:4318", registry=CollectorRegistry(), environ=environ)
    observe(None, make_request().request, environ=environ)
    assert "no spans" in caplog.text
