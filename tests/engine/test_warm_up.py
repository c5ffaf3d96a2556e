"""The cache of compiled kernels, on a full disk and with a damaged file in it: said, with a way out."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = textwrap.dedent(
    """
    import pathlib, resource, sys
    from agentspec_runtime.drafting import Drafter, DraftingConfig, TokenTable, answer_log
    from agentspec_runtime.engine.warm_up import warm_up
    from agentspec_runtime.errors import ConfigurationError

    drafter = Drafter(DraftingConfig(memory_mb=1, max_namespaces=1), TokenTable.opaque(64))
    if sys.argv[1] == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    else:
        for kernel in vars(answer_log).values():
            if hasattr(kernel, "stats"):
                index = pathlib.Path(kernel._cache._cache_file._index_path)
                index.parent.mkdir(parents=True, exist_ok=True)
                index.write_bytes(b"" if sys.argv[1] == "empty" else bytes(range(256)))
    try:
        warm_up(drafter)
    except ConfigurationError as error:
        print(error)
        sys.exit(3)
    """
)


@pytest.mark.parametrize("how", ["full", "empty", "damaged"])
def test_a_kernel_cache_that_cannot_be_used_is_a_clear_error(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "NUMBA_CACHE_DIR" in done.stdout
