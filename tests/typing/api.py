"""How the agent side is meant to be typed: checked by mypy, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import assert_type

import agentspec_runtime
from agentspec_runtime import CallReport, SegmentKind
from agentspec_runtime.client.context import Session


@agentspec_runtime.tool
def plain(a: int, *, b: str = "") -> str:
    """A tool."""
    return f"{a}{b}"


@agentspec_runtime.tool(name="cat", kind=SegmentKind.FILE)
async def coroutine(path: str) -> bytes:
    """A tool."""
    return path.encode()


@agentspec_runtime.tool()
async def generator(count: int) -> AsyncIterator[int]:
    """A tool."""
    for number in range(count):
        yield number


async def use() -> None:
    """Every public name, with the types that a caller gets."""
    assert_type(plain(1, b="x"), str)
    assert_type(await coroutine("p"), bytes)
    assert_type([item async for item in generator(2)], list[int])
    with agentspec_runtime.session("s", agent="a", speculate=8, scope="session", latency="batch") as run:
        assert_type(run, Session)
        assert_type(run.turns, int)
    async with agentspec_runtime.session(expect=[SegmentKind.CODE, "text"]):
        pass
    with agentspec_runtime.collect_calls() as calls, agentspec_runtime.on_call(lambda report: None):
        assert_type(calls, list[CallReport])
    with (
        agentspec_runtime.instrument(servers=["http://localhost:8000/v1"]),
        agentspec_runtime.record("a.jsonl"),
    ):
        agentspec_runtime.instrument(servers="off", record=None)
    agentspec_runtime.uninstrument()
    report = calls[0]
    assert_type(report.accepted, int | None)
    assert_type(report.rejected, int | None)
    assert_type(report.per_step_accepted, tuple[int, ...] | None)
