"""Sessions, agents and turns: nested, in threads, tasks and generators, left in whatever order."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec_runtime.client.context import (
    _MAX_REMEMBERED,
    ResultKey,
    Session,
    ToolRun,
    clean_name,
    named_session,
)
from agentspec_runtime.client.observer import BoundaryStart, register_boundary_observer
from agentspec_runtime.client.scope import current
from agentspec_runtime.client.session import session
from agentspec_runtime.hints import Hint


def names() -> tuple[str | None, str | None, str | None]:
    here = current()
    return (here.session.id if here.session else None, here.agent, here.parent)


def test_without_a_block_nothing_is_known() -> None:
    assert names() == (None, None, None)


def test_nested_agents_share_the_session_and_know_their_parent() -> None:
    with session("s", agent="planner"):
        assert names() == ("s", "planner", None)
        with session(agent="coder"):
            assert names() == ("s", "coder", "planner")
            with session(agent="critic"):
                assert names() == ("s", "critic", "coder")
            with session(agent="coder"):  # entered again: no parent of itself
                assert names() == ("s", "coder", "planner")
        assert names() == ("s", "planner", None)
    assert names() == (None, None, None)


def test_what_is_not_given_is_inherited_and_expectations_stay_with_their_agent() -> None:
    with session("s", agent="a", scope="session", latency="batch", speculate=8, expect=["code"]):
        with session():
            assert (current().scope, current().latency, current().speculate) == ("session", "batch", 8)
            assert current().expect == ("code",)
        with session(agent="b", speculate="off"):
            assert current().speculate == "off"
            assert current().expect == ()


def test_a_session_without_a_name_gets_its_own() -> None:
    with session() as one, session("x") as two:
        assert one.id != two.id
    with session() as three:
        assert three.id != one.id


async def test_async_with_is_the_same() -> None:
    async with session("s", agent="a") as run:
        assert (run.id, names()) == ("s", ("s", "a", None))
    assert names() == (None, None, None)


def test_turns_are_counted_once_each_over_many_threads() -> None:
    run = Session("t")
    with ThreadPoolExecutor(16) as pool:
        turns = list(pool.map(lambda _: run.next_turn(), range(2_000)))
    assert sorted(turns) == list(range(2_000))


def test_a_named_session_goes_on_counting() -> None:
    with session("goes-on") as run:
        first = run.next_turn()
    with session("goes-on") as run:
        assert run.next_turn() == first + 1


def test_the_table_of_names_is_bounded() -> None:
    old = named_session("oldest")
    for number in range(_MAX_REMEMBERED):
        named_session(f"filler-{number}")
    assert named_session("oldest") is not old


async def test_interleaved_tasks_never_see_each_other() -> None:
    async def work(number: int) -> list[str | None]:
        seen = []
        async with session(f"task-{number}", agent=f"a{number}"):
            for _ in range(5):
                await asyncio.sleep(0)
                seen.append(names()[0])
        return seen

    results = await asyncio.gather(*(work(number) for number in range(20)))
    assert results == [[f"task-{number}"] * 5 for number in range(20)]


def test_one_block_object_may_be_used_by_many_threads() -> None:
    block = session("shared", agent="a")

    def work(_: int) -> tuple[str | None, str | None]:
        with block:
            inside = names()[0]
        return inside, names()[0]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(200))) == {("shared", None)}


def test_a_plain_thread_pool_starts_without_and_with_a_copied_context_has_it() -> None:
    with session("s"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: names()[0]).result() is None
        assert pool.submit(contextvars.copy_context().run, lambda: names()[0]).result() == "s"


def test_blocks_left_out_of_order_leave_nothing_behind() -> None:
    def holds(name: str) -> Iterator[None]:
        with session(name):
            yield

    first, second = holds("first"), holds("second")
    next(first)
    next(second)
    first.close()
    assert names()[0] == "second"
    second.close()
    assert names()[0] is None


async def test_a_generator_dropped_in_another_task_neither_raises_nor_leaks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def holds() -> AsyncIterator[int]:
        async with session("generator", agent="g"):
            yield 1
            yield 2

    generator = holds()
    assert await anext(generator) == 1
    with session("mine"):
        await asyncio.create_task(generator.aclose())
        assert names()[0] == "mine"
    dropped = holds()
    await anext(dropped)
    del dropped
    gc.collect()
    await asyncio.sleep(0.01)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class Boundaries:
    """Keeps a context variable set while a boundary is active, as a span would be."""

    def __init__(self) -> None:
        self.finished: list[tuple[str, BaseException | None]] = []

    def start(self, boundary: BoundaryStart) -> object:
        return boundary

    def active(self, token: object) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, token: object, error: BaseException | None) -> None:
        assert isinstance(token, BoundaryStart)
        self.finished.append((token.name, error))


def test_an_agent_is_a_boundary_and_its_error_is_seen_and_raised() -> None:
    seen = Boundaries()
    remove = register_boundary_observer(seen)
    failure = ValueError("no")
    try:
        with session("s"):
            pass
        with pytest.raises(ValueError, match="no") as caught, session("s", agent="coder"):
            raise failure
    finally:
        remove()
    assert caught.value is failure
    assert seen.finished == [("coder", failure)]


@given(st.text(max_size=300) | st.integers() | st.none())
def test_any_name_becomes_one_that_a_hint_takes(value: object) -> None:
    name = clean_name(value)
    Hint(session=name)
    assert (name is None) == (value is None or value == "")
    if isinstance(value, str) and len(value) <= 128 and name is not None and value.isascii():
        assert name == value


def test_long_names_that_differ_stay_different() -> None:
    assert clean_name("x" * 200 + "a") != clean_name("x" * 200 + "b")


def test_results_are_kept_by_key_and_only_the_newest() -> None:
    run = Session("r")
    for number in range(100):
        run.note_result(f"result {number}", ToolRun(name="t"))
    assert len(run.results()) == 32
    assert ResultKey.of("result 99") in run.results()
    assert ResultKey.of("result 1") not in run.results()
