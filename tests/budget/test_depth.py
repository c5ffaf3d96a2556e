"""How deep the worker's model drafter drafts."""

import numpy as np

from agentspec_runtime.budget.depth import LEFT_OUT, AssistDepth

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


def play(
    depth: AssistDepth, steps: int, *, gain: float, standing: float, whole: int | None = None
) -> np.ndarray:
    """Depths of one token at most, at 4 ms, for four requests whose tokens are worth 10 ms each."""
    chosen = []
    for _ in range(steps):
        asked = depth.choose(4, TOKEN_S, np.array([0.0, 0.004]), num_whole=whole, standing=standing)
        chosen.append(asked)
        if asked > 0:
            depth.observe(np.array([gain]))
    return np.array(chosen)


def test_one_that_does_not_bring_in_its_first_pass_is_left_out_and_tried_ever_more_rarely() -> None:
    # 40 ms x 0.15 - 4 ms leaves 2 ms, and the first pass takes 5.
    chosen = play(AssistDepth(1, may_leave_out=True), 20_000, gain=0.15, standing=0.005)
    out = chosen == LEFT_OUT
    begins = np.flatnonzero(np.diff(out.astype(int)) == 1)
    pauses = np.diff(begins)
    assert (pauses[1:] > 1.5 * pauses[:-1]).all()
    assert out[:63].sum() == 0
    assert out.mean() > 0.95


def test_one_that_brings_it_in_stays() -> None:
    chosen = play(AssistDepth(1, may_leave_out=True), 5_000, gain=0.3, standing=0.005)
    assert not (chosen == LEFT_OUT).any()


def test_it_is_let_in_again_when_it_pays() -> None:
    depth = AssistDepth(1, may_leave_out=True)
    play(depth, 3_000, gain=0.0, standing=0.005)
    chosen = play(depth, 3_000, gain=0.3, standing=0.005)
    assert (chosen[-200:] >= 0).all()


def test_while_every_request_has_missed_a_step_it_only_looks_on() -> None:
    """Their drafts would be worthless; those of requests that begin now will not be."""
    depth = AssistDepth(1, may_leave_out=True)
    chosen = play(depth, 2_000, gain=0.3, standing=0.005, whole=0)
    assert set(chosen[:512].tolist()) == {0}
    assert (chosen == LEFT_OUT).any()
    assert play(AssistDepth(1, may_leave_out=True), 100, gain=0.3, standing=0.005, whole=1).max() == 1


def test_a_worker_that_always_runs_it_is_never_told_to_leave_it_out() -> None:
    assert play(AssistDepth(1), 2_000, gain=0.0, standing=0.02).min() == 0
