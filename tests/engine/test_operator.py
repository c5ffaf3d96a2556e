"""An operator at a real server under load: caches reset with requests in flight, paused, asleep and awake.

The same on a scheduler with a scripted worker, step by step, is `test_engine_controls.py`. vLLM's CPU worker
has no memory to give back and ignores that part of sleeping; scheduler and engine core do all of theirs.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conversation import Answer, ask_all, metric
from near_tie import explain
from request_mix import greedy_requests

pytestmark = pytest.mark.engine

REQUESTS = dict(list(greedy_requests("SmolLM2-135M-Instruct").items())[::2])


def operate(url: str, path: str) -> dict[str, Any]:
    """An endpoint for operators; the server was started with VLLM_SERVER_DEV_MODE=1."""
    with urllib.request.urlopen(urllib.request.Request(f"{url}/{path}", method="POST"), timeout=60) as answer:
        return dict(json.load(answer))


def reset(url: str) -> None:
    """Every running request loses its KV cache, is put back in the queue, and is computed again."""
    assert operate(url, "reset_prefix_cache?reset_running_requests=true") == {"success": True}


def pause(url: str) -> None:
    """Requests stay where they are."""
    operate(url, "pause?mode=keep")
    time.sleep(0.1)
    operate(url, "resume")


def sleep(url: str) -> None:
    """The same, with what vLLM does beside it for a sleep: caches are reset."""
    operate(url, "sleep?level=1&mode=keep")
    time.sleep(0.1)
    operate(url, "wake_up")


def test_answers_do_not_depend_on_the_operator(
    engine_server: Any, plain_answers: dict[str, Answer], plain_server: Any
) -> None:
    check(engine_server, plain_answers, plain_server)


@pytest.mark.slow
def test_nor_with_a_model_drafter_beside_ours(
    tenant_server: Any, plain_answers: dict[str, Answer], plain_server: Any
) -> None:
    check(tenant_server, plain_answers, plain_server)


def check(server: Any, plain_answers: dict[str, Answer], plain_server: Any) -> None:
    """All requests of the mix while the operator is at work."""
    url = server.root_url
    thrown_out = metric(url, "vllm:num_preemptions_total")
    errors = metric(url, "agentspec_internal_errors_total")
    done = threading.Event()
    times = 0

    def work() -> None:
        nonlocal times
        while not done.wait(2.0):
            (reset, pause, sleep)[times % 3](url)
            times += 1

    with ThreadPoolExecutor(1) as pool:
        operator = pool.submit(work)
        try:
            rounds = []
            while times < 3 and len(rounds) < 10:
                rounds.append(
                    ask_all(server.base_url, REQUESTS, at_once=16, headers={"x-tenant": "operator"})
                )
        finally:
            done.set()
        operator.result()
    assert times >= 3
    assert metric(url, "vllm:num_preemptions_total") > thrown_out
    for name, answer in (item for answers in rounds for item in answers.items()):
        assert (answer.status, answer.message) == (200, ""), name
        mine, theirs = answer.choices[0].token_ids, plain_answers[name].choices[0].token_ids
        if mine != theirs:
            explain(plain_server.base_url, REQUESTS[name], mine, theirs)
    drafts = [answer.speculative or {} for answers in rounds for answer in answers.values()]
    assert sum(draft.get("num_accepted_draft_tokens", 0) for draft in drafts) > 20
    assert metric(url, "agentspec_internal_errors_total") == errors
