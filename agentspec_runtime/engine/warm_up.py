"""Every compiled kernel is called once before the first request, so that no step has to compile one.

numba keeps what it compiled beside our modules, or in the user's cache folder where that cannot be written.
A full disk and a damaged file there come out of numba as bare exceptions of `open` and `pickle`.
"""

from __future__ import annotations

import pickle

from agentspec_runtime.drafting import Drafter, DraftingConfig, DraftScope
from agentspec_runtime.drafting.answers import Answers
from agentspec_runtime.engine.token_table import build_token_table
from agentspec_runtime.errors import ConfigurationError

__all__ = ["warm_up"]


def warm_up(drafter: Drafter) -> None:
    """Compile every kernel, or load it from numba's cache. Leaves nothing in the drafter.

    Raises:
        ConfigurationError: that cache cannot be written or read; the message says what to do.
    """
    try:
        _call_all(drafter)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigurationError(
            f"numba's cache of compiled kernels cannot be used ({type(error).__name__}: {error}): free some "
            "space and remove its *.nbi and *.nbc files, or set NUMBA_CACHE_DIR to an empty folder"
        ) from error


def _call_all(drafter: Drafter) -> None:
    Answers(drafter.vocabulary, drafter.config.num_speculative_tokens)
    scope = DraftScope(namespace="warm-up", session="warm-up")
    tokens = [1, 2, 3, 4, 5, 6, 7, 8] * 8
    for round_number in range(2):
        name = f"warm-up-{round_number}"
        drafter.start(name, tokens, scope=scope)
        while drafter.work():
            pass
        drafter.draft_batch([name], [4], 0.01)
        drafter.observe_batch([name], [[1, 2]])
        drafter.finish(name)
    drafter.forget("warm-up")


def _main() -> None:
    """For set-up: compile now, so that the first server does not start a minute later."""
    vocabulary = build_token_table(None, 512)
    warm_up(Drafter(DraftingConfig(), vocabulary))


if __name__ == "__main__":
    _main()
