"""Every Python block of the guide parses, and the names that it uses exist."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import agentspec_runtime

GUIDE = Path(__file__).parents[2] / "docs" / "agents.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:40])
def test_a_block_is_valid_and_names_what_exists(block: str) -> None:
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentspec_runtime"):
            module = import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    import_module(f"{node.module}.{alias.name}")
        is_ours = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_ours and node.value.id == "agentspec_runtime" and node.attr != "testing":  # type: ignore[attr-defined]
            assert node.attr in agentspec_runtime.__all__, node.attr  # type: ignore[attr-defined]


def test_every_argument_of_session_is_in_the_table() -> None:
    import inspect

    text = GUIDE.read_text()
    for name in inspect.signature(agentspec_runtime.session).parameters:
        assert f"| `{name}` |" in text, name
