"""The lockstep simulation: what a batch emits and costs, with and without drafts."""

from __future__ import annotations

import numpy as np
import pytest

from agentspec_runtime.bench.costs import CostCurve
from agentspec_runtime.bench.lockstep import simulate_budget
from agentspec_runtime.bench.tokens import TokenRequest, TokenTrajectory
from agentspec_runtime.budget import FixedBudget
from agentspec_runtime.drafting import TokenTable

VOCABULARY = TokenTable.opaque(1000)
FLAT = CostCurve(model="m", machine="flat", points=((1, 0.01), (10_000, 0.010001)), context_tokens=0)
STEEP = CostCurve(model="m", machine="steep", points=((1, 0.001), (10_000, 10.0)), context_tokens=0)


def runs(count: int, requests: int = 3) -> list[TokenTrajectory]:
    """Agents that write the same sixty tokens again and again, with something new before."""
    random = np.random.default_rng(5)
    common = random.integers(0, 900, 60, dtype=np.int32)
    return [
        TokenTrajectory(
            id=str(number),
            group="",
            workload="",
            model="",
            fidelity="",
            requests=tuple(
                TokenRequest(
                    prompt_ids=random.integers(0, 900, 40, dtype=np.int32),
                    output_ids=np.concatenate(
                        (random.integers(0, 900, 5, dtype=np.int32), common, [999])
                    ).astype(np.int32),
                )
                for _ in range(requests)
            ),
        )
        for number in range(count)
    ]


def test_without_drafts_a_batch_is_exactly_plain() -> None:
    result = simulate_budget(runs(4), VOCABULARY, FLAT, 2, FixedBudget(2.0))
    assert result is not None
    assert (result.drafted, result.accepted, result.speedup) == (0, 0, 1.0)
    # Twelve requests of 66 tokens, the first of each from its prompt; both agents always run together.
    assert result.emitted == result.steps == 12 * 65
    assert result.seconds == pytest.approx(result.steps / 2 * 0.01, rel=1e-3)


def test_copies_pay_where_tokens_are_free_and_are_left_where_they_are_dear() -> None:
    cheap = simulate_budget(runs(12), VOCABULARY, FLAT, 4)
    dear = simulate_budget(runs(12), VOCABULARY, STEEP, 4)
    assert cheap is not None
    assert dear is not None
    assert cheap.speedup > 3.0
    assert cheap.emitted <= cheap.steps + cheap.accepted
    assert dear.drafted < cheap.drafted
    assert dear.speedup > 0.97


def test_a_batch_that_cannot_be_filled_has_no_result() -> None:
    assert simulate_budget(runs(3), VOCABULARY, FLAT, 4) is None
