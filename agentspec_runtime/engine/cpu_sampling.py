"""One function of vLLM's CPU build, put right where it is wrong.

Without it, sampling with drafts is not lossless there: `expand_batch_to_tokens`, which spreads each
request's temperature, top-k and top-p over its draft tokens, throws its result away and returns memory
that nobody has written (vllm-project/vllm issue 55005, open as of 0.33). Sampled requests then follow a
random temperature, and greedy requests in the same step can lose their argmax. The worker loads our
proposer, and the proposer calls this.

What is wrong is found out by trying, not by version: once vLLM is right, this does nothing, and
`tests/engine/test_cpu_sampling.py` fails to say that the file can go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

__all__ = ["expand", "expands", "repair_cpu_sampling"]

_log = logging.getLogger("agentspec.engine")

Expand: TypeAlias = Callable[..., torch.Tensor]


def repair_cpu_sampling() -> bool:
    """Replace vLLM's function if this is a CPU build and the function is wrong. True if it was."""
    if not current_platform.is_cpu() or expands(rejection_sampler.expand_batch_to_tokens):
        return False
    rejection_sampler.expand_batch_to_tokens = expand
    _log.info("agentspec: repaired the sampling of drafts on CPU (vllm-project/vllm issue 55005)")
    return True


def expands(function: Expand) -> bool:
    """Whether the function does what its name says, for the two types that it is called with."""
    try:
        found = [
            function(
                torch.tensor(values, dtype=kind), torch.tensor([1, 3], dtype=torch.int32), 3, 0, 7
            ).tolist()
            for values, kind in (([0.75, 0.0], torch.float32), ([5, 0], torch.int32))
        ]
    except Exception:  # noqa: BLE001  (a kernel that cannot even be called is wrong as well)
        return False
    return found == [[0.75, 7.0, 7.0], [5, 7, 7]]


def expand(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """x [R] spread to [num_tokens]: line i as often as request i has tokens, `cu_num_tokens` summing them
    up. Values equal to `replace_from` become `replace_to`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    spread = torch.repeat_interleave(x, counts, output_size=num_tokens)
    return spread.masked_fill(spread == replace_from, replace_to)
