"""A module imports only what docs/architecture.md allows its folder; pure parts stay pure, edges stay lazy.

Read from the source, so that an import inside a function counts too; and checked once more by importing, so
that nothing heavy comes in by the back door.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = "agentspec_runtime"
ANY: Final = frozenset({"*"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a folder may import: `eager` anywhere, `lazy` only inside functions or for type checking."""

    own: frozenset[str] = frozenset()
    own_lazy: frozenset[str] = frozenset()
    eager: frozenset[str] = frozenset()
    lazy: frozenset[str] = frozenset()


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VOCABULARY: Final = names("errors hints observe")
RULES: Final = {
    "errors": Rule(),
    "hints": Rule(own=names("errors"), eager=names("pydantic")),
    "observe": Rule(own=names("hints")),
    "drafting": Rule(own=VOCABULARY, eager=names("numpy numba llvmlite")),
    "budget": Rule(own=names("errors observe"), eager=names("numpy")),
    "engine": Rule(
        own=VOCABULARY | names("drafting budget"),
        own_lazy=names("telemetry embedded"),
        eager=names("numpy pydantic vllm torch"),
        lazy=names("psutil"),
    ),
    "client": Rule(
        own=names("errors hints"),
        own_lazy=names("telemetry"),
        eager=names("pydantic wrapt opentelemetry"),
        lazy=names("openai anyio"),
    ),
    # Its client half watches model calls through the seam that `client/` offers.
    "telemetry": Rule(
        own=VOCABULARY | names("client"),
        eager=names("opentelemetry rich typer prometheus_client google"),
        lazy=names("pydantic grpc"),
    ),
    "embedded": Rule(own=names("errors"), eager=names("pydantic"), lazy=names("transformers")),
    "adapters": Rule(own=names("errors hints client")),
    "bench": Rule(own=ANY, eager=ANY, own_lazy=ANY, lazy=ANY),
    "demo": Rule(own=ANY, eager=ANY, own_lazy=ANY, lazy=ANY),
    "_scripted": Rule(),
    "testing": Rule(own=names("errors hints client _scripted"), eager=names("pytest")),
    "doctor": Rule(
        own=names("errors embedded engine"), own_lazy=names("telemetry"), lazy=names("opentelemetry")
    ),
    "cli": Rule(own=names("errors"), own_lazy=ANY, eager=names("typer")),
    "__main__": Rule(own=names("cli")),
    "__init__": Rule(own_lazy=ANY),
}
# An adapter imports its own framework and no other.
FRAMEWORKS: Final = {
    "langgraph": names("langchain langchain_core langchain_openai langgraph"),
    "openai": names("openai"),
    "openai_agents": names("agents openai"),
    "pydantic_ai": names("pydantic_ai"),
    "dspy": names("dspy"),
}
# A module of `engine` that must be importable without vLLM: the API process's part and everything of the CLI.
WITHOUT_VLLM: Final = names("args compat config host middleware serve server_plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    module: str
    line: int
    lazy: bool


def imports_of(path: Path) -> Iterator[Import]:
    yield from _walk(ast.parse(path.read_text(encoding="utf-8")), path, lazy=False)


def _walk(node: ast.AST, path: Path, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inside = True
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module=alias.name, line=child.lineno, lazy=inside)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{path}:{child.lineno}: imports are absolute here"
            module = child.module or ""
            if module == PACKAGE:  # from agentspec_runtime import doctor
                for alias in child.names:
                    yield Import(module=f"{PACKAGE}.{alias.name}", line=child.lineno, lazy=inside)
            else:
                yield Import(module=module, line=child.lineno, lazy=inside)
        yield from _walk(child, path, lazy=inside)


def sources() -> list[tuple[str, Path]]:
    package = ROOT / PACKAGE
    found = [(path.relative_to(package).parts[0].removesuffix(".py"), path) for path in package.rglob("*.py")]
    return sorted(found) + [("adapters", path) for path in sorted((ROOT / "adapters").rglob("*.py"))]


def violations(folder: str, path: Path) -> Iterator[str]:
    rule = RULES[folder]
    for item in imports_of(path):
        top, _, rest = item.module.partition(".")
        where = f"{path.relative_to(ROOT)}:{item.line}: {'lazily ' if item.lazy else ''}imports {item.module}"
        if top in sys.stdlib_module_names:
            continue
        if top == PACKAGE:
            part = rest.split(".")[0]
            allowed = rule.own | {folder} | (rule.own_lazy if item.lazy else frozenset())
            if part and part not in allowed and "*" not in allowed:
                yield where
        else:
            allowed = rule.eager | (rule.lazy if item.lazy else frozenset())
            if folder == "adapters":
                allowed |= FRAMEWORKS.get(path.stem, frozenset())
            if top not in allowed and "*" not in allowed:
                yield where


def test_every_folder_has_a_rule_and_stands_in_the_architecture():
    folders = {folder for folder, _ in sources()}
    assert folders <= RULES.keys()
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    described = folders - names("__init__ __main__ doctor demo testing _scripted")
    missing = [name for name in described if f"`{name}/`" not in text and f"`{name}.py`" not in text]
    assert missing == []


@pytest.mark.parametrize("folder", sorted(RULES))
def test_imports_stay_inside_the_boundaries(folder: str):
    found = [line for owner, path in sources() if owner == folder for line in violations(folder, path)]
    assert found == []


@pytest.mark.parametrize("module", sorted(WITHOUT_VLLM))
def test_parts_of_the_engine_that_need_no_vllm_import_none(module: str):
    path = ROOT / PACKAGE / "engine" / f"{module}.py"
    heavy = {"vllm", "torch", "numba", "numpy"}
    found = [item for item in imports_of(path) if item.module.split(".")[0] in heavy and not item.lazy]
    assert found == []


def test_adapters_do_not_import_each_other():
    for folder, path in sources():
        if folder == "adapters" and path.name != "__init__.py":
            assert not [item for item in imports_of(path) if item.module.startswith(f"{PACKAGE}.adapters")], (
                path
            )


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


HEAVY: Final = names("vllm torch numba numpy transformers openai langgraph langchain_core prometheus_client")


@pytest.mark.parametrize(
    "statement",
    [
        "import agentspec_runtime; agentspec_runtime.session, agentspec_runtime.tool, agentspec_runtime.Hint",
        "import agentspec_runtime; agentspec_runtime.instrument",
        "import agentspec_runtime.cli",
        "import agentspec_runtime.doctor",
        "import agentspec_runtime.embedded",
        "import agentspec_runtime.engine.middleware",
        "import agentspec_runtime.engine.serve",
        "import agentspec_runtime.engine.args, agentspec_runtime.engine.compat",
    ],
)
def test_light_imports_load_nothing_heavy(statement: str):
    assert loaded_by(statement) & HEAVY == set()


@pytest.mark.parametrize("part", ["drafting", "budget"])
def test_pure_parts_load_no_engine_and_no_telemetry(part: str):
    assert (
        loaded_by(f"import {PACKAGE}.{part}") & names("vllm torch opentelemetry transformers openai") == set()
    )
