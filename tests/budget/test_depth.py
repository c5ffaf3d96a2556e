"""How deep the worker's model drafter drafts."""

import numpy as np

from agentspec_runtime.budget.depth import AssistDepth

TOKEN_S = 0.01


def run(depth: AssistDepth, gains: list[float], pass_s: float, steps: int, requests: int = 4) -> list[int]:
    """Play steps; gains come only after steps in which the drafter drafted, as in an engine."""
    chosen = []
    for _ in range(steps):
        asked = depth.choose(requests, TOKEN_S, pass_s * np.arange(depth.max_depth + 1))
        chosen.append(asked)
        depth.observe(np.array(gains[:asked]))
    return chosen


def settled(chosen: list[int]) -> int:
    return int(np.bincount(chosen[-100:]).argmax())


def test_a_drafter_that_pays_is_used_as_deep_as_it_pays() -> None:
    # A request's token is worth 10 ms; four of them share a pass of 6 ms: third and fourth do not pay.
    assert settled(run(AssistDepth(4), [0.4, 0.6, 0.7, 0.75], 0.006, 300)) == 2
    assert settled(run(AssistDepth(4), [0.4, 0.6, 0.7, 0.75], 0.001, 300)) == 4


def test_one_that_does_not_pay_is_left_out_but_for_probes() -> None:
    chosen = run(AssistDepth(4), [0.02, 0.03, 0.03, 0.03], 0.006, 600)
    assert settled(chosen) == 0
    assert 0 < np.count_nonzero(chosen[-300:]) <= 300 / 40


def test_it_comes_back_when_the_text_changes() -> None:
    depth = AssistDepth(3)
    run(depth, [0.0, 0.0, 0.0], 0.004, 400)
    chosen = run(depth, [0.6, 0.9, 1.1], 0.004, 600)
    assert settled(chosen) == 3
    assert chosen[350] == 3


def test_small_differences_do_not_make_it_flap() -> None:
    depth = AssistDepth(1)
    random = np.random.default_rng(3)
    chosen = []
    for _ in range(2000):
        asked = depth.choose(4, TOKEN_S, np.array([0.0, 0.004]))
        chosen.append(asked)
        depth.observe(0.1 + 0.02 * random.standard_normal(1)[:asked])  # worth just what it costs
    changes = np.count_nonzero(np.diff(chosen[200:]))
    assert changes <= 2 * 1800 / 48 + 20


def test_steps_without_a_sample_draft_nothing() -> None:
    assert AssistDepth(4).choose(0, TOKEN_S, np.zeros(5)) == 0
