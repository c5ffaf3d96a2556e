"""`@tool` changes nothing that a caller, a framework or `inspect` can see."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import pickle
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal, get_type_hints

import pytest
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool, ToolException
from langchain_core.tools import tool as lc_tool
from langgraph.errors import GraphInterrupt
from langgraph.prebuilt import InjectedState
from pydantic import BaseModel, Field

from agentspec_runtime import SegmentKind
from agentspec_runtime.client.observer import BoundaryStart, register_boundary_observer
from agentspec_runtime.client.scope import current
from agentspec_runtime.client.session import session
from agentspec_runtime.client.tool import result_kinds, tool
from agentspec_runtime.errors import ConfigurationError


class Query(BaseModel):
    """A model that is declared as parameter."""

    text: str
    child: Query | None = None


class Seen:
    """Boundary observer that records everything it is given."""

    def __init__(self) -> None:
        self.starts: list[BoundaryStart] = []
        self.ends: list[BaseException | None] = []

    def start(self, boundary: BoundaryStart) -> object:
        self.starts.append(boundary)
        return self

    def active(self, token: object) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, token: object, error: BaseException | None) -> None:
        self.ends.append(error)


@pytest.fixture
def seen() -> Iterator[Seen]:
    watcher = Seen()
    remove = register_boundary_observer(watcher)
    yield watcher
    remove()


def plain(a: int, *, b: str = "x") -> str:
    """Docs."""
    return f"{a}{b}"


async def coroutine(a: int) -> str:
    return str(a)


def generator(a: int) -> Iterator[str]:
    yield "one"
    yield str(a)


async def async_generator(a: int) -> AsyncIterator[str]:
    yield "one"
    yield str(a)


def gives_awaitable(a: int) -> Awaitable[str]:
    return coroutine(a)


class Holder:
    """Methods of every kind."""

    @tool
    def method(self, a: int) -> str:
        return f"method {a}"

    @tool
    @classmethod
    def class_method(cls, a: int) -> str:
        return f"{cls.__name__} {a}"

    @classmethod
    @tool
    def class_method_inside(cls, a: int) -> str:
        return f"{cls.__name__} {a}"

    @tool
    @staticmethod
    def static_method(a: int) -> str:
        return f"static {a}"


class Thing:
    """A callable object with an attribute of its own."""

    label = "mine"

    def __call__(self, a: int) -> str:
        """Docs."""
        return f"called {a}"


PROBES: list[Callable[[object], object]] = [
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
    asyncio.iscoroutinefunction,
    inspect.signature,  # type: ignore[list-item]  # takes callables only
    get_type_hints,
    inspect.getdoc,
    lambda function: getattr(function, "__name__", None),
    lambda function: getattr(function, "__module__", None),
]


@pytest.mark.parametrize("parentheses", [False, True])
@pytest.mark.parametrize("function", [plain, coroutine, generator, async_generator, gives_awaitable])
def test_kind_signature_hints_and_docs_stay(function: Any, parentheses: bool) -> None:
    marked = tool()(function) if parentheses else tool(function)
    for probe in PROBES:
        assert probe(marked) == probe(function)


def test_methods_of_every_kind_still_bind() -> None:
    holder = Holder()
    assert holder.method(1) == "method 1"
    assert Holder.class_method(2) == holder.class_method(2) == "Holder 2"
    assert Holder.class_method_inside(2) == "Holder 2"
    assert Holder.static_method(3) == holder.static_method(3) == "static 3"
    assert str(inspect.signature(holder.method)) == "(a: 'int') -> 'str'"


def test_partials_and_callable_objects(seen: Seen) -> None:
    part = functools.partial(plain, b="z")
    marked = tool(part)
    assert marked(1) == part(1)
    assert inspect.signature(marked) == inspect.signature(part)
    thing = Thing()
    proxied = tool(thing)
    assert proxied(5) == "called 5"
    assert (proxied.label, isinstance(proxied, Thing)) == ("mine", True)
    assert [start.name for start in seen.starts] == ["plain", "Thing"]
    asynchronous = tool(functools.partial(coroutine, 4))
    assert inspect.iscoroutinefunction(asynchronous)
    assert asyncio.run(asynchronous()) == "4"


def test_an_awaitable_result_is_handed_on_as_it_is() -> None:
    assert asyncio.run(tool(gives_awaitable)(3)) == "3"  # type: ignore[arg-type]  # it is a coroutine


@tool
def pickled(a: int) -> int:
    return a


def test_a_marked_function_can_be_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(pickled)) is pickled


def test_arguments_are_forwarded_exactly() -> None:
    default: list[str] = []

    def spy(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    query = Query(text="q")
    args, kwargs = tool(spy)(query, tags=default)
    assert args[0] is query
    assert kwargs["tags"] is default

    def f(q: Query, limit: int = 5, tags: list[str] = Field(default_factory=list)) -> Any:  # noqa: B008 - the case
        return q, limit, tags

    assert tool(f)(query)[2] is f(query)[2]


@pytest.mark.parametrize(
    "failure", [ValueError("v"), ToolException("t"), KeyboardInterrupt(), GraphInterrupt(())], ids=repr
)
def test_the_same_exception_object_comes_out(failure: BaseException, seen: Seen) -> None:
    @tool
    def fails() -> None:
        raise failure

    with pytest.raises(type(failure)) as caught:
        fails()
    assert caught.value is failure
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fails"
    steers = isinstance(failure, GraphInterrupt)
    assert seen.ends == [None if steers else failure]


def test_an_exception_that_is_returned_is_a_result(seen: Seen) -> None:
    error = ValueError("returned")
    assert tool(lambda: error)() is error
    assert seen.ends == [None]


def test_a_generator_keeps_send_throw_return_and_early_close(seen: Seen) -> None:
    log: list[object] = []

    @tool
    def conversation() -> Iterator[Any]:
        try:
            while True:
                try:
                    log.append((yield len(log)))
                except KeyError as error:
                    log.append(error.args[0])
                if len(log) == 3:
                    return "result"
        finally:
            log.append("closed")

    talk: Any = conversation()
    assert next(talk) == 0
    assert talk.send("a") == 1
    assert talk.throw(KeyError("k")) == 2
    with pytest.raises(StopIteration) as stop:
        talk.send("b")
    assert stop.value.value == "result"
    assert log == ["a", "k", "b", "closed"]
    early: Any = conversation()
    log.clear()
    next(early)
    early.close()
    assert log == ["closed"]
    assert seen.ends == [None, None]
    conversation()  # never started: nothing began, nothing ends
    assert len(seen.starts) == 2


async def test_an_async_generator_keeps_asend_and_aclose(seen: Seen) -> None:
    closed = []

    @tool
    async def conversation() -> AsyncIterator[Any]:
        try:
            got = yield "first"
            yield got
        finally:
            closed.append(True)

    talk: Any = conversation()
    assert await anext(talk) == "first"
    assert await talk.asend("back") == "back"
    await talk.aclose()
    assert closed == [True]
    assert seen.ends == [None]


def test_nothing_of_the_tool_is_current_while_the_consumer_of_a_generator_runs() -> None:
    inside: list[str | None] = []

    @tool
    def walks() -> Iterator[int]:
        for number in range(2):
            run = current().tool
            inside.append(run.name if run else None)
            yield number

    outside = [current().tool for _ in walks()]
    assert inside == ["walks", "walks"]
    assert outside == [None, None]


@pytest.mark.parametrize("marked", [plain, generator])
def test_the_result_is_remembered_by_the_session(marked: Any) -> None:
    with session() as run:
        result = tool(marked)(7)
        text = result if isinstance(result, str) else "".join(result)
        assert [found.name for found in run.results().values()] == [marked.__name__]
        assert text in ("7x", "one7")


@pytest.mark.parametrize(
    "text",
    [
        "price \udc97 10",
        "\ud83c",
        "nul \0",
        "\x1b[31mred",
        "x" * 5_000_000,
        "a\r\nb",
        "\ufeffbom",
        "e\u0301\u200f",
    ],
    ids=["lone", "half", "nul", "ansi", "large", "crlf", "bom", "marks"],
)
def test_odd_text_passes_untouched(text: str) -> None:
    with session():
        assert tool(lambda: text)() is text


CANARY = "sk-canary-canary-canary"


def test_arguments_never_reach_an_observer(seen: Seen) -> None:
    @tool
    def secretive(key: str) -> str:
        raise ValueError("failed without saying why")

    with session("s", agent="a"), pytest.raises(ValueError, match="failed"):
        secretive(CANARY)
    assert CANARY not in repr((seen.starts, seen.ends))


# With LangChain -------------------------------------------------------------------------------------------


def search(
    query: Query,
    kind: Literal["a", "b"],
    state: Annotated[dict[str, Any], InjectedState],
    call_id: Annotated[str, InjectedToolCallId],
    limit: int | None = None,
) -> str:
    """Search for something.

    Args:
        query: what to look for.
    """
    return f"{query.text} {kind} {limit} {state['user']} {call_id}"


async def asearch(
    query: Query,
    kind: Literal["a", "b"],
    call_id: Annotated[str, InjectedToolCallId],
    limit: int | None = None,
) -> str:
    """Search for something."""
    return f"{query.text} {kind} {limit} {call_id}"


def call_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": "search", "args": arguments, "id": "c9", "type": "tool_call"}


def orders(function: Any) -> list[BaseTool]:
    """The bare LangChain tool, ours under it, ours over it."""
    return [lc_tool(function), lc_tool(tool(function)), tool(lc_tool(function))]


def test_the_schema_is_the_same_under_and_over_langchains_tool() -> None:
    for function in (search, asearch):
        bare, *marked = orders(function)
        for one in marked:
            assert type(one) is StructuredTool
            assert one.name == bare.name
            assert one.description == bare.description
            assert json.dumps(one.tool_call_schema.model_json_schema()) == json.dumps(
                bare.tool_call_schema.model_json_schema()
            )
            assert one.args == bare.args


def test_a_langchain_tool_gives_the_same_message(seen: Seen) -> None:
    arguments = {"query": {"text": "q"}, "kind": "a", "state": {"user": "u"}}
    bare, *marked = (one.invoke(call_of(arguments)) for one in orders(search))
    assert marked == [bare, bare]
    assert [start.name for start in seen.starts] == ["search", "search"]


async def test_an_async_langchain_tool_gives_the_same_message(seen: Seen) -> None:
    arguments = {"query": {"text": "q"}, "kind": "a"}
    bare, *marked = [await one.ainvoke(call_of(arguments)) for one in orders(asearch)]
    assert marked == [bare, bare]
    assert len(seen.starts) == 2


def test_the_original_langchain_tool_is_not_changed() -> None:
    original = lc_tool(search)
    function = original.func
    tool(original)
    assert original.func is function


class ByClass(BaseTool):
    """A tool without a function."""

    name: str = "by_class"
    description: str = "x"

    def _run(self, a: int) -> str:
        return str(a)


def test_a_tool_class_is_refused_with_advice() -> None:
    with pytest.raises(ConfigurationError, match="_run"):
        tool(ByClass())


def test_something_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="callable"):
        tool(3)


def test_a_kind_of_result_is_known_by_the_name_of_the_tool() -> None:
    @tool(kind=SegmentKind.FILE)
    def read_a_file(path: str) -> str:
        return path

    @tool(name="cat", kind="file")
    def other(path: str) -> str:
        return path

    assert result_kinds()["read_a_file"] == result_kinds()["cat"] == "file"
    assert (read_a_file("p"), other("q")) == ("p", "q")
