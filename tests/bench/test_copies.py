"""Copy lengths and oracles against quadratic versions of their definitions."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec_runtime.bench.copies import longest_previous_factor
from agentspec_runtime.bench.oracles import copy_lengths, oracle_steps
from agentspec_runtime.bench.tokens import TokenRequest, TokenTrajectory

few_values = st.lists(st.integers(0, 2), max_size=60)


def naive_factor(text: list[int], i: int) -> int:
    return max((common(text[j:], text[i:]) for j in range(i)), default=0)


def common(left: list[int], right: list[int]) -> int:
    n = 0
    while n < len(left) and n < len(right) and left[n] == right[n]:
        n += 1
    return n


@given(few_values)
@settings(max_examples=300, deadline=None)
def test_previous_factors_equal_the_quadratic_definition(text: list[int]) -> None:
    got = longest_previous_factor(np.array(text, dtype=np.int64))
    assert got.tolist() == [naive_factor(text, i) for i in range(len(text))]


def test_previous_factors_of_long_repetition_and_of_large_values() -> None:
    period = list(range(1_000_000, 1_000_007))
    got = longest_previous_factor(np.array(period * 50, dtype=np.int64))
    assert got[:8].tolist() == [0] * 7 + [343]
    assert got[-1] == 1


short = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@st.composite
def runs(draw: st.DrawFn) -> list[TokenTrajectory]:
    """Agent runs whose calls either continue the chat or start another one."""
    trajectories = []
    for number in range(draw(st.integers(1, 3))):
        requests: list[TokenRequest] = []
        for _ in range(draw(st.integers(1, 3))):
            fresh = draw(short)
            if requests and draw(st.booleans()):
                fresh = [*requests[-1].prompt_ids, *requests[-1].output_ids, *fresh]
            requests.append(
                TokenRequest(
                    prompt_ids=np.array(fresh, dtype=np.int32),
                    output_ids=np.array(draw(short), dtype=np.int32),
                )
            )
        trajectories.append(
            TokenTrajectory(
                id=str(number), group="", workload="", model="", fidelity="", requests=tuple(requests)
            )
        )
    return trajectories


def visible(trajectories: list[TokenTrajectory], t: int, r: int) -> list[list[int]]:
    """Texts that may be drafted from before request r of run t, in the definition of the module."""
    texts = [
        [*q.prompt_ids[-2:].tolist(), *q.output_ids.tolist()]
        for run in trajectories[:t]
        for q in run.requests
    ]
    chain: list[int] = []
    for q in trajectories[t].requests[:r]:
        prompt = q.prompt_ids.tolist()
        if prompt[: len(chain)] != chain:
            texts.append(chain)
        chain = prompt + q.output_ids.tolist()
    prompt = trajectories[t].requests[r].prompt_ids.tolist()
    if prompt[: len(chain)] != chain:
        texts.append(chain)
    return texts


@given(runs())
@settings(max_examples=300, deadline=None)
def test_oracles_equal_the_quadratic_definition(trajectories: list[TokenTrajectory]) -> None:
    for t, lengths in enumerate(copy_lengths(trajectories)):
        for r, (request, got) in enumerate(zip(trajectories[t].requests, lengths, strict=True)):
            prompt, output = request.prompt_ids.tolist(), request.output_ids.tolist()
            others = visible(trajectories, t, r)
            own = prompt + output
            for position in range(len(output)):
                rest, at = output[position:], len(prompt) + position
                sources = [(text, j) for text in others for j in range(len(text))]
                sources += [(own, j) for j in range(at)]
                anywhere = max((common(text[j:], rest) for text, j in sources), default=0)
                assert got.anywhere[position] == anywhere
                for anchor, lengths in ((1, got.loosely), (2, got.addressed)):
                    matched = max(
                        (
                            common(text[j:], rest)
                            for text, j in sources
                            if min(at, j) >= anchor and text[j - anchor : j] == own[at - anchor : at]
                        ),
                        default=0,
                    )
                    assert lengths[position] == matched


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.none() | st.integers(0, 4))
def test_every_output_token_of_an_oracle_is_copied_or_sampled(copies: list[int], limit: int | None) -> None:
    size = len(copies)
    fitting = np.minimum(np.array(copies), np.arange(size, 0, -1))
    steps, accepted = oracle_steps(fitting, limit)
    # A copy that ends the answer leaves no token to sample in its step.
    assert steps + accepted in (size, size + 1)
    if limit == 0:
        assert (steps, accepted) == (size, 0)
