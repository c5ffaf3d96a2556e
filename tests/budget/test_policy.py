"""Choice of draft lengths: equal to trying everything, monotone in the load, silent when nothing pays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec_runtime.budget import (
    CostCurve,
    FixedBudget,
    GoodputBudget,
    Load,
    Plan,
    StepCost,
    StepShape,
)

MEMORY_BOUND = (1e-2, 1e-7, 0.0, 0.0)
"""Tokens are nearly free: 10 ms per step, 0.1 us per token."""
COMPUTE_BOUND = (1e-4, 1e-2, 0.0, 0.0)
"""Nothing is free: 0.1 ms per step, 10 ms per token."""


def load_of(
    contexts: list[int],
    *,
    weights: list[float] | None = None,
    prefill: int = 0,
    room: int = 10_000,
) -> Load:
    return Load(
        contexts=np.array(contexts, np.int64),
        prefill_tokens=prefill,
        prefill_attended=prefill * prefill // 2,
        weights=np.array(weights if weights is not None else [1.0] * len(contexts)),
        num_waiting=0,
        room=room,
    )


def budget_of(coefficients: tuple[float, float, float, float]) -> GoodputBudget:
    return GoodputBudget(StepCost(CostCurve(coefficients=coefficients)))


def survivals(drafts: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Arrays as the drafter gives them; entries beyond a draft are rubbish on purpose."""
    width = max((len(d) for d in drafts), default=0) or 1
    table = np.full((len(drafts), width), 0.99, np.float32)
    for i, draft in enumerate(drafts):
        table[i, : len(draft)] = draft
    return table, np.array([len(d) for d in drafts], np.int64)


def rate(
    coefficients: tuple[float, float, float, float],
    contexts: list[int],
    drafts: list[list[float]],
    lengths: tuple[int, ...],
) -> float:
    """Expected tokens per second while decoding, written down from the definition."""
    base, per_token, per_attended, per_request = coefficients
    requests = len(contexts)
    tokens = requests + sum(lengths)
    attended = sum(c * (1 + n) for c, n in zip(contexts, lengths, strict=True))
    emitted = requests + sum(
        float(np.float32(s)) for d, n in zip(drafts, lengths, strict=True) for s in d[:n]
    )
    return emitted / (base + per_token * tokens + per_attended * 1e-3 * attended + per_request * requests)


draft = st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda ps: np.cumprod(ps).tolist())
curves = st.tuples(st.floats(1e-4, 0.1), st.floats(1e-7, 0.02), st.floats(0.0, 1e-3), st.floats(0.0, 1e-3))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[list[float]]]:
    drafts = draw(st.lists(draft, min_size=1, max_size=4))
    contexts = draw(st.lists(st.integers(1, 20_000), min_size=len(drafts), max_size=len(drafts)))
    return contexts, drafts


@given(curve=curves, case=cases(), room=st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_equals_trying_every_combination(
    curve: tuple[float, float, float, float], case: tuple[list[int], list[list[float]]], room: int
) -> None:
    """No combination of draft lengths that fits gives more tokens per second.

    With unequal costs per slot a tight room makes this a knapsack; then only "not worse than no drafts"
    and the room are promised.
    """
    contexts, drafts = case
    table, offered = survivals(drafts)
    plan = budget_of(curve).choose(load_of(contexts, room=room), table, offered)
    lengths = tuple(int(n) for n in plan.lengths)
    assert all(0 <= n <= len(d) for n, d in zip(lengths, drafts, strict=True))
    assert sum(lengths) <= room
    chosen = rate(curve, contexts, drafts, lengths)
    if room >= sum(map(len, drafts)) or len(set(contexts)) == 1:
        options = itertools.product(*(range(len(d) + 1) for d in drafts))
        best = max(rate(curve, contexts, drafts, o) for o in options if sum(o) <= room)
    else:
        best = rate(curve, contexts, drafts, (0,) * len(drafts))
    assert chosen >= best * (1 - 1e-9)


@given(curve=curves, case=cases(), verify=st.floats(0.0, 0.05))
@settings(max_examples=200, deadline=None)
def test_the_first_draft_pays_for_verifying(
    curve: tuple[float, float, float, float], case: tuple[list[int], list[list[float]]], verify: float
) -> None:
    """Drafts are placed only if all of them together bring in what a verifying step costs more."""
    contexts, drafts = case
    table, offered = survivals(drafts)
    budget = GoodputBudget(StepCost(CostCurve(coefficients=curve, verify=verify)))
    lengths = tuple(int(n) for n in budget.choose(load_of(contexts), table, offered).lengths)

    def with_jump(option: tuple[int, ...]) -> float:
        requests = len(contexts)
        emitted = requests + sum(
            float(np.float32(s)) for d, n in zip(drafts, option, strict=True) for s in d[:n]
        )
        return emitted / (emitted / rate(curve, contexts, drafts, option) + verify * any(option))

    best = max(with_jump(o) for o in itertools.product(*(range(len(d) + 1) for d in drafts)))
    assert with_jump(lengths) >= best * (1 - 1e-9)


@given(
    curve=curves,
    drafts=st.lists(draft, min_size=1, max_size=4),
    context=st.integers(1, 20_000),
    more=st.integers(1, 64),
)
@settings(max_examples=150, deadline=None)
def test_more_load_never_gives_a_larger_budget(
    curve: tuple[float, float, float, float], drafts: list[list[float]], context: int, more: int
) -> None:
    """Requests that join, here without drafts of their own, raise the price for all others.

    Without a cost per request: one that makes every joining request slow the step by more than its token is
    worth makes tokens dearer, and then drafting more is right.
    """
    curve = (*curve[:3], 0.0)
    table, offered = survivals(drafts)
    alone = budget_of(curve).choose(load_of([context] * len(drafts)), table, offered)
    wide = np.vstack([table, np.full((more, table.shape[1]), 0.99, np.float32)])
    together = budget_of(curve).choose(
        load_of([context] * (len(drafts) + more)), wide, np.concatenate([offered, np.zeros(more, np.int64)])
    )
    assert together.lengths.sum() <= alone.lengths.sum()
    assert not together.lengths[len(drafts) :].any()


def test_more_load_on_a_learned_staircase() -> None:
    """Flat up to 64 tokens, steep beyond, learned from steps: the budget shrinks as the batch grows."""
    cost = StepCost(CostCurve(coefficients=(0.012, 1e-5, 0.0, 0.0)))
    random = np.random.default_rng(0)
    for _ in range(3000):
        n = int(random.integers(1, 257))
        shape = StepShape(num_tokens=n, num_attended=n * 100, num_requests=min(n, 64))
        cost.observe(shape, 0.012 + max(n - 64, 0) * 3e-4)
    totals = []
    for requests in (1, 8, 32, 64, 128, 192):
        table, offered = survivals([[0.9, 0.7, 0.5, 0.3]] * requests)
        plan = GoodputBudget(cost).choose(load_of([100] * requests), table, offered)
        totals.append(int(plan.lengths.sum()) / requests)
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == 4
    assert totals[-1] < 2


def test_free_slots_are_all_taken() -> None:
    table, offered = survivals([[0.9, 0.5, 0.1], [0.3]])
    plan = budget_of(MEMORY_BOUND).choose(load_of([100, 100]), table, offered)
    assert plan.lengths.tolist() == [3, 1]
    assert plan.price == pytest.approx(0.1)


def test_nothing_is_drafted_when_nothing_pays() -> None:
    """Where each token costs as much as a step, a slot below certainty is a loss."""
    table, offered = survivals([[0.9, 0.8], [0.95, 0.9]])
    plan = budget_of(COMPUTE_BOUND).choose(load_of([100] * 2), table, offered)
    assert plan.lengths.tolist() == [0, 0]
    assert plan.predicted_s == pytest.approx(1e-4 + 2e-2)


def test_certain_copies_are_left_when_slots_are_dear() -> None:
    table, offered = survivals([[0.999, 0.3], [0.6, 0.5]])
    plan = budget_of((5e-3, 5e-3, 0.0, 0.0)).choose(load_of([100] * 2), table, offered)
    assert plan.lengths.tolist() == [1, 0]


def test_the_interactive_request_goes_first() -> None:
    """Equal drafts, room for one: the latency class decides."""
    table, offered = survivals([[0.6], [0.6], [0.6]])
    load = load_of([100] * 3, weights=[0.75, 1.5, 1.0], room=1)
    assert budget_of(MEMORY_BOUND).choose(load, table, offered).lengths.tolist() == [0, 1, 0]


def test_prices_follow_the_weights() -> None:
    """A slot of an interactive request may survive less often, one of a batch request must more."""
    prices = budget_of((5e-3, 3e-3, 0.0, 0.0)).prices(load_of([100] * 3, weights=[1.5, 1.0, 0.75]))
    assert prices[0] < prices[1] < prices[2]


def test_long_contexts_are_dearer_where_attention_costs() -> None:
    """Room for one slot, equal survival: it goes to the request that looks back on less."""
    table, offered = survivals([[0.6], [0.6]])
    load = load_of([30_000, 500], room=1)
    budget = budget_of((1e-2, 1e-5, 1e-4, 0.0))
    assert budget.choose(load, table, offered).lengths.tolist() == [0, 1]
    prices = budget.prices(load)
    assert prices[0] > prices[1]


@given(curve=curves, case=cases())
@settings(max_examples=200, deadline=None)
def test_the_price_known_before_drafting_hides_no_slot_that_pays(
    curve: tuple[float, float, float, float], case: tuple[list[int], list[list[float]]]
) -> None:
    """Every slot that the exact choice admits is above the price that drafts were cut at."""
    contexts, drafts = case
    table, offered = survivals(drafts)
    budget, load = budget_of(curve), load_of(contexts)
    prices = budget.prices(load)
    assert ((prices >= 0.0) & (prices < 1.0)).all()
    lengths = budget.choose(load, table, offered).lengths
    for i, n in enumerate(lengths):
        if n:
            survival = drafts[i][int(n) - 1]
            assert survival >= prices[i] * (1 - 1e-6) or survival < 0.02


def test_a_prompt_chunk_does_not_make_drafts_look_cheap() -> None:
    """A step that is slow because of a prompt admits no more than the same step without."""
    table, offered = survivals([[0.8, 0.5, 0.2, 0.1]] * 4)
    alone = budget_of((5e-3, 2e-3, 0.0, 0.0)).choose(load_of([100] * 4), table, offered)
    beside = budget_of((5e-3, 2e-3, 0.0, 0.0)).choose(load_of([100] * 4, prefill=2048), table, offered)
    assert beside.lengths.sum() <= alone.lengths.sum()
    assert beside.predicted_s > alone.predicted_s


@pytest.mark.parametrize("room", [0, -5])
def test_no_room_no_drafts(room: int) -> None:
    table, offered = survivals([[0.9, 0.9]])
    for budget in (budget_of(MEMORY_BOUND), FixedBudget(0.1)):
        assert budget.choose(load_of([10], room=room), table, offered).lengths.tolist() == [0]


def test_an_empty_step() -> None:
    for budget in (budget_of(MEMORY_BOUND), FixedBudget(0.1)):
        load = load_of([])
        assert budget.prices(load).size == 0
        plan = budget.choose(load, np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
        assert plan.lengths.size == 0
        assert plan.predicted_s > 0.0


def test_nothing_offered() -> None:
    table, offered = survivals([[], []])
    plan = budget_of(MEMORY_BOUND).choose(load_of([10, 10]), table, offered)
    assert plan.lengths.tolist() == [0, 0]


def test_observed_steps_change_the_choice() -> None:
    """The budget starts with a guess; a machine on which tokens cost makes it give less."""
    budget = GoodputBudget(StepCost())
    table, offered = survivals([[0.9, 0.6, 0.3]] * 16)
    before = int(budget.choose(load_of([100] * 16), table, offered).lengths.sum())
    random = np.random.default_rng(1)
    for _ in range(400):
        n = int(random.integers(1, 128))
        budget.observe(
            StepShape(num_tokens=n, num_attended=n * 100, num_requests=min(n, 16)), 1e-3 + 4e-3 * n
        )
    after = int(budget.choose(load_of([100] * 16), table, offered).lengths.sum())
    assert before == 48
    assert after < 20


def test_fixed_budget_takes_what_is_offered_as_far_as_there_is_room() -> None:
    table, offered = survivals([[0.4, 0.3], [0.5, 0.4, 0.35], [0.9]])
    budget = FixedBudget(0.3)
    assert budget.prices(load_of([10] * 3)).tolist() == [0.3] * 3
    plan = budget.choose(load_of([10] * 3), table, offered)
    assert plan.lengths.tolist() == [2, 3, 1]
    assert plan.price == 0.3
    assert budget.choose(load_of([10] * 3, room=4), table, offered).lengths.tolist() == [2, 2, 0]


def test_fixed_budget_learns_the_step_time_for_the_report() -> None:
    budget, shape = FixedBudget(0.3), StepShape(num_tokens=4, num_attended=400, num_requests=4)
    for _ in range(200):
        budget.observe(shape, 0.05)
    table, offered = survivals([[]] * 4)
    plan: Plan = budget.choose(load_of([100] * 4), table, offered)
    assert plan.predicted_s == pytest.approx(0.05, rel=0.05)


def test_the_price_is_the_least_survival_that_was_admitted() -> None:
    """A long context makes a likely slot as dear as an unlikely one of a short context."""
    table, offered = survivals([[0.9], [0.3]])
    plan = budget_of((1e-2, 1e-7, 1e-5, 0.0)).choose(load_of([30_000, 500]), table, offered)
    assert plan.lengths.tolist() == [1, 1]
    assert plan.price == pytest.approx(0.3)


def after_steps(budget: GoodputBudget, requests: int, true: CostCurve, steps: int) -> int:
    """Draft tokens of the last of so many steps, all of good drafts and told in their true time."""
    truth = StepCost(true)
    table, offered = survivals([[0.9, 0.8, 0.7, 0.6]] * requests)
    drafted = 0
    for _ in range(steps):
        drafted = int(budget.choose(load_of([100] * requests), table, offered).lengths.sum())
        n = requests + drafted
        shape = StepShape(num_tokens=n, num_attended=100 * n, num_requests=requests, num_drafts=drafted)
        budget.observe(shape, truth.predict(shape))
    return drafted


def test_one_stall_is_no_wall() -> None:
    """A stall in the only step with more than 32 tokens must not make all steps beyond look dear."""
    budget = GoodputBudget(StepCost())
    for i in range(60):
        shape = StepShape(num_tokens=8 + i % 16, num_attended=800, num_requests=8, num_drafts=i % 16)
        budget.observe(shape, 0.01)
    budget.observe(StepShape(num_tokens=40, num_attended=4000, num_requests=8, num_drafts=32), 0.05)
    for _ in range(8):
        budget.observe(StepShape(num_tokens=8, num_attended=800, num_requests=8), 0.01)
    assert after_steps(budget, 8, CostCurve(coefficients=(0.01, 1e-7, 0.0, 0.0)), 1) == 32


def test_a_curve_that_says_drafts_never_pay_is_tried() -> None:
    """Kept from a bad day: verifying takes a second. It lets nothing be drafted that would correct it."""
    curve = CostCurve(coefficients=MEMORY_BOUND, verify=1.0)
    assert after_steps(GoodputBudget(StepCost(curve)), 4, CostCurve(coefficients=MEMORY_BOUND), 1) == 0
    assert after_steps(GoodputBudget(StepCost(curve)), 4, CostCurve(coefficients=MEMORY_BOUND), 50) == 16
