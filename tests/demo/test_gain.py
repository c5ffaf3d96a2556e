"""The one line about drafting adds up what was reported and makes nothing up."""

from __future__ import annotations

import pytest

from agentspec_runtime.client.report import CallReport
from agentspec_runtime.demo.gain import describe_gain


def call(
    tokens: int | None, steps: int | None = None, drafted: int | None = None, accepted: int | None = None
) -> CallReport:
    return CallReport(
        operation="chat",
        model="m",
        base_url="",
        session=None,
        agent=None,
        parent=None,
        turn=None,
        hinted=False,
        stream=False,
        outcome="ok",
        latency_ms=1500.0,
        completion_tokens=tokens,
        num_steps=steps,
        drafted=drafted,
        accepted=accepted,
    )


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        ([], "0 model calls, 0 tokens, 0.0 s; this server says nothing about drafting"),
        ([call(20)], "1 model calls, 20 tokens, 1.5 s; this server says nothing about drafting"),
        (
            [call(30, 10, 40, 20), call(10, 10, 0, 0)],
            (
                "2 model calls, 40 tokens, 3.0 s; 20 steps: 40 tokens drafted, "
                "20 accepted (50% of the tokens), 20 rejected"
            ),
        ),
        (
            [call(None, 0, 0, 0)],
            "1 model calls, 0 tokens, 1.5 s; 0 steps: 0 tokens drafted, 0 accepted, 0 rejected",
        ),
    ],
)
def test_the_line(calls: list[CallReport], line: str) -> None:
    assert describe_gain(calls) == line
