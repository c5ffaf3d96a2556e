"""How far copying could go: the oracles that a drafter is measured against.

All of them replay the true output, first token without drafts (a prompt's last step yields it), and cut
every draft at the true mismatch, so nothing is ever rejected:

    O1  our own candidate, cut where it goes wrong: what perfect lengths would give;
    O2  the best occurrence of the last two tokens in any text that we may draft from: perfect choice;
        O2/1 needs the last token only, and is what bounds a drafter that looks at one;
    O3  the longest copy from anywhere in that text, no match of the last tokens needed: perfect addressing;
    LZ  O3 without a length limit: the fewest steps that any copying can need (greedy longest match is
        optimal in the number of steps).

Texts that may be drafted from: the request, earlier requests of the same trajectory, and the outputs of
earlier trajectories. Copies may overlap what they produce, as in LZ77. O1 lives in `rivals.py`, because it
needs the drafter; the rest is here and exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agentspec_runtime.bench.chat_tokens import Tokens
from agentspec_runtime.bench.copies import longest_previous_factor
from agentspec_runtime.bench.tokens import TokenTrajectory

__all__ = ["CopyLengths", "copy_lengths", "oracle_steps"]

Ints = NDArray[np.int64]

_ANCHOR: Final = 2
"""Tokens that must match before a copy in O2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLengths:
    """For every output token of one request: how many tokens from there could be copied.

    `addressed` needs the last two tokens to match (O2), `loosely` the last one, `anywhere` none (O3). All
    end at the end of the output.
    """

    addressed: Ints
    loosely: Ints
    anywhere: Ints


def copy_lengths(trajectories: Sequence[TokenTrajectory]) -> Iterator[list[CopyLengths]]:
    """Copy lengths of every request, trajectory by trajectory, in their order."""
    requests = [request for trajectory in trajectories for request in trajectory.requests]
    # The two tokens before an output stand in front of it, so that O2 can find its first tokens too.
    documents = [(request.prompt_ids[-_ANCHOR:], request.output_ids) for request in requests]
    corpus, corpus_starts = _join([np.concatenate(parts) for parts in documents])
    corpus_factors = longest_previous_factor(corpus)
    number = 0
    for trajectory in trajectories:
        text, starts = _trajectory_text(trajectory)
        factors = longest_previous_factor(text)
        lengths = []
        for request, start in zip(trajectory.requests, starts, strict=True):
            first = corpus_starts[number] + len(documents[number][0])
            lengths.append(_lengths(len(request.output_ids), ((factors, start), (corpus_factors, first))))
            number += 1
        yield lengths


def oracle_steps(copies: Ints, limit: int | None = None) -> tuple[int, int]:
    """(steps, accepted tokens) of an oracle that always copies as far as it can, `limit` tokens at most."""
    size = len(copies)
    position, steps, accepted = 1, 1, 0
    while position < size:
        length = int(copies[position])
        if limit is not None:
            length = min(length, limit)
        accepted += length
        position += length + 1
        steps += 1
    return steps, accepted


def _lengths(size: int, sources: Sequence[tuple[Ints, int]]) -> CopyLengths:
    """Best over the sources, each given as the factors of a text and where the output starts in it."""
    left = np.arange(size, 0, -1)
    best = [np.zeros(size, dtype=np.int64) for _ in range(_ANCHOR + 1)]
    for factors, start in sources:
        for anchor, lengths in enumerate(best):
            # An occurrence that shares the tokens before as well: theirs is the longest match from there.
            skip = max(0, anchor - start)
            matched = factors[start + skip - anchor : start + size - anchor] - anchor
            lengths[skip:] = np.maximum(lengths[skip:], matched)
    anywhere, loosely, addressed = (np.minimum(lengths, left) for lengths in best)
    return CopyLengths(addressed=addressed, loosely=loosely, anywhere=anywhere)


def _join(documents: Sequence[Tokens]) -> tuple[Ints, list[int]]:
    """One text of many, with a separator that occurs once after each; and where each starts."""
    starts: list[int] = []
    parts: list[Ints] = []
    length = 0
    for number, document in enumerate(documents):
        starts.append(length)
        parts += [document.astype(np.int64), np.array([-1 - number], dtype=np.int64)]
        length += len(document) + 1
    return (np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)), starts


def _trajectory_text(trajectory: TokenTrajectory) -> tuple[Ints, list[int]]:
    """Everything that one agent run read and wrote, in order, and where each output starts.

    A prompt that continues the request before it adds only its new part, so that a growing chat is read
    once; any other prompt is added as a document of its own.
    """
    parts: list[Ints] = []
    starts: list[int] = []
    length = 0
    before = np.empty(0, dtype=np.int32)
    for number, request in enumerate(trajectory.requests):
        prompt = request.prompt_ids
        known = len(before)
        if not (known <= len(prompt) and np.array_equal(prompt[:known], before)):
            parts.append(np.array([-1 - number], dtype=np.int64))
            length += 1
            known = 0
        parts += [prompt[known:].astype(np.int64), request.output_ids.astype(np.int64)]
        length += len(prompt) - known
        starts.append(length)
        length += len(request.output_ids)
        before = np.concatenate((prompt, request.output_ids))
    return np.concatenate(parts), starts
