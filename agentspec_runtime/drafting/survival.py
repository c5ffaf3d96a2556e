"""How likely a candidate token is to be accepted: online context mixing, one model per namespace.

Each candidate token is described by a handful of context keys (how long the match is, how the
occurrences vote, which tokens stand around it, how the request has fared). Each key leads to an
adaptive acceptance rate; a small logistic mixer turns the rates into one probability. This is the
scheme of the PAQ family of compressors (Mahoney, "Adaptive Weighing of Context Models for Lossless
Data Compression", 2005) with acceptance in place of bits.

It is learned online from verdicts, and not only from drafted tokens: the token that the target model
samples after a draft is a free label for the slot behind the draft ("shadow" slot), so the estimates
stay alive, and uncensored at depth one, while nothing is drafted.

The survival of a slot is the product of the probabilities up to it, put right by what such products
have turned out to be worth (adaptive calibration, PAQ's "APM"): choosing the more probable of two
tokens flatters the chosen one, and errors along a draft are correlated. Unlike acceptance, survival is
observed for every drafted slot, since behind a miss nothing survives. A retrieved draft is a function of
the prefix alone, so cutting it by these numbers does not bias sampling (docs/adr/0003).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from numba import int64, njit, uint32

from agentspec_runtime.drafting.arrays import ModelArrays
from agentspec_runtime.drafting.draft import Float32Array

__all__ = [
    "NUM_CELLS",
    "NUM_KEYS",
    "NUM_SELECTORS",
    "TABLE_SIZE",
    "SurvivalModels",
    "calibrate",
    "depth_bucket",
    "learn",
    "learn_calibration",
    "mix",
    "slot_keys",
]

NUM_KEYS: Final = 7
TABLE_SIZE: Final = 1 << 16
NUM_SELECTORS: Final = 7 * 2 * 2 * 2
"""Weight sets: by depth bucket, source (request or corpus), rank of the token, greedy or sampled."""

NUM_CELLS: Final = 7 * 2
"""Calibration curves: by depth bucket and source."""
_POINTS: Final = 21
"""Support points of a calibration curve, evenly spaced in logits over [-5, 5]."""
_LOGIT_RANGE: Final = 5.0
_CALIBRATION_START: Final = 24.0
"""Pseudo-observations that the identity counts for at each point."""

_COUNT_LIMIT: Final = 255.0
"""A rate forgets with a horizon of 255 observations: long enough for 2 % noise, short enough to follow
a change of workload."""
_CONFIDENCE: Final = 1.5
_FIRST_RATE: Final = 1.6
"""The first observation moves a fresh rate from 1/2 by 1/1.6, the Krichevsky-Trofimov-like start."""
_LEARNING_RATE: Final = 0.02
_BIAS_RATE: Final = 0.006
_FIRST_WEIGHT: Final = 0.25
"""Seven inputs that say much the same thing: 0.25 each starts a little bolder than their mean."""
_MAX_WEIGHT: Final = 4.0

_SHIPPED_PRIOR: Final = Path(__file__).with_name("prior.npz")
_PRIOR_COUNT_LIMIT: Final = 24.0
"""Shipped rates count as at most so many observations, so that own traffic takes over soon."""


class SurvivalModels:
    """Rates, counts and mixer weights of all namespaces in flat arrays, indexed by model number.

    `rates` float32[N, NUM_KEYS, TABLE_SIZE]; `counts` likewise; `weights`
    float32[N, NUM_SELECTORS, NUM_KEYS + 1], the last one being the bias; `curves`
    float32[N, NUM_CELLS, 2, points], survival rates and their counts. Pages are touched as used.
    """

    def __init__(self, num_models: int, *, use_prior: bool = True) -> None:
        # Rates are stored as an offset from 1/2, so that untouched (zero) pages mean "unknown".
        self.rates: Float32Array = np.zeros((num_models, NUM_KEYS, TABLE_SIZE), np.float32)
        self.counts: Float32Array = np.zeros((num_models, NUM_KEYS, TABLE_SIZE), np.float32)
        self.weights: Float32Array = np.zeros((num_models, NUM_SELECTORS, NUM_KEYS + 1), np.float32)
        self.curves: Float32Array = np.zeros((num_models, NUM_CELLS, 2, _POINTS), np.float32)
        self._prior = _load_prior(_SHIPPED_PRIOR) if use_prior else None
        for model in range(num_models):
            self._reset_weights(model)

        self.arrays = ModelArrays(self.rates, self.counts, self.weights, self.curves)

    @property
    def bytes_per_model(self) -> int:
        """Bytes of one namespace's model when all of it has been touched."""
        return sum(int(part[0].nbytes) for part in self.arrays)

    def reset(self, model: int) -> None:
        """Forget everything that was learned in this namespace; start from the shipped prior."""
        self.rates[model] = 0.0
        self.counts[model] = 0.0
        self._reset_weights(model)
        self._apply_prior(model)

    def _reset_weights(self, model: int) -> None:
        if self._prior is not None:
            self.weights[model] = self._prior["weights"]
            self.curves[model] = self._prior["curves"]
        else:
            logits = np.linspace(-_LOGIT_RANGE, _LOGIT_RANGE, _POINTS)
            self.curves[model, :, 0] = 1.0 / (1.0 + np.exp(-logits))
            self.curves[model, :, 1] = _CALIBRATION_START
            self.weights[model] = _FIRST_WEIGHT
            self.weights[model, :, NUM_KEYS] = 0.0

    def _apply_prior(self, model: int) -> None:
        if self._prior is not None:
            keys = self._prior["keys"]
            self.rates[model, keys[:, 0], keys[:, 1]] = self._prior["rates"]
            self.counts[model, keys[:, 0], keys[:, 1]] = self._prior["counts"]

    def export_prior(self, model: int, path: Path, tables: tuple[int, ...]) -> None:
        """Write what a namespace has learned as a prior: the weights, and the rates of `tables`.

        Only tables whose keys hold no token ids make sense for another tokenizer.
        """
        keys = np.argwhere(self.counts[model] > 1.0)
        keys = keys[np.isin(keys[:, 0], tables)]
        counts = np.minimum(self.counts[model, keys[:, 0], keys[:, 1]], _PRIOR_COUNT_LIMIT)
        np.savez_compressed(
            path,
            keys=keys.astype(np.int32),
            rates=self.rates[model, keys[:, 0], keys[:, 1]].astype(np.float16),
            counts=counts.astype(np.uint8),
            weights=self.weights[model].astype(np.float16),
            curves=np.minimum(self.curves[model], _CALIBRATION_START).astype(np.float16),
        )


def _load_prior(path: Path) -> dict[str, npt.NDArray[np.float32]] | None:
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as data:
        return {name: data[name] for name in ("keys", "rates", "counts", "weights", "curves")}


@njit(cache=True, inline="always")
def _hash_key(x):
    y = uint32(x ^ (x >> 32))
    y = uint32((y ^ (y >> uint32(16))) * uint32(0x7FEB352D))
    y = uint32((y ^ (y >> uint32(15))) * uint32(0x846CA68B))
    return int64(y ^ (y >> uint32(16))) & (TABLE_SIZE - 1)


@njit(cache=True, inline="always")
def _match_bucket(m):
    if m <= 4:
        return m
    if m <= 6:
        return 5
    if m <= 9:
        return 6
    if m <= 15:
        return 7
    if m <= 24:
        return 8
    if m < 48:
        return 9
    return 10


@njit(cache=True, inline="always")
def _log_bucket(n):
    """0, 1, 2, 3, 4-7, 8-15, 16-31, 32-63, 64 and more."""
    if n < 4:
        return n
    if n < 8:
        return 4
    if n < 16:
        return 5
    if n < 32:
        return 6
    if n < 64:
        return 7
    return 8


@njit(cache=True, inline="always")
def depth_bucket(d):
    """Positions 0, 1, 2, 3, 4-7, 8-15 and beyond."""
    return min(_log_bucket(d), 6)


@njit(cache=True)
def slot_keys(
    keys, x, token, prev, prev2, match, rival, share, agreeing, source, depth, run, kind, sampled, classes
):
    """Write the table keys of one candidate token into `keys[x]`.

    token, prev, prev2: the candidate and the two tokens before it. match: longest common context among
    the occurrences that propose it; rival: the same for those that propose something else (0 = none).
    share: its part of the votes; agreeing: how many occurrences propose it. source: 0 own text or
    session, 1 corpus. depth: position in the draft. run: tokens since this request's last miss.
    kind: block kind; sampled: temperature bucket, 0 = greedy. classes: token class by id.
    """
    m = int64(_match_bucket(match))
    votes = int64(8) if share > 0.9999 else int64(share * 7.999)
    many = int64(min(_log_bucket(agreeing), 6))
    far = int64(depth_bucket(depth))
    coarse = int64(0 if match <= 2 else (1 if match < 8 else (2 if match < 24 else 3)))
    clear = int64(1 if share > 0.99 else 0)
    most = int64(1 if share > 0.9 else 0)
    # Sampled and greedy requests meet different rates everywhere; the tag keeps them apart.
    tag = int64(sampled)
    keys[x, 0] = _hash_key((((int64(token) * 4 + coarse) * 2 + clear) * 4 + tag) * 9 + 1)
    keys[x, 1] = _hash_key(((((int64(kind) * 9 + _log_bucket(run)) * 11 + m) * 7 + far) * 4 + tag) * 9 + 2)
    keys[x, 2] = _hash_key(
        (((((int64(_match_bucket(rival)) * 7 + many) * 9 + votes) * 2 + source) * 11 + m) * 4 + tag) * 9 + 3
    )
    keys[x, 3] = _hash_key((((int64(prev) * 4 + coarse) * 2 + clear) * 4 + tag) * 9 + 4)
    pair = int64(classes[token]) * 16 + classes[prev]
    keys[x, 4] = _hash_key(((pair * 11 + m) * 4 + tag) * 9 + 5)
    keys[x, 5] = _hash_key((((int64(prev) * 1000003 + token) * 2 + most) * 4 + tag) * 9 + 7)
    keys[x, 6] = _hash_key(
        ((((int64(prev2) * 999983 + prev) * 1000003 + token) * 2 + most) * 4 + tag) * 9 + 8
    )
    greedy = 0 if sampled == 0 else 1
    return ((far * 2 + source) * 2) * 2 + greedy


@njit(cache=True)
def mix(keys, inputs, x, selector, rates, counts, weights):
    """Probability that the candidate described by `keys[x]` is accepted; its inputs go to `inputs[x]`."""
    z = weights[selector, NUM_KEYS]
    for k in range(NUM_KEYS):
        key = keys[x, k]
        p = 0.5 + rates[k, key]
        p = min(max(p, 0.0005), 0.9995)
        c = counts[k, key]
        v = math.log(p / (1.0 - p)) * (c / (c + _CONFIDENCE))
        inputs[x, k] = v
        z += weights[selector, k] * v
    return 1.0 / (1.0 + math.exp(-z))


@njit(cache=True)
def learn(keys, inputs, x, selector, predicted, hit, rates, counts, weights):
    """Take in one labelled candidate: was it the token that came?"""
    y = 1.0 if hit else 0.0
    error = y - predicted
    for k in range(NUM_KEYS):
        key = keys[x, k]
        w = weights[selector, k] + _LEARNING_RATE * error * inputs[x, k]
        weights[selector, k] = min(max(w, -_MAX_WEIGHT), _MAX_WEIGHT)
        c = counts[k, key]
        rates[k, key] += (y - 0.5 - rates[k, key]) / (c + _FIRST_RATE)
        if c < _COUNT_LIMIT:
            counts[k, key] = c + 1.0
    b = weights[selector, NUM_KEYS] + _BIAS_RATE * error
    weights[selector, NUM_KEYS] = min(max(b, -_MAX_WEIGHT), _MAX_WEIGHT)


@njit(cache=True, inline="always")
def _place(raw):
    """Support point below a raw survival, and how far it is to the next one, 0..1."""
    p = min(max(raw, 1e-6), 1.0 - 1e-6)
    z = math.log(p / (1.0 - p))
    z = min(max(z, -_LOGIT_RANGE), _LOGIT_RANGE)
    at = (z + _LOGIT_RANGE) * ((_POINTS - 1) / (2.0 * _LOGIT_RANGE))
    i = min(int64(at), _POINTS - 2)
    return i, at - i


@njit(cache=True)
def calibrate(curve, raw):
    """What a product of probabilities `raw` has turned out to be worth. `curve` float32[2, points]."""
    i, far = _place(raw)
    return curve[0, i] * (1.0 - far) + curve[0, i + 1] * far


@njit(cache=True)
def learn_calibration(curve, raw, survived):
    """Take in whether a slot with this product survived."""
    i, far = _place(raw)
    y = 1.0 if survived else 0.0
    for j in range(2):
        part = far if j == 1 else 1.0 - far
        n = curve[1, i + j]
        curve[0, i + j] += part * (y - curve[0, i + j]) / (n + 1.0)
        if n < 4.0 * _COUNT_LIMIT:
            curve[1, i + j] = n + part
