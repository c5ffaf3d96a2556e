"""`python -m agentspec_runtime` is the `agentspec` command, for where its script is not on the PATH."""

from __future__ import annotations

from agentspec_runtime.cli import main

if __name__ == "__main__":
    main()
