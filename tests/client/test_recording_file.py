"""A recorded run can be read by the bench, holds each thing once, and holds no secrets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from agentspec_runtime.adapters.langgraph import wrap

import agentspec_runtime
from agentspec_runtime.bench.recordings import Recording, read_recordings
from agentspec_runtime.client import recording
from agentspec_runtime.client.recording import Recorder
from agentspec_runtime.client.redaction import Redactor, without_surrogates
from agentspec_runtime.errors import RecordingError
from agentspec_runtime.testing import MockVLLM, Reply, ToolCall

SCHEMA: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def chat(client: openai.OpenAI, messages: list[dict[str, Any]], **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=messages, **options)  # type: ignore[arg-type]


def only(path: Path) -> Recording:
    (found,) = read_recordings(path)
    return found


def test_a_tool_loop_becomes_one_growing_run(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    call = ToolCall("add", {"b": 1, "a": 2}, "c1")
    with MockVLLM([Reply(tool_calls=[call]), Reply("three")]) as server:
        client = openai.OpenAI(base_url=server.url, api_key="x")
        with agentspec_runtime.record(path), agentspec_runtime.session("run-1"):
            messages: list[dict[str, Any]] = [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
            ]
            first = chat(client, messages, tools=SCHEMA).choices[0].message
            # As a framework renders it again: other spacing, empty text in place of null.
            again = json.dumps(json.loads(first.tool_calls[0].function.arguments), separators=(",", ":"))
            rendered = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": again}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [rendered]})
            messages.append({"role": "tool", "tool_call_id": "c1", "content": "3"})
            list(chat(client, messages, tools=SCHEMA, stream=True))
    run = only(path)
    assert [message["role"] for message in run.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert run.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"b": 1, "a": 2}'
    assert [(request.prompt, request.target) for request in run.requests] == [((0, 1), 2), ((0, 1, 2, 3), 4)]
    assert (run.group, run.fidelity, run.model, len(run.tools)) == ("run-1", "exact", "m", 1)
    assert run.messages[4]["content"] == "three"


def test_a_recording_of_a_langgraph_agent_can_be_read(tmp_path: Path) -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    def add(a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    path = tmp_path / "runs.jsonl.gz"
    calls = [ToolCall("add", {"a": 1, "b": 2}, "c1"), ToolCall("add", {"a": 3, "b": 4}, "c2")]
    with MockVLLM([Reply("I will add.", tool_calls=calls), Reply("3 and 7")]) as server:
        model = ChatOpenAI(model="m", base_url=server.url, api_key="x")
        agent = wrap(create_agent(model, [add], name="coder", system_prompt="s"))
        with agentspec_runtime.record(path):
            agent.invoke({"messages": [("user", "hi")]}, {"configurable": {"thread_id": "t"}})
    agentspec_runtime.uninstrument()
    assert gzip.decompress(path.read_bytes())
    run = only(path)
    assert [message["role"] for message in run.messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant")
    ]
    assert run.fidelity == "exact"
    assert run.requests[1].prompt == (0, 1, 2, 3, 4)


def test_runs_are_kept_apart_and_files_can_be_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with MockVLLM() as server:
        client = openai.OpenAI(base_url=server.url, api_key="x")
        for _ in range(2):
            with agentspec_runtime.record(path):
                for name in ("a", "b"):
                    with agentspec_runtime.session(name):
                        chat(client, [{"role": "user", "content": name}])
                chat(client, [{"role": "user", "content": "no session"}])
    runs = list(read_recordings(path))
    assert [run.group for run in runs] == ["a", "b", runs[2].group] * 2
    assert runs[2].group.startswith("chat-")


def test_a_repeated_call_with_the_same_answer_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with MockVLLM([Reply("same")]) as server, agentspec_runtime.record(path), agentspec_runtime.session("s"):
        client = openai.OpenAI(base_url=server.url, api_key="x")
        for _ in range(3):
            chat(client, [{"role": "user", "content": "u"}])
    assert len(only(path).requests) == 1


def test_two_answers_to_one_prompt_are_two_requests(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    replies = [Reply("one"), Reply("two")]
    with MockVLLM(replies) as server, agentspec_runtime.record(path), agentspec_runtime.session("s"):
        client = openai.OpenAI(base_url=server.url, api_key="x")
        for _ in range(2):
            chat(client, [{"role": "user", "content": "u"}])
    assert [(request.prompt, request.target) for request in only(path).requests] == [((0,), 1), ((0,), 2)]


def test_few_shot_answers_are_told_apart_from_what_was_generated(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    shots = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "shown"},
        {"role": "user", "content": "real"},
    ]
    with MockVLLM() as server, agentspec_runtime.record(path), agentspec_runtime.session("s"):
        chat(openai.OpenAI(base_url=server.url, api_key="x"), shots)
    run = only(path)
    assert [message["role"] for message in run.messages] == ["user", "user", "user", "assistant"]
    assert run.fidelity == "reconstructed_prompt"


def test_answers_that_are_not_whole_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with MockVLLM([Reply("a b c")]) as server, agentspec_runtime.record(path), agentspec_runtime.session("s"):
        client = openai.OpenAI(base_url=server.url, api_key="x", max_retries=0)
        chat(client, [{"role": "user", "content": "two choices"}], n=2)
        with chat(client, [{"role": "user", "content": "broken off"}], stream=True) as stream:
            next(stream)
        server.script([Reply(status=500)])
        with pytest.raises(openai.InternalServerError):
            chat(client, [{"role": "user", "content": "failed"}])
        server.script([Reply("whole")])
        chat(client, [{"role": "user", "content": "fine"}])
    assert [message["content"] for message in only(path).messages] == ["fine", "whole"]


BLOCKS: list[tuple[object, str]] = [
    ("text", "text"),
    ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}], "a\n[image_url]"),
    ([], ""),
    (None, ""),
]


@pytest.mark.parametrize(("content", "text"), BLOCKS)
def test_content_of_every_form_becomes_text(content: object, text: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    messages = [{"role": "user", "content": "u"}, {"role": "tool", "tool_call_id": "c", "content": content}]
    with MockVLLM() as server, agentspec_runtime.record(path), agentspec_runtime.session("s"):
        chat(openai.OpenAI(base_url=server.url, api_key="x"), messages)
        assert server.requests[0].body["messages"] == messages
    assert only(path).messages[1]["content"] == text


SECRETS = {
    "openai": "sk-proj-abcdefghijklmnopqrstuvwxyz012345",
    "github": "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "aws": "AKIAABCDEFGHIJKLMNOP",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefgh",
    "json": "hunter2-in-json",
    "shell": "hunter2-in-shell",
    "bearer": "abcdefabcdefabcdef",
    "url": "hunter2-in-url",
}
TEXT = (
    f"key {SECRETS['openai']} and {SECRETS['github']} and {SECRETS['aws']} jwt {SECRETS['jwt']}\n"
    f'{{"db_password": "{SECRETS["json"]}", "keep": "this"}}\n'
    f"export API_KEY={SECRETS['shell']}\nAuthorization: Bearer {SECRETS['bearer']}\n"
    f"postgres://me:{SECRETS['url']}@db/x\n"
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----"
)


def test_no_secret_is_in_any_byte_of_the_file_and_the_request_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    call = ToolCall("login", {"password": SECRETS["json"], "blob": TEXT}, "c1")
    messages: list[dict[str, Any]] = [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT}]
    with MockVLLM([Reply(TEXT, tool_calls=[call])]) as server:
        client = openai.OpenAI(base_url=server.url, api_key="x")
        with agentspec_runtime.record(path, redact=lambda text: text.replace("this", "THAT")):
            chat(client, messages)
        assert server.requests[0].body["messages"] == messages
    data = path.read_text()
    for name, secret in SECRETS.items():
        assert secret not in data, name
    assert "PRIVATE KEY" not in data
    content = only(path).messages[0]["content"] or ""
    assert '"keep": "THAT"' in content


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "login",
        "description": f"Log in with {SECRETS['openai']}; password='{SECRETS['json']}'.",
        "parameters": {
            "type": "object",
            "required": ["password"],
            "properties": {
                "user": {"type": "string", "default": "guest", "examples": [SECRETS["github"]]},
                "password": {
                    "type": "string",
                    "title": "Password",
                    "description": "The password of the user.",
                    "default": SECRETS["shell"],
                    "enum": [SECRETS["shell"], "hunter2-too"],
                    "maxLength": 64,
                },
                "headers": {"type": "object", "default": {"x_api_key": SECRETS["url"]}},
            },
        },
    },
}


def test_secrets_in_tool_schemas_are_replaced_and_the_schema_stays(tmp_path: Path) -> None:
    """In descriptions by rule; defaults and examples of a property that is named like a secret, whole."""
    path = tmp_path / "runs.jsonl"
    with MockVLLM() as server, agentspec_runtime.record(path, redact=lambda text: text.replace("guest", "X")):
        chat(
            openai.OpenAI(base_url=server.url, api_key="x"), [{"role": "user", "content": "u"}], tools=[TOOL]
        )
        assert server.requests[0].body["tools"] == [TOOL]
    data = path.read_text()
    assert not [name for name, secret in SECRETS.items() if secret in data]
    assert "hunter2" not in data
    (tool,) = only(path).tools
    function: Any = tool["function"]
    properties = function["parameters"]["properties"]
    assert (tool["type"], function["name"]) == ("function", "login")
    assert function["parameters"]["required"] == ["password"]
    assert properties["user"]["default"] == "X"
    password = properties["password"]
    assert password["default"] == password["enum"][0] != password["enum"][1]
    assert {key: password[key] for key in ("type", "title", "description", "maxLength")} == {
        key: TOOL["function"]["parameters"]["properties"]["password"][key]
        for key in ("type", "title", "description", "maxLength")
    }


def test_equal_secrets_have_equal_stand_ins_and_others_have_others() -> None:
    redactor = Redactor()
    one, two, three = (redactor.clean(f"sk-{letter * 20}") for letter in "aab")
    assert one == two != three


@pytest.mark.parametrize(
    "text", ["max_tokens=4096", "the password is secret", 'token_count: "12"', "a/b@c: d", ""]
)
def test_plain_text_stays(text: str) -> None:
    assert Redactor().clean(text) == text


def test_a_long_line_is_cleaned_in_reasonable_time() -> None:
    line = "a-" * 500_000
    assert Redactor().clean(line) == line


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("price \udc97 10", "price \ufffd 10"),
        ("\ud83c", "\ufffd"),
        ("\ud83c\udf78", "\U0001f378"),
        ("ok\0", "ok\0"),
    ],
)
def test_half_characters_are_replaced_in_the_file_only(text: str, written: str, tmp_path: Path) -> None:
    assert without_surrogates(text) == written
    recorder = Recorder(tmp_path / "runs.jsonl")
    sink = recorder.begin()
    sink.absorb({"choices": [{"index": 0, "message": {"content": f"said {text}"}}]})
    body = {"messages": [{"role": "user", "content": text}]}
    sink.finish(body, _report())
    recorder.close()
    assert [message["content"] for message in only(recorder.path).messages] == [written, f"said {written}"]
    assert body["messages"][0]["content"] == text


def _report() -> Any:
    return agentspec_runtime.CallReport(
        operation="chat", model="m", base_url="", session="s", agent=None, parent=None, turn=0, hinted=True,
        stream=False, outcome="ok", latency_ms=1.0,
    )  # fmt: skip


def test_waits_between_calls_are_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "runs.jsonl")
    for number, (start, end) in enumerate([(0.0, 1.0), (3.5, 4.0)]):
        body = {"messages": [{"role": "user", "content": str(number)}]}
        recorder.add(body, {"role": "assistant", "content": f"a{number}"}, _report(), (start, end))
    recorder.close()
    assert [request.wait_s for request in only(recorder.path).requests] == [0.0, 2.5]


def test_idle_and_surplus_runs_are_written_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_MAX_OPEN", 2)
    recorder = Recorder(tmp_path / "runs.jsonl")
    for number in range(4):
        body = {"messages": [{"role": "user", "content": str(number)}]}
        answer = {"role": "assistant", "content": "a"}
        report = agentspec_runtime.CallReport(
            **{name: getattr(_report(), name) for name in _report().__slots__ if name != "session"},
            session=f"s{number}",
        )
        recorder.add(body, answer, report, (0.0, 1.0))
    assert len(list(read_recordings(recorder.path))) == 2
    recorder.add(body, answer, report, (5_000.0, 5_001.0))
    assert len(list(read_recordings(recorder.path))) == 3
    recorder.close()
    assert [run.group for run in read_recordings(recorder.path)] == ["s0", "s1", "s2", "s3"]


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot be written"), agentspec_runtime.record(tmp_path):
        pass


def test_recording_does_not_outlive_its_block(tmp_path: Path) -> None:
    from agentspec_runtime.client.instrument import _state

    with agentspec_runtime.record(tmp_path / "a.jsonl"):
        assert _state.active is not None
    assert _state.active is None
    with agentspec_runtime.instrument():
        with agentspec_runtime.record(tmp_path / "b.jsonl"):
            pass
        assert _state.active is not None
        assert _state.active.recorder is None


def test_instrument_can_record_and_undoing_it_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    agentspec_runtime.instrument(record=path)
    with MockVLLM() as server, agentspec_runtime.session("s"):
        chat(openai.OpenAI(base_url=server.url, api_key="x"), [{"role": "user", "content": "u"}])
    assert path.read_text() == ""
    agentspec_runtime.uninstrument()
    assert only(path).group == "s"
