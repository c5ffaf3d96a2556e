"""The values that cross the border of the drafting core.

Everything in `drafting/` is pure: no vllm, torch or opentelemetry, no clock, no environment, no global
randomness. It is driven alike by the scheduler, by the offline simulator and by tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from agentspec_runtime.hints import SegmentKind
from agentspec_runtime.observe import DraftSource

__all__ = [
    "BLOCK_KINDS",
    "SOURCES",
    "BatchDraft",
    "BlockSpan",
    "Draft",
    "DraftScope",
    "DraftingConfig",
    "Float32Array",
    "Int32Array",
    "Int64Array",
    "Observed",
]

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]

SOURCES: Final = (DraftSource.REQUEST, DraftSource.SESSION, DraftSource.CORPUS, DraftSource.ASSIST)
"""Meaning of the codes in `Draft.sources`."""

BLOCK_KINDS: Final = (SegmentKind.TEXT, SegmentKind.CODE, SegmentKind.TOOL_CALL, SegmentKind.REASONING)
"""Meaning of the block codes; the kinds of block that an answer can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingConfig:
    """Sizes and limits. Tokens where not said otherwise.

    Attributes:
        num_speculative_tokens: longest draft, vLLM's own setting.
        memory_mb: bound on the draft memory (token store and index), in MiB. One token costs
            `slab.BYTES_PER_TOKEN` bytes and extents are powers of two, so plan for up to twice that.
        max_requests: rows that exist at first; grows by doubling.
        max_namespaces: tenants remembered at the same time; the least recently used one goes first.
        max_sessions: sessions remembered per namespace, beyond those in use; likewise.
        max_session_tokens: text kept per session; its older half goes when it is full.
        max_corpus_tokens: earlier outputs kept per namespace; likewise.
        candidates_per_source: occurrences looked at per source, newest first. 12 does as well as 48
            on all five reference workloads, 6 loses up to 1 % of accepted tokens
            (docs/how-it-works.md).
        index_tokens_per_step: prompt tokens taken in per engine step. 16,384 is below 1 ms on one
            core of a 2020s server; a longer prompt takes several steps (it takes several to prefill).
    """

    num_speculative_tokens: int = 32
    memory_mb: int = 512
    max_requests: int = 256
    max_namespaces: int = 64
    max_sessions: int = 4096
    max_session_tokens: int = 1 << 18
    max_corpus_tokens: int = 1 << 18
    candidates_per_source: int = 12
    index_tokens_per_step: int = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftScope:
    """Whose text a request may draft from.

    `namespace` isolates: text, counts and learned statistics never cross it. It is built by the server
    from what isolates vLLM's prefix cache (model, adapter, cache salt), never from a hint. `session`
    and `reach` come from the hint and only narrow.
    """

    namespace: str = ""
    session: str | None = None
    reach: Literal["corpus", "session", "request"] = "corpus"


@dataclass(frozen=True, slots=True)
class Draft:
    """Candidate tokens for one request in one step.

    `token_ids` int32[n]; `survival` float32[n], non-increasing: probability that the first k+1 tokens
    are all accepted; `sources` int8[n], codes into `SOURCES`.
    """

    token_ids: Int32Array
    survival: Float32Array
    sources: npt.NDArray[np.int8]

    def __len__(self) -> int:
        return int(self.token_ids.size)


@dataclass(frozen=True, slots=True)
class BatchDraft:
    """Drafts of one step as arrays, one line per request asked for, in the order asked.

    `token_ids` int32[R, K], `survival` float32[R, K], `sources` int8[R, K], `lengths` int64[R].
    Entries beyond `lengths[i]` are meaningless.
    """

    token_ids: Int32Array
    survival: Float32Array
    sources: npt.NDArray[np.int8]
    lengths: Int64Array

    def draft(self, i: int) -> Draft:
        """The draft in line `i`."""
        n = int(self.lengths[i])
        return Draft(self.token_ids[i, :n], self.survival[i, :n], self.sources[i, :n])

    def cut_before(self, ends: Sequence[tuple[int, ...]]) -> None:
        """Cut each draft before the first token that ends its answer; `ends[i]` holds their ids for line `i`.

        The step that verifies what comes before samples the end by itself, so a drafted end saves nothing.
        And an answer that never ends inside a draft has as many steps as tokens that were not accepted.
        """
        for column in zip_longest(*ends, fillvalue=-1):
            is_end = self.token_ids == np.array(column, np.int32)[:, None]
            if is_end.any():
                first = np.where(is_end.any(axis=1), is_end.argmax(axis=1), self.lengths)
                np.minimum(self.lengths, first, out=self.lengths)


class BlockSpan(NamedTuple):
    """Tokens of one step that belong to one block; `block` counts the blocks of the answer from 0."""

    block: int
    kind: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What one step did for one request, after stop handling.

    `accepted` tokens of the draft were emitted; `discarded` were verified but lie behind the end of
    the answer. `spans` divides the emitted tokens into blocks.
    """

    accepted: int
    discarded: int
    spans: tuple[BlockSpan, ...]
