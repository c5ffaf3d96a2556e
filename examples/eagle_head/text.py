"""What the head learns from: recorded agent runs as token windows, with a mark at every generated token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentspec_runtime.bench.tokens import TokenRequest, TokenTrajectory

WINDOW = 768
"""Tokens per window. Of longer runs each window repeats the last `CONTEXT` tokens of the one before."""
CONTEXT = 128


@dataclass(frozen=True)
class Window:
    """`ids` int64[N], N <= WINDOW; `generated` bool[N]: tokens that the agent's model wrote."""

    ids: npt.NDArray[np.int64]
    generated: npt.NDArray[np.bool_]


def windows(trajectories: Iterable[TokenTrajectory]) -> Iterator[Window]:
    """The generated tokens of the runs, with text before them; pieces with fewer than eight are left out."""
    for trajectory in trajectories:
        for ids, generated in _texts(trajectory.requests):
            yield from _cut(ids, generated)


def _texts(
    requests: Iterable[TokenRequest],
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    """Prompt and answer of each call; calls that extend the one before are one text."""
    ids, generated = np.zeros(0, np.int64), np.zeros(0, np.bool_)
    for request in requests:
        prompt, output = np.asarray(request.prompt_ids, np.int64), np.asarray(request.output_ids, np.int64)
        n = len(ids)
        if n and not (len(prompt) >= n and np.array_equal(prompt[:n], ids)):
            yield ids, generated
            generated, n = np.zeros(0, np.bool_), 0
        ids = np.concatenate([prompt, output])
        marks = np.zeros(len(ids), np.bool_)
        marks[:n] = generated[:n]
        marks[len(prompt) :] = True
        generated = marks
    if len(ids):
        yield ids, generated


def _cut(ids: npt.NDArray[np.int64], generated: npt.NDArray[np.bool_]) -> Iterator[Window]:
    start = 0
    while start < len(ids):
        part, marks = ids[start : start + WINDOW], generated[start : start + WINDOW].copy()
        if start:
            marks[:CONTEXT] = False  # they counted in the window before
        if marks.sum() >= 8:
            yield Window(part, marks)
        if start + WINDOW >= len(ids):
            return
        start += WINDOW - CONTEXT
