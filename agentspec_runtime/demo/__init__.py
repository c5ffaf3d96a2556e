"""The main job, end to end: an agent and a Reflexion loop on a real vLLM, plain and then with drafting.

`agentspec demo` (or `python -m agentspec_runtime.demo`) runs it. Everything in it is real: the servers,
the LangGraph agent, the files it edits, the tests that judge it. Only the tasks are small, because the
embedded model is (135M parameters); whether it solves them is measured by running tests and reported
as it is.

`sandbox`, `workspace`, `reflexion` and `turns` know neither the servers nor each other's frameworks, so
that the programs in `examples/` can be built from them too.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with command-line arguments; returns the exit code."""
    from agentspec_runtime.demo.command import main as run

    return run(argv)
