"""The drafters that the simulator compares, behind one protocol.

A rival holds one state and several settings. Settings that do not change the state (an n-gram length, a
probability threshold) share one pass over the recording; ours learns from its own verdicts, so every
threshold of it is a rival of its own.

What is real and what is rewritten: suffix decoding is the arctic-inference package itself, driven call by
call as vLLM's proposer drives it. The n-gram rule is rewritten, because vLLM must not be needed here; a
test holds it against vLLM's own function. Ours is the drafter of this package, through the seam that the
scheduler uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from agentspec_runtime.bench.chat_tokens import Tokens
from agentspec_runtime.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "NGRAM_RECOMMENDED",
    "SUFFIX_RECOMMENDED",
    "Candidate",
    "NgramRival",
    "NgramSetting",
    "Rival",
    "SuffixRival",
    "SuffixSetting",
]

_F = TypeVar("_F", bound="Callable[..., object]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Draft of one request in one step. `survival` and `sources` only where the drafter states them."""

    token_ids: Tokens
    survival: NDArray[np.float32] | None = None
    sources: NDArray[np.int8] | None = None


class Rival(Protocol):
    """A drafter under test: one request at a time, in the order of the recording."""

    @property
    def method(self) -> str:
        """Name of the method."""
        ...

    @property
    def settings(self) -> Sequence[str]:
        """Name of every setting that is compared."""
        ...

    @property
    def by_block(self) -> Mapping[str, list[int]]:
        """[drafted, accepted] by kind of block, where the drafter knows blocks."""
        ...

    def start(self, req_id: str, session: str, prompt_ids: Tokens) -> None:
        """A request begins."""
        ...

    def extend(self, token_ids: Tokens) -> None:
        """Verified output tokens of the request, in order."""
        ...

    def draft(self, setting: int) -> Candidate:
        """Draft for the next step, after everything that was given to `extend`."""
        ...

    def finish(self) -> None:
        """The request is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSetting:
    """vLLM's `prompt_lookup_min`, `prompt_lookup_max` and `num_speculative_tokens`."""

    min_n: int
    max_n: int
    num_tokens: int

    def __str__(self) -> str:
        return f"n {self.min_n}-{self.max_n}, K {self.num_tokens}"


NGRAM_RECOMMENDED: Final = NgramSetting(min_n=2, max_n=4, num_tokens=5)
"""The example of vLLM's documentation (lookup up to 4, 5 tokens)."""

_NGRAM_SETTINGS: Final = (
    NGRAM_RECOMMENDED,
    *(
        NgramSetting(min_n=low, max_n=high, num_tokens=tokens)
        for low, high in ((2, 4), (3, 5), (5, 5), (8, 8))
        for tokens in (3, 5, 10, 32)
        if (low, high, tokens) != (2, 4, 5)
    ),
)


class NgramRival:
    """vLLM's rule: the longest n-gram that ends the text, its earliest occurrence, what followed it."""

    method = "ngram"
    by_block: Mapping[str, list[int]] = MappingProxyType({})

    def __init__(self, settings: Sequence[NgramSetting] = _NGRAM_SETTINGS) -> None:
        self._settings = tuple(settings)
        self._text = np.empty(0, dtype=np.int32)
        self._size = 0

    @property
    def settings(self) -> Sequence[str]:
        """Name of every setting."""
        return [str(setting) for setting in self._settings]

    def start(self, req_id: str, session: str, prompt_ids: Tokens) -> None:  # noqa: ARG002 - protocol
        """Forget everything: the rule sees one request only."""
        self._size = len(prompt_ids)
        if self._size > len(self._text):
            self._text = np.empty(self._size * 2, dtype=np.int32)
        self._text[: self._size] = prompt_ids

    def extend(self, token_ids: Tokens) -> None:
        """Append output tokens."""
        end = self._size + len(token_ids)
        if end > len(self._text):
            self._text = np.concatenate((self._text, np.empty(end, dtype=np.int32)))
        self._text[self._size : end] = token_ids
        self._size = end

    def draft(self, setting: int) -> Candidate:
        """Copy what followed the n-gram."""
        chosen = self._settings[setting]
        start = ngram_continuation(self._text[: self._size], chosen.min_n, chosen.max_n)
        end = min(start + chosen.num_tokens, self._size)
        return Candidate(token_ids=self._text[start:end].copy())

    def finish(self) -> None:
        """Nothing is kept between requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixSetting:
    """vLLM's `suffix_decoding_max_spec_factor`, `..._min_token_prob` and `num_speculative_tokens`."""

    factor: float
    min_prob: float
    num_tokens: int = 32

    def __str__(self) -> str:
        return f"factor {self.factor:g}, p {self.min_prob:g}"


SUFFIX_RECOMMENDED: Final = SuffixSetting(factor=1.0, min_prob=0.1)
"""vLLM's defaults."""

_SUFFIX_SETTINGS: Final = tuple(
    SuffixSetting(factor=factor, min_prob=prob) for factor in (1.0, 2.0, 4.0) for prob in (0.1, 0.3, 0.5, 0.7)
)

_SUFFIX_DEPTH: Final = 24
"""vLLM's default of `suffix_decoding_max_tree_depth`."""

_SUFFIX_CACHED: Final = 10_000
"""vLLM's default of `suffix_decoding_max_cached_requests`."""


class _SuffixDraft(Protocol):
    token_ids: list[int]


class _SuffixCache(Protocol):
    """The part of arctic_inference's SuffixDecodingCache that vLLM uses."""

    def start_request(self, req_id: str, prompt_token_ids: Tokens) -> None: ...

    def stop_request(self, req_id: str) -> None: ...

    def add_active_response(self, req_id: str, token_ids: Tokens) -> None: ...

    def speculate(
        self,
        req_id: str,
        context: Tokens,
        *,
        max_spec_tokens: int,
        max_spec_factor: float,
        min_token_prob: float,
    ) -> _SuffixDraft: ...


class SuffixRival:
    """Suffix decoding (arXiv 2411.04975) by its own package, called as vLLM's proposer calls it."""

    method = "suffix"
    by_block: Mapping[str, list[int]] = MappingProxyType({})

    def __init__(self, settings: Sequence[SuffixSetting] = _SUFFIX_SETTINGS) -> None:
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError as error:
            raise MissingDependencyError("arctic_inference", "bench") from error
        self._settings = tuple(settings)
        self._cache = cast(
            "_SuffixCache",
            SuffixDecodingCache(max_tree_depth=_SUFFIX_DEPTH, max_cached_requests=_SUFFIX_CACHED),
        )
        self._req_id = ""
        self._context = np.empty(0, dtype=np.int32)

    @property
    def settings(self) -> Sequence[str]:
        """Name of every setting."""
        return [str(setting) for setting in self._settings]

    def start(self, req_id: str, session: str, prompt_ids: Tokens) -> None:  # noqa: ARG002 - protocol
        """Build the tree of the prompt."""
        self._req_id = req_id
        self._cache.start_request(req_id, np.ascontiguousarray(prompt_ids))
        self._context = prompt_ids[-_SUFFIX_DEPTH:]

    def extend(self, token_ids: Tokens) -> None:
        """Add output tokens to the tree of the request and to the global one."""
        self._cache.add_active_response(self._req_id, np.ascontiguousarray(token_ids))
        self._context = np.concatenate((self._context, token_ids))[-_SUFFIX_DEPTH:]

    def draft(self, setting: int) -> Candidate:
        """Best path of both trees."""
        chosen = self._settings[setting]
        draft = self._cache.speculate(
            self._req_id,
            self._context,
            max_spec_tokens=chosen.num_tokens,
            max_spec_factor=chosen.factor,
            min_token_prob=chosen.min_prob,
        )
        return Candidate(token_ids=np.asarray(draft.token_ids, dtype=np.int32))

    def finish(self) -> None:
        """Drop the prompt; the output stays in the global tree."""
        self._cache.stop_request(self._req_id)


def _compiled(function: _F) -> _F:
    """The function through numba, with its signature kept for the type checker."""
    return cast("_F", njit(cache=True)(function))


@_compiled
def ngram_continuation(text: Tokens, min_n: int, max_n: int) -> int:
    """Where the text continues after the earliest occurrence of the longest n-gram that ends it.

    len(text) where no n-gram of at least `min_n` tokens, `max_n` at most, occurred before.
    """
    size = len(text)
    best, place = 0, size
    for end in range(1, size):
        length = 0
        while length < max_n and length < end and text[end - 1 - length] == text[size - 1 - length]:
            length += 1
        if length > best:
            best, place = length, end
            if best == max_n:
                break
    return place if best >= min_n else size
