"""The step-time model: it learns curves that are known here, and nothing that happens to it breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec_runtime.budget import CostCurve, StepCost, StepShape

Curve = Callable[[StepShape], float]


def linear(shape: StepShape) -> float:
    """A CPU: every token costs."""
    return 0.020 + 0.001 * shape.num_tokens + 2e-7 * shape.num_attended + 1e-5 * shape.num_requests


def staircase(shape: StepShape) -> float:
    """A GPU: flat while memory-bound, padded to multiples of 8 tokens, compute-bound from 64 on."""
    padded = -(-shape.num_tokens // 8) * 8
    return 0.012 + max(padded - 64, 0) * 1.5e-4


def varied_load(seed: int, steps: int, *, prefill: bool = True) -> Iterator[StepShape]:
    """Batches that grow and shrink, drafts of changing length, now and then a prompt chunk."""
    random = np.random.default_rng(seed)
    requests = 8
    for _ in range(steps):
        requests = int(np.clip(requests + random.integers(-3, 4), 1, 48))
        tokens = requests + int(random.integers(0, 3 * requests + 1))
        attended = tokens * int(random.integers(100, 3000))
        if prefill and random.random() < 0.1:
            tokens += 512
            attended += 512 * 256
        yield StepShape(num_tokens=tokens, num_attended=attended, num_requests=requests)


def decode_shape(tokens: int) -> StepShape:
    return StepShape(num_tokens=tokens, num_attended=tokens * 1500, num_requests=min(tokens, 48))


def train(
    cost: StepCost,
    curve: Curve,
    *,
    steps: int = 1500,
    noise: float = 0.0,
    seed: int = 0,
    prefill: bool = True,
) -> None:
    random = np.random.default_rng(seed + 1)
    for shape in varied_load(seed, steps, prefill=prefill):
        cost.observe(shape, curve(shape) * (1.0 + noise * random.standard_normal()))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_learns_a_linear_curve(noise: float) -> None:
    """Within 5 % everywhere in the range it was shown, also with 5 % noise on each step."""
    cost = StepCost()
    train(cost, linear, noise=noise)
    for tokens in (1, 4, 16, 48, 96, 144):
        shape = decode_shape(tokens)
        assert cost.predict(shape) == pytest.approx(linear(shape), rel=0.05)


@pytest.mark.parametrize("prefill", [False, True])
def test_learns_a_staircase_with_a_flat_floor(prefill: bool) -> None:
    """The size buckets hold what a line cannot: flat up to 64 tokens, steep beyond."""
    cost = StepCost()
    train(cost, staircase, steps=1000, prefill=prefill)
    for tokens in (4, 8, 16, 32, 64, 128):
        shape = decode_shape(tokens)
        assert cost.predict(shape) == pytest.approx(staircase(shape), rel=0.25), tokens


@pytest.mark.parametrize("curve", [linear, staircase])
@pytest.mark.parametrize("prefill", [False, True])
def test_the_estimate_never_leaves_the_order_of_magnitude(curve: Curve, prefill: bool) -> None:
    """From the fiftieth step on, at every single step, for the load that is there."""
    cost = StepCost()
    for i, shape in enumerate(varied_load(0, 3000, prefill=prefill)):
        if i >= 50:
            assert 0.4 < cost.predict(shape) / curve(shape) < 2.5, f"step {i}, {shape}"
        cost.observe(shape, curve(shape))


def test_slots_are_cheap_on_the_floor_and_dear_beyond_it() -> None:
    """What the budget asks: the cost of one more token, far below the true one on the flat part."""
    cost = StepCost()
    train(cost, staircase, steps=3000)
    on_floor, _ = cost.slope(decode_shape(16))
    beyond, _ = cost.slope(decode_shape(128))
    assert on_floor < 0.5 * beyond
    assert beyond == pytest.approx(1.5e-4, rel=0.5)


@pytest.mark.parametrize("jump", [0.0, 0.004, 0.03])
def test_learns_what_verifying_costs_at_all(jump: float) -> None:
    """A step with drafts is longer by a constant, apart from its tokens: other kernels, the sampler."""
    cost = StepCost()
    random = np.random.default_rng(0)
    for _ in range(600):
        drafts = int(random.integers(0, 5))
        shape = StepShape(
            num_tokens=1 + drafts, num_attended=800 * (1 + drafts), num_requests=1, num_drafts=drafts
        )
        cost.observe(shape, linear(shape) + jump * (drafts > 0) * (1.0 + 0.02 * random.standard_normal()))
    assert cost.verify_seconds == pytest.approx(jump, abs=0.0015)
    assert StepCost(cost.curve()).verify_seconds == cost.verify_seconds


@pytest.mark.parametrize("slot", [0.0, 0.004])
def test_a_draft_token_is_not_priced_like_a_token_of_a_prompt(slot: float) -> None:
    """Most tokens are of prompts; each draft token is a row of logits to sample from besides."""
    cost, random = StepCost(), np.random.default_rng(0)
    for _ in range(400):
        requests, drafts = (int(random.integers(low, high)) for low, high in ((24, 33), (0, 120)))
        n = requests + drafts + int(random.integers(0, 500))
        shape = StepShape(num_tokens=n, num_attended=100 * n, num_requests=requests, num_drafts=drafts)
        cost.observe(shape, 0.07 + 0.0016 * n + slot * drafts + 0.03 * random.standard_normal() * (n > 300))
    shape = StepShape(num_tokens=300, num_attended=30_000, num_requests=30)
    assert sum(x * y for x, y in zip(cost.slope(shape), (1.0, 100.0), strict=True)) == pytest.approx(
        0.0016 + slot, rel=0.1
    )
    assert cost.added_seconds(shape, np.array([10.0]))[0] == pytest.approx(0.016 + 10 * slot, rel=0.15)
    assert StepCost(cost.curve()).slope(shape) == cost.slope(shape)


def test_learns_within_a_few_steps() -> None:
    """A server that just started prices slots by its own machine after two dozen steps."""
    cost = StepCost()
    train(cost, linear, steps=24)
    shape = decode_shape(16)
    assert cost.predict(shape) == pytest.approx(linear(shape), rel=0.25)


def test_follows_a_machine_that_becomes_slower() -> None:
    cost = StepCost()
    train(cost, linear, steps=800)
    train(cost, lambda shape: 2.0 * linear(shape), steps=1500, seed=5)
    shape = decode_shape(16)
    assert cost.predict(shape) == pytest.approx(2.0 * linear(shape), rel=0.1)


def test_stalls_are_not_learned() -> None:
    """One step in fifty takes a hundred times as long (a compile, another process): barely visible."""
    cost, random = StepCost(), np.random.default_rng(3)
    train(cost, linear, steps=500)
    for shape in varied_load(7, 1000):
        stalled = random.random() < 0.02
        cost.observe(shape, linear(shape) * (100.0 if stalled else 1.0))
    for tokens in (4, 16, 64):
        shape = decode_shape(tokens)
        assert cost.predict(shape) == pytest.approx(linear(shape), rel=0.1)


def test_a_saved_curve_predicts_from_the_first_step() -> None:
    """No warm-up for a machine that was calibrated."""
    again = StepCost(CostCurve(coefficients=(0.020, 0.001, 2e-4, 1e-5)))
    for tokens in (4, 16, 64):
        shape = decode_shape(tokens)
        assert again.predict(shape) == pytest.approx(linear(shape), rel=0.08)


def test_a_wrong_saved_curve_is_unlearned() -> None:
    """A curve of another machine is advice: a thousand steps of this one outweigh it."""
    cost = StepCost(CostCurve(coefficients=(0.5, 0.02, 0.0, 0.0)))
    train(cost, linear, steps=1000)
    shape = decode_shape(16)
    assert cost.predict(shape) == pytest.approx(linear(shape), rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_impossible_durations_are_ignored(seconds: float) -> None:
    """A clock that jumps gives these; the model stays what it was."""
    cost = StepCost()
    train(cost, linear, steps=100)
    before = cost.predict(decode_shape(16))
    cost.observe(decode_shape(16), seconds)
    assert cost.predict(decode_shape(16)) == before
    assert cost.num_steps == 100


def test_an_infinite_duration_is_clipped() -> None:
    cost = StepCost()
    train(cost, linear, steps=100)
    cost.observe(decode_shape(16), float("inf"))
    assert cost.predict(decode_shape(16)) == pytest.approx(linear(decode_shape(16)), rel=0.3)


def test_an_infinite_first_duration_is_ignored() -> None:
    cost = StepCost()
    cost.observe(decode_shape(16), float("inf"))
    assert np.isfinite(cost.predict(decode_shape(16)))


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_a_steady_load_for_hours_keeps_the_estimate(noise: float) -> None:
    """20,000 steps of the same batch: nothing new to learn, nothing may drift away."""
    cost, random = StepCost(), np.random.default_rng(0)
    for i in range(20_000):
        shape = StepShape(num_tokens=8, num_attended=8 * 500 + (i % 500) * 8, num_requests=8)
        cost.observe(shape, 0.02 * (1.0 + noise * random.standard_normal()))
        if i >= 100:
            assert 0.5 < cost.predict(shape) / 0.02 < 1.5, f"step {i}"


@given(
    steps=st.lists(
        st.tuples(
            st.integers(1, 8192),
            st.integers(0, 10**9),
            st.integers(0, 512),
            st.floats(-1.0, 1e6) | st.just(float("nan")),
        ),
        max_size=60,
    )
)
@settings(max_examples=150, deadline=None)
def test_predictions_are_finite_and_positive_after_anything(
    steps: list[tuple[int, int, int, float]],
) -> None:
    """Whatever is measured: a positive finite time, a price of a token that is not negative."""
    cost = StepCost()
    for tokens, attended, requests, seconds in steps:
        shape = StepShape(num_tokens=tokens, num_attended=attended, num_requests=requests)
        cost.observe(shape, seconds)
        assert np.isfinite(cost.predict(shape))
        assert cost.predict(shape) > 0.0
        per_token, per_attended = cost.slope(shape)
        assert np.isfinite(per_token)
        assert per_token >= 0.0
        assert np.isfinite(per_attended)
        assert per_attended >= 0.0


def test_added_seconds_are_the_difference_of_predictions() -> None:
    cost = StepCost()
    train(cost, staircase, steps=300)
    shape = decode_shape(24)
    added = cost.added_seconds(shape, np.array([0.0, 1.0, 40.0, 300.0]))
    for more, seconds in zip((0, 1, 40, 300), added, strict=True):
        larger = StepShape(
            num_tokens=24 + more,
            num_attended=shape.num_attended,
            num_requests=shape.num_requests,
            num_drafts=more,
        )
        verify = cost.verify_seconds * (more > 0)
        assert seconds + verify == pytest.approx(cost.predict(larger) - cost.predict(shape), abs=1e-9)


def test_steps_of_one_size_leave_the_cost_of_a_token_open() -> None:
    """What 64 requests without drafts take says nothing of a 65th token; drafts of changing length do."""
    same, varied = StepCost(), StepCost()
    base = StepShape(num_tokens=64, num_attended=6400, num_requests=64)
    more, attended = np.array([0.0, 1.0, 32.0]), np.array([0.0, 100.0, 3200.0])
    assert same.unsure_slope(base, 100.0) == 0.0
    assert not same.unsure_seconds(base, more, attended).any()
    for i in range(200):
        same.observe(base, 0.1)
        drafts = i % 33
        shape = StepShape(
            num_tokens=64 + drafts, num_attended=100 * (64 + drafts), num_requests=64, num_drafts=drafts
        )
        varied.observe(shape, 0.1 + 0.001 * drafts)
    assert varied.unsure_slope(base, 100.0) < 1e-4 < 1e-2 < same.unsure_slope(base, 100.0)
    known, open_ = (cost.unsure_seconds(base, more, attended) for cost in (varied, same))
    assert known[0] == open_[0] == 0.0
    assert known[1] < known[2] < 0.003
    assert open_[2] > 0.1
