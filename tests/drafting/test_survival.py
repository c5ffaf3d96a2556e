"""The survival model: probabilities that move towards the truth and mean what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from drafting_support import begin, draft_one, make_drafter, settle
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec_runtime.drafting import Drafter, DraftScope, survival
from agentspec_runtime.drafting.survival import (
    NUM_CELLS,
    NUM_KEYS,
    NUM_SELECTORS,
    TABLE_SIZE,
    SurvivalModels,
    calibrate,
    learn,
    learn_calibration,
    mix,
    slot_keys,
)

CLASSES = np.zeros(1000, np.int64)


class Slot:
    """One candidate token, scored and labelled through the kernels."""

    def __init__(self, models: SurvivalModels, model: int = 0) -> None:
        self._arrays = (models.rates[model], models.counts[model], models.weights[model])
        self._keys = np.zeros((1, NUM_KEYS), np.int64)
        self._inputs = np.zeros((1, NUM_KEYS), np.float32)

    def predict(
        self, token: int = 5, match: int = 6, depth: int = 0, sampled: int = 0, source: int = 0
    ) -> float:
        self._selector = slot_keys(
            self._keys, 0, token, 3, 4, match, 0, 1.0, 1, source, depth, 10, 0, sampled, CLASSES
        )
        self._p = mix(self._keys, self._inputs, 0, self._selector, *self._arrays)
        return float(self._p)

    def label(self, hit: bool) -> None:
        learn(self._keys, self._inputs, 0, self._selector, self._p, hit, *self._arrays)


@pytest.mark.parametrize("use_prior", [True, False])
@pytest.mark.parametrize("truth", [0.02, 0.3, 0.7, 0.98])
def test_learning_moves_towards_the_truth(use_prior: bool, truth: float) -> None:
    models = SurvivalModels(1, use_prior=use_prior)
    models.reset(0)
    slot, random = Slot(models), np.random.default_rng(0)
    distance = abs(slot.predict() - truth)
    recent: list[float] = []
    for i in range(1500):
        p = slot.predict()
        slot.label(bool(random.random() < truth))
        if i >= 1000:
            recent.append(p)
    assert np.mean(recent) == pytest.approx(truth, abs=0.06)
    assert abs(np.mean(recent) - truth) <= distance + 0.02


def test_the_truth_may_change() -> None:
    """A workload that turns is followed within some hundred observations."""
    models = SurvivalModels(1, use_prior=False)
    slot = Slot(models)
    found = []
    for hit, count in ((True, 2000), (False, 300), (False, 300)):
        for _ in range(count):
            slot.predict()
            slot.label(hit)
        found.append(slot.predict())
    assert found[0] > 0.95
    assert found[1] < 0.4
    assert found[2] < 0.15


def test_one_label_teaches_at_once() -> None:
    models = SurvivalModels(1, use_prior=False)
    slot = Slot(models)
    before = slot.predict()
    slot.label(True)
    assert slot.predict() > before


def test_a_token_that_fails_does_not_condemn_others() -> None:
    models = SurvivalModels(1, use_prior=False)
    slot, random = Slot(models), np.random.default_rng(0)
    for _ in range(600):
        bad = bool(random.random() < 0.5)
        slot.predict(token=5 if bad else 6)
        slot.label(not bad)
    assert slot.predict(token=5) < 0.3
    assert slot.predict(token=6) > 0.7


def test_greedy_and_sampled_requests_are_told_apart() -> None:
    models = SurvivalModels(1, use_prior=False)
    slot, random = Slot(models), np.random.default_rng(0)
    for _ in range(600):
        sampled = int(random.integers(0, 2)) * 3
        slot.predict(sampled=sampled)
        slot.label(sampled == 0)
    assert slot.predict(sampled=0) > 0.8
    assert slot.predict(sampled=3) < 0.2


labels = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 999),
        st.integers(1, 48),
        st.integers(0, 40),
        st.integers(0, 3),
        st.integers(0, 1),
    ),
    max_size=200,
)


@given(labels)
@settings(max_examples=50, deadline=None)
def test_probabilities_stay_between_0_and_1(sequence: list[tuple[bool, int, int, int, int, int]]) -> None:
    models = SurvivalModels(1, use_prior=False)
    slot = Slot(models)
    for hit, token, match, depth, sampled, source in sequence:
        p = slot.predict(token, match, depth, sampled, source)
        assert 0.0 < p < 1.0
        slot.label(hit)
    assert np.isfinite(models.weights).all()
    assert (np.abs(models.rates) <= 0.5 + 1e-6).all()


@given(
    depth=st.integers(0, 1024),
    match=st.integers(1, 48),
    rival=st.integers(0, 48),
    share=st.floats(0.0, 1.0),
    agreeing=st.integers(1, 200),
    run=st.integers(0, 10**6),
    source=st.integers(0, 1),
    kind=st.integers(0, 3),
    sampled=st.integers(0, 3),
)
@settings(deadline=None)
def test_keys_and_selectors_are_in_range(
    depth: int,
    match: int,
    rival: int,
    share: float,
    agreeing: int,
    run: int,
    source: int,
    kind: int,
    sampled: int,
) -> None:
    """Whatever the context, the kernels index inside their tables (they do not check)."""
    keys = np.full((1, NUM_KEYS), -1, np.int64)
    selector = slot_keys(
        keys, 0, 999, 998, 997, match, rival, share, agreeing, source, depth, run, kind, sampled, CLASSES
    )
    assert ((keys >= 0) & (keys < TABLE_SIZE)).all()
    assert selector >= 0
    assert selector + 2 < NUM_SELECTORS, "the second-best token uses the set two further on"


# Calibration of products


def test_an_untaught_curve_is_the_identity() -> None:
    models = SurvivalModels(1, use_prior=False)
    for raw in (0.02, 0.1, 0.5, 0.9, 0.98):
        assert calibrate(models.curves[0, 0], raw) == pytest.approx(raw, abs=0.02)


@given(raws=st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=100), ask=st.floats(0.0, 1.0))
@settings(max_examples=50, deadline=None)
def test_a_curve_stays_a_probability(raws: list[tuple[float, bool]], ask: float) -> None:
    models = SurvivalModels(1, use_prior=False)
    for raw, survived in raws:
        learn_calibration(models.curves[0, 0], raw, survived)
    assert 0.0 <= calibrate(models.curves[0, 0], ask) <= 1.0


def test_a_curve_learns_that_products_flatter() -> None:
    """Products of 0.8 that survive half the time come to mean 0.5, products of 0.2 are left alone."""
    models, random = SurvivalModels(1, use_prior=False), np.random.default_rng(0)
    curve = models.curves[0, 0]
    for _ in range(1000):
        learn_calibration(curve, 0.8, bool(random.random() < 0.5))
    assert calibrate(curve, 0.8) == pytest.approx(0.5, abs=0.08)
    assert calibrate(curve, 0.2) == pytest.approx(0.2, abs=0.02)
    assert calibrate(models.curves[0, NUM_CELLS - 1], 0.8) == pytest.approx(0.8, abs=0.02)


# The model of a namespace


def test_reset_forgets_everything() -> None:
    models = SurvivalModels(2, use_prior=False)
    untouched = Slot(models, 1).predict()
    slot = Slot(models, 0)
    for _ in range(50):
        slot.predict()
        slot.label(True)
    learn_calibration(models.curves[0, 0], 0.5, True)
    assert slot.predict() > untouched
    models.reset(0)
    assert slot.predict() == untouched
    assert (models.curves[0] == models.curves[1]).all()


def test_what_is_exported_comes_back_as_the_prior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tables exported: the same predictions after a reset, up to the precision of the file."""
    models, random = SurvivalModels(1, use_prior=False), np.random.default_rng(0)
    slot = Slot(models)
    for _ in range(500):
        token = int(random.integers(0, 20))
        slot.predict(token, match=int(random.integers(1, 49)))
        slot.label(token < 15)
    path = tmp_path / "prior.npz"
    models.export_prior(0, path, tables=tuple(range(NUM_KEYS)))
    monkeypatch.setattr(survival, "_SHIPPED_PRIOR", path)
    again = SurvivalModels(1)
    again.reset(0)
    for token in (3, 17):
        for match in (2, 20):
            expected = slot.predict(token, match)
            assert Slot(again).predict(token, match) == pytest.approx(expected, abs=0.06)
    assert again.counts.max() <= 24, "own traffic takes over soon"


def test_token_tables_can_be_left_out_of_a_prior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tokenizer must not meet rates that were learned for other tokens."""
    models = SurvivalModels(1, use_prior=False)
    slot = Slot(models)
    for _ in range(100):
        slot.predict()
        slot.label(True)
    path = tmp_path / "prior.npz"
    models.export_prior(0, path, tables=(1, 2))
    monkeypatch.setattr(survival, "_SHIPPED_PRIOR", path)
    again = SurvivalModels(1)
    again.reset(0)
    assert {int(k) for k in np.flatnonzero(again.counts[0].any(axis=1))} == {1, 2}


def test_the_shipped_prior_holds_no_token_ids() -> None:
    """Tables 0, 3, 5 and 6 are keyed by token ids, which mean something else in every tokenizer."""
    models = SurvivalModels(1)
    models.reset(0)
    filled = {int(k) for k in np.flatnonzero(models.counts[0].any(axis=1))}
    assert filled
    assert not filled & {0, 3, 5, 6}


# End to end: what a drafter says about its drafts


def calibration(drafter: Drafter, seed: int, *, noise: float, steps: int, skip: int) -> tuple[float, int]:
    """Expected calibration error over ten bins, on a source that repeats itself with errors.

    Phrases come again and again, each token replaced with probability `noise`. The slots that a draft
    holds, verified or not, count with whether all of them up to there were right.
    """
    random = np.random.default_rng(seed)
    phrases = [random.integers(0, 60, 12).tolist() for _ in range(8)]
    stream: list[int] = []
    while len(stream) < steps * 10:
        phrase = phrases[int(random.integers(8))]
        stream += [int(random.integers(60)) if random.random() < noise else t for t in phrase]
    scope = DraftScope(namespace="calibration", reach="request")
    begin(drafter, "r", stream[:50], scope)
    at, predicted, outcome = 50, [], []
    for step in range(steps):
        draft = draft_one(drafter, "r", 8, 0.05)
        right = True
        for d, p in enumerate(draft.survival.tolist()):
            right = right and int(draft.token_ids[d]) == stream[at + d]
            if step >= skip:
                predicted.append(p)
                outcome.append(right)
        n = 0
        while n < len(draft) and int(draft.token_ids[n]) == stream[at + n]:
            n += 1
        drafter.observe("r", stream[at : at + n + 1], len(draft))
        settle(drafter)
        at += n + 1
    p, y = np.array(predicted), np.array(outcome, np.float64)
    bins = np.minimum((p * 10).astype(int), 9)
    error = sum(
        abs(p[bins == b].mean() - y[bins == b].mean()) * (bins == b).mean()
        for b in range(10)
        if (bins == b).any()
    )
    return float(error), p.size


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("use_prior", [True, False])
def test_survival_is_calibrated(noise: float, use_prior: bool) -> None:
    """After 300 steps, ECE below 5 % on a source whose error rate it was never told."""
    drafter = make_drafter(use_prior=use_prior, memory_mb=16)
    error, slots = calibration(drafter, 1, noise=noise, steps=1500, skip=300)
    assert slots > 1000
    assert error < 0.05


def test_estimates_stay_alive_while_nothing_is_drafted() -> None:
    """Only shadow slots are scored (cap 0), and yet the drafter knows how good its drafts would be."""
    drafter = make_drafter(use_prior=False)
    phrase = [1, 2, 3, 4, 5, 6, 7, 8]
    begin(drafter, "r", phrase * 4)
    before = float(draft_one(drafter, "r", 1).survival[0])
    for i in range(200):
        assert len(draft_one(drafter, "r", 0)) == 0
        drafter.observe("r", [phrase[i % 8]], 0)
    after = float(draft_one(drafter, "r", 1).survival[0])
    assert after > max(before, 0.9)


def test_a_drafter_that_does_not_learn_does_not_change() -> None:
    drafter = make_drafter(learning=False)
    begin(drafter, "r", [1, 2, 3, 4] * 20)
    before = draft_one(drafter, "r").survival.tolist()
    for _ in range(50):
        draft_one(drafter, "r")
        drafter.observe("r", [9, 10, 11], 8)
    drafter.finish("r", keep=False)
    begin(drafter, "r", [1, 2, 3, 4] * 20)
    assert draft_one(drafter, "r").survival.tolist() == before
