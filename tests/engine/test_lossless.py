"""Our server against a plain one, both real: the same tokens for every kind of request, at any load.

Greedy, float32, eager. Float32 makes a near tie (two logits closer than the noise of another batch shape)
rare, not impossible: a difference counts as one only if the plain server itself gives the two tokens
probabilities within `NEAR_TIE`; anything else is a defect.
"""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conversation import Answer, ask, ask_all, metric, post
from near_tie import explain
from request_mix import CODE, EDIT, PERSON, chat, completion, greedy_requests
from varied_requests import OPTIONS, SHAPES, TEXTS, varied_requests

from agentspec_runtime.hints import Hint, encode_hint

pytestmark = pytest.mark.engine

MODEL = "SmolLM2-135M-Instruct"
REQUESTS = greedy_requests(MODEL)
MANY = 32
"""Requests at once."""
LOOSE = 1e-3
"""Log probabilities of the same token from two servers."""


@pytest.fixture(scope="module")
def served(engine_server: Any) -> dict[tuple[int, bool], dict[str, Answer]]:
    """By (at once, streamed). One at a time takes a part of the mix, since it takes the longest."""
    url = engine_server.base_url
    some = dict(list(REQUESTS.items())[::5])
    return {
        (MANY, False): ask_all(url, REQUESTS, at_once=MANY),
        (MANY, True): ask_all(url, REQUESTS, at_once=MANY, stream=True),
        (1, False): ask_all(url, some, at_once=1),
        (1, True): ask_all(url, some, at_once=1, stream=True),
    }


WAYS = [
    pytest.param(way, name, id=f"{name} ({way[0]} at once{', streamed' * way[1]})")
    for way in ((MANY, False), (MANY, True), (1, False), (1, True))
    for name in (REQUESTS if way[0] > 1 else list(REQUESTS)[::5])
]


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_answers_equal_those_of_the_plain_server(
    way: tuple[int, bool],
    name: str,
    served: dict[tuple[int, bool], dict[str, Answer]],
    plain_answers: dict[str, Answer],
    plain_server: Any,
) -> None:
    ours, plain = served[way][name], plain_answers[name]
    assert (ours.status, ours.message) == (200, ""), name
    assert plain.status == 200, plain.message
    (mine,), (theirs,) = ours.choices, plain.choices
    assert mine.token_ids
    if mine.token_ids != theirs.token_ids:
        explain(plain_server.base_url, REQUESTS[name], mine.token_ids, theirs.token_ids)
        return
    assert mine.text == theirs.text
    # Streamed arguments keep the model's whitespace, whole ones are written anew by vLLM, plain or not.
    assert [(name, json.loads(arguments)) for name, arguments in mine.tool_calls] == [
        (name, json.loads(arguments)) for name, arguments in theirs.tool_calls
    ]
    assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
    assert ours.prompt_tokens == plain.prompt_tokens
    assert ours.completion_tokens == plain.completion_tokens == len(mine.token_ids)
    assert [token for token, _ in mine.logprobs] == [token for token, _ in theirs.logprobs]
    for (_, a), (_, b) in zip(mine.logprobs, theirs.logprobs, strict=True):
        assert a is b is None or a == pytest.approx(b, abs=LOOSE)


def test_the_mix_was_drafted_for(served: dict[tuple[int, bool], dict[str, Answer]]) -> None:
    """Equality of answers without drafts would prove nothing."""
    answers = served[MANY, False].values()
    accepted = sum((a.speculative or {}).get("num_accepted_draft_tokens", 0) for a in answers)
    tokens = sum(a.completion_tokens for a in answers)
    assert accepted > 0.25 * tokens
    drafted = [a for a in answers if (a.speculative or {}).get("num_draft_tokens")]
    assert len(drafted) > 0.6 * len(served[MANY, False])
    wrong = sum((a.speculative or {}).get("num_draft_tokens", 0) for a in answers) - accepted
    assert wrong > 0.02 * tokens, "drafts that the model does not follow were among them"


@pytest.mark.slow
def test_a_model_drafter_beside_ours_changes_no_token(
    tenant_server: Any, plain_answers: dict[str, Answer], plain_server: Any
) -> None:
    """EAGLE-3 and our drafts in one engine, chosen between per request and step (`--assist`)."""
    tenant = {"x-tenant": "lossless"}
    answers = ask_all(tenant_server.base_url, REQUESTS, at_once=16, headers=tenant)
    for name, answer in answers.items():
        assert (answer.status, answer.message) == (200, ""), name
        (mine,), (theirs,) = answer.choices, plain_answers[name].choices
        if mine.token_ids != theirs.token_ids:
            explain(plain_server.base_url, REQUESTS[name], mine.token_ids, theirs.token_ids)
    # Of the head fewer: ours knows most of this text, and it is a weak one.
    for name in ("draft", "accepted"):
        for source in ("assist", "request"):
            found = metric(tenant_server.root_url, f"agentspec_{name}_tokens_total", f'source="{source}"')
            assert found > 0, (name, source)
    assert metric(tenant_server.root_url, "agentspec_internal_errors_total") == 0


def test_constrained_answers_keep_to_their_grammar(
    served: dict[tuple[int, bool], dict[str, Answer]],
) -> None:
    """FR-04: with a fence in the prompt that a drafter would copy."""
    for way in ((MANY, False), (MANY, True)):
        answers = served[way]
        for name in ("json schema", "json schema, fence in the prompt"):
            value = json.loads(answers[name].choices[0].text)
            assert set(value) == set(PERSON["properties"])
        json.loads(answers["tool forced"].choices[0].tool_calls[0][1])
        assert re.fullmatch(r"(\d{1,3}\.){3}\d{1,3}", answers["regex"].choices[0].text)
        assert answers["choice"].choices[0].text in ("yes", "no", "maybe so")


def test_one_logprob_per_token(served: dict[tuple[int, bool], dict[str, Answer]]) -> None:
    """FR-08, FR-09: also where a stop string cuts a step; and none is zero by default."""
    for name in ("logprobs", "logprobs of a completion", "logprobs with a stop"):
        for way in ((MANY, False), (MANY, True)):
            answer = served[way][name]
            values = [value for _, value in answer.choices[0].logprobs]
            assert len(values) == answer.completion_tokens
            assert any(value < -1e-4 for value in values)


def test_minimum_length_is_kept(served: dict[tuple[int, bool], dict[str, Answer]]) -> None:
    """FR-10, in every way of serving."""
    for answers in served.values():
        for name, least in (("min_tokens", 24), ("min_tokens is max_tokens", 20)):
            if name in answers:
                assert answers[name].completion_tokens >= least


def test_bad_words_are_not_said(served: dict[tuple[int, bool], dict[str, Answer]]) -> None:
    """FR-07: the drafter would copy them, the sampler must still forbid them."""
    assert "green" not in served[MANY, False]["bad words"].choices[0].text
    ids = served[MANY, False]["allowed tokens"].choices[0].token_ids
    assert all(300 <= token < 3000 for token in ids)


@pytest.mark.parametrize("tokens", [4094, 4060])
def test_the_context_limit_is_reached_and_survived(
    engine_server: Any, plain_server: Any, tokens: int
) -> None:
    """FR-11: a prompt that leaves 2 or 36 tokens, repetitive, without `max_tokens`."""
    prompt = ([*range(400, 450)] * 100)[:tokens]
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "return_token_ids": True, "max_tokens": None}
    with ThreadPoolExecutor(2) as pool:
        urls = (engine_server.base_url, plain_server.base_url)
        ours, plain = pool.map(lambda url: ask(url, body), urls)
    assert ours.status == plain.status == 200, ours.message
    assert ours.choices[0].token_ids == plain.choices[0].token_ids
    assert ours.choices[0].finish_reason == plain.choices[0].finish_reason
    assert ours.completion_tokens <= 4096 - tokens
    assert ask(engine_server.base_url, REQUESTS["one letter"]).status == 200


# Sampling


def test_seeded_samples_without_drafts_equal_those_of_the_plain_server(
    engine_server: Any, plain_server: Any
) -> None:
    """`speculate: off` is the path for those who need a seed to mean the same as without speculation."""
    body = {**chat("Tell me a story.", max_tokens=24), "model": MODEL, "temperature": 0.8, "n": 2, "seed": 7}
    body |= {"return_token_ids": True}
    plain = ask(plain_server.base_url, body)
    ours = ask(engine_server.base_url, {**body, "vllm_xargs": hint(speculate="off")})
    assert [c.token_ids for c in ours.choices] == [c.token_ids for c in plain.choices]
    assert ours.choices[0].token_ids != ours.choices[1].token_ids


def test_a_seed_with_a_prompt_that_takes_several_steps_ends_nothing(engine_server: Any) -> None:
    """vLLM's CPU build winds the generator back after a chunk of a prompt, cannot, and the engine ended."""
    body = {**completion("An unusual tale. " + "seven green boats sail north " * 450, max_tokens=12)}
    body |= {"model": MODEL, "temperature": 0.8, "seed": 7, "return_token_ids": True}
    body |= {"vllm_xargs": hint(speculate="off")}
    in_chunks, cached = ask(engine_server.base_url, body), ask(engine_server.base_url, body)
    assert in_chunks.status == cached.status == 200, in_chunks.message
    assert in_chunks.prompt_tokens > 2048, "more than vLLM computes in one step"
    assert in_chunks.choices[0].token_ids == cached.choices[0].token_ids, "the seed means the same"


def test_several_samples_with_drafts_are_whole(engine_server: Any) -> None:
    """n=2, seeded and not, beside greedy ones (FR-19): nobody's text is in another's, lengths are right."""
    sampled = {**completion("red green blue " * 8, max_tokens=24), "model": MODEL, "temperature": 0.7, "n": 2}
    sampled |= {"return_token_ids": True}
    greedy = REQUESTS["copy"]
    bodies = {f"seed {i}": {**sampled, "seed": i} for i in range(3)}
    bodies |= {"no seed": sampled} | {f"greedy {i}": greedy for i in range(3)}
    answers = ask_all(engine_server.base_url, bodies, at_once=7)
    for name, answer in answers.items():
        assert answer.status == 200, answer.message
        assert len(answer.choices) == (1 if "greedy" in name else 2)
        assert sum(len(c.token_ids) for c in answer.choices) == answer.completion_tokens
    assert len({tuple(answers[f"greedy {i}"].choices[0].token_ids) for i in range(3)}) == 1


# Hints


def hint(**fields: object) -> dict[str, str]:
    return {"agentspec": encode_hint(Hint.model_validate(fields))}


@pytest.mark.parametrize(
    "value",
    [
        "{",
        "[]",
        '{"turn": -1}',
        '{"session": ""}',
        '{"speculate": "force"}',
        '{"marks": 5}',
        "x" * 5000,
        5,
        ["a"],
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_hint_is_a_400_and_nothing_else(engine_server: Any, value: object, stream: bool) -> None:
    """FR-02: the reason comes back, the neighbour in flight and the next request are served."""
    body = {**REQUESTS["max_tokens 12"], "vllm_xargs": {"agentspec": value}}
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(ask, engine_server.base_url, REQUESTS["max_tokens 33"])
        answer = ask(engine_server.base_url, body, stream=stream)
        assert answer.status == 400
        assert "agentspec" in json.loads(answer.message)["error"]["message"]
        assert neighbour.result().completion_tokens == 33
    assert ask(engine_server.base_url, REQUESTS["max_tokens 1"]).status == 200


def test_a_hint_of_the_future_is_ignored(engine_server: Any) -> None:
    xargs = {"agentspec": json.dumps({"v": 2, "speculate": "telepathy"} | {"v": 999, "speculate": "auto"})}
    answer = ask(engine_server.base_url, {**REQUESTS["copy"], "vllm_xargs": xargs})
    assert answer.status == 200
    assert answer.choices[0].token_ids == ask(engine_server.base_url, REQUESTS["copy"]).choices[0].token_ids


def test_speculate_off_drafts_nothing(engine_server: Any) -> None:
    answer = ask(engine_server.base_url, {**REQUESTS["copy"], "vllm_xargs": hint(speculate="off")})
    assert answer.completion_tokens == 64
    assert not answer.speculative or answer.speculative["num_draft_tokens"] == 0


def test_a_cap_on_the_draft_length_is_honoured(engine_server: Any, plain_answers: dict[str, Answer]) -> None:
    answer = ask(engine_server.base_url, {**REQUESTS["copy"], "vllm_xargs": hint(speculate=2)})
    assert answer.choices[0].token_ids == plain_answers["copy"].choices[0].token_ids
    assert answer.speculative is not None
    assert 0 < max(answer.speculative["per_step_drafted"]) <= 2


def test_hints_change_no_token(engine_server: Any, plain_answers: dict[str, Answer]) -> None:
    """True, false and absurd ones, all at once, each with its own."""
    hints: list[dict[str, object]] = [
        {},
        {"session": "a", "expect": ["code"], "turn": 0},
        {"session": "a", "expect": ["reasoning", "tool_call"], "latency": "interactive"},
        {"session": "b", "scope": "request", "latency": "batch", "tools": 100_000},
        {"marks": [{"index": 999_999, "kind": "file"}], "agent": "🤖", "parent": "x" * 128},
        {"speculate": 1024, "scope": "session"},
    ]
    names = ["copy", "code continued", "emoji", "json schema", "stop string"]
    bodies = {
        f"{name} {i}": {**REQUESTS[name], "vllm_xargs": hint(**fields)}
        for name in names
        for i, fields in enumerate(hints)
    }
    for name, answer in ask_all(engine_server.base_url, bodies, at_once=16).items():
        expected = plain_answers[name.rsplit(" ", 1)[0]]
        assert answer.choices[0].token_ids == expected.choices[0].token_ids, name
        assert answer.choices[0].text == expected.choices[0].text


@pytest.mark.parametrize("parameter", [{"min_p": 0.1}, {"logit_bias": {"400": 5}}])
@pytest.mark.parametrize("speculate", ["auto", "off"])
def test_what_vllm_refuses_with_speculation_is_refused_clearly(
    engine_server: Any, plain_server: Any, parameter: dict[str, object], speculate: str
) -> None:
    """A documented limit of vLLM 0.32: an answer that says so, never a silently ignored parameter. vLLM looks
    at the server's configuration, so a request without drafts is refused as well; once it is not, the way is
    free for `speculate: off` (docs/compatibility.md). The plain server takes both.
    """
    body = {**REQUESTS["one letter"], "temperature": 0.7, "max_tokens": 2, **parameter}
    answer = ask(engine_server.base_url, {**body, "vllm_xargs": hint(speculate=speculate)})
    assert answer.status == 400
    assert "speculative decoding" in answer.message
    assert ask(plain_server.base_url, body).status == 200


@pytest.mark.parametrize(
    "body",
    [
        completion(""),
        completion([]),
        {"messages": [], "max_tokens": 4},
        completion([10**9]),
        completion([-1]),
        {**completion("a"), "n": 2},
        {**completion("a"), "max_tokens": 0},
    ],
    ids=["no text", "no tokens", "no messages", "huge id", "negative id", "greedy n=2", "max_tokens 0"],
)
def test_what_is_no_request_is_answered_as_by_the_plain_server(
    engine_server: Any, plain_server: Any, body: dict[str, object]
) -> None:
    """Empty prompts, tokens that no vocabulary holds, several greedy answers: vLLM decides, not we."""
    asked = {"model": MODEL, "temperature": 0, **body}
    ours, plain = ask(engine_server.base_url, asked), ask(plain_server.base_url, asked)
    assert ours.status == plain.status == 400
    assert ask(engine_server.base_url, REQUESTS["max_tokens 1"]).status == 200


# Sessions


def test_a_session_drafts_from_its_earlier_turns(engine_server: Any) -> None:
    """The same edit asked twice in a session of its own: the second answer is mostly drafted."""
    accepted = []
    for turn in range(2):
        xargs = hint(session="test of session reuse", turn=turn, scope="session")
        answer = ask(engine_server.base_url, {**REQUESTS["code edit"], "vllm_xargs": xargs})
        assert answer.speculative is not None
        accepted.append(answer.speculative["num_accepted_draft_tokens"] / answer.completion_tokens)
    assert accepted[1] > accepted[0]
    assert accepted[1] > 0.7


def test_tenants_do_not_draft_from_each_other(engine_server: Any) -> None:
    """Two cache salts: what one tenant made the model say helps the same tenant only."""
    body = {
        **REQUESTS["code edit"],
        "messages": [{"role": "user", "content": EDIT + "\nIt is for tenant A."}],
    }

    def accepted(salt: str) -> float:
        answer = ask(engine_server.base_url, {**body, "cache_salt": salt})
        found: float = (answer.speculative or {}).get("num_accepted_draft_tokens", 0)
        return found

    first, again, other = accepted("tenant a"), accepted("tenant a"), accepted("tenant b")
    assert again > first + 10
    # The budget follows measured step times, so a draft may end a few tokens sooner or later.
    assert abs(other - first) <= 5


# Life of a server


def test_a_client_that_leaves_in_mid_stream(engine_server: Any) -> None:
    """Eight streams closed after the first chunk: the engine stops their work, others are not disturbed."""
    long = {**chat(EDIT, max_tokens=1500, ignore_eos=True), "model": MODEL, "stream": True}
    with ThreadPoolExecutor(9) as pool:
        neighbour = pool.submit(ask, engine_server.base_url, REQUESTS["copy"])

        def leave(_: int) -> None:
            with post(engine_server.base_url, long) as response:
                assert response.readline().startswith(b"data:")

        list(pool.map(leave, range(8)))
        assert neighbour.result().completion_tokens == 64
    deadline = time.monotonic() + 20
    while metric(engine_server.root_url, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert metric(engine_server.root_url, "vllm:num_requests_running") == 0
    assert metric(engine_server.root_url, "agentspec_internal_errors_total") == 0
    assert ask(engine_server.base_url, REQUESTS["copy"]).completion_tokens == 64


def test_streams_arrive_in_pieces_of_several_tokens(
    served: dict[tuple[int, bool], dict[str, Answer]],
) -> None:
    """What speculation looks like to a client: fewer chunks than tokens, the text is the same."""
    answer = served[1, True]["code edit"] if "code edit" in served[1, True] else served[MANY, True]["copy"]
    assert 1 < answer.num_chunks < answer.completion_tokens


def test_nothing_went_wrong_inside(engine_server: Any, served: object) -> None:
    """After all of this: no error of ours was swallowed, no hint dropped past the API but future ones."""
    time.sleep(1.5)  # the telemetry thread writes in slices
    assert metric(engine_server.root_url, "agentspec_internal_errors_total") == 0
    log = engine_server.log.read_text(errors="replace")
    assert "agentspec: error in" not in log
    # In dev mode (`test_operator.py` needs it) vLLM logs where a malformed request was refused.
    assert not [line for line in log.splitlines() if "Traceback" in line and "[validation.py" not in line]


# A stock client


@pytest.fixture(scope="module")
def sdk() -> Any:
    return pytest.importorskip("openai", reason="needs the extra openai")


def stock_arguments() -> dict[str, Any]:
    return {"model": MODEL, "messages": REQUESTS["code edit"]["messages"], "max_tokens": 90, "temperature": 0}


def test_stock_client_sync(sdk: Any, engine_server: Any, plain_answers: dict[str, Answer]) -> None:
    with sdk.OpenAI(base_url=engine_server.base_url, api_key="none") as client:
        answer = client.chat.completions.create(**stock_arguments())
        chunks = client.chat.completions.create(
            **stock_arguments(), stream=True, stream_options={"include_usage": True}
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    expected = plain_answers["code edit"].choices[0].text
    assert answer.choices[0].message.content == expected
    assert "".join(parts) == expected


async def test_stock_client_async(sdk: Any, engine_server: Any, plain_answers: dict[str, Answer]) -> None:
    async with sdk.AsyncOpenAI(base_url=engine_server.base_url, api_key="none") as client:
        answer = await client.chat.completions.create(**stock_arguments())
        text = ""
        async for chunk in await client.chat.completions.create(**stock_arguments(), stream=True):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    expected = plain_answers["code edit"].choices[0].text
    assert answer.choices[0].message.content == text == expected


def test_stock_client_from_many_threads(
    sdk: Any, engine_server: Any, plain_answers: dict[str, Answer]
) -> None:
    texts: list[str] = []
    with sdk.OpenAI(base_url=engine_server.base_url, api_key="none") as client:

        def work() -> None:
            answer = client.chat.completions.create(**stock_arguments())
            texts.append(answer.choices[0].message.content)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == [plain_answers["code edit"].choices[0].text] * 8


def test_the_code_of_the_mix_is_code() -> None:
    """Should someone change it: the edit must stay a program, or "code edit" tests nothing."""
    compile(CODE, "mix", "exec")


def test_varied_requests_are_varied() -> None:
    """What the long comparison asks (`compare_servers.py --varied 500`): all different, of every kind."""
    bodies = varied_requests(MODEL, 500)
    assert len({json.dumps(body, sort_keys=True) for body in bodies.values()}) == 500
    assert bodies == varied_requests(MODEL, 500)
    kinds = [kind for name in bodies for kind in name.split(": ")[1].split(", ")]
    texts = {make.__name__.strip("_") for make in TEXTS}
    assert set(kinds) == texts | OPTIONS.keys() | SHAPES.keys()
    assert min(kinds.count(kind) for kind in set(kinds)) >= 5
