"""The flat arrays that compiled kernels work on, grouped so that a call names what it touches.

N rows (running requests), S = (K + 1) * RANKS scored candidates per draft of at most K tokens, C slots
of text, V ids, M models.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentspec_runtime.drafting.draft import Float32Array, Int32Array, Int64Array

__all__ = ["RANKS", "ModelArrays", "SlotArrays", "TextArrays", "VocabularyArrays"]

RANKS: Final = 2
"""Best-voted tokens that are scored per depth. A third one brought nothing measurable."""


class TextArrays(NamedTuple):
    """`slab.Slab`: `tokens` int32[C], `links` and `heads` int32[orders, C]."""

    tokens: Int32Array
    links: Int32Array
    heads: Int32Array


class ModelArrays(NamedTuple):
    """`survival.SurvivalModels`: `rates` and `counts` float32[M, keys, table], `weights` float32[M,
    selectors, keys + 1], `curves` float32[M, cells, 2, points].
    """

    rates: Float32Array
    counts: Float32Array
    weights: Float32Array
    curves: Float32Array


class SlotArrays(NamedTuple):
    """What the verdict on a draft will be learned from.

    Per candidate: `key` int64[N, S, keys], `input` float32[N, S, keys], `p` float32[N, S],
    `selector` and `token` int64[N, S]. Per depth: `ranks` (candidates scored), `cell` (calibration
    curve) int64[N, K + 1], `raw` (product of probabilities) float32[N, K + 1], `draft` int32[N, K + 1].
    Per row: `num`, depths scored, int64[N].
    """

    key: Int64Array
    input: Float32Array
    p: Float32Array
    selector: Int64Array
    token: Int64Array
    ranks: Int64Array
    cell: Int64Array
    raw: Float32Array
    draft: Int32Array
    num: Int64Array


class VocabularyArrays(NamedTuple):
    """`vocabulary.TokenTable`: `classes` int64[V], `text` uint8[B], `offsets` int64[V + 1]."""

    classes: Int64Array
    text: npt.NDArray[np.uint8]
    offsets: Int64Array
