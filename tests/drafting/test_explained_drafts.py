"""Random life cycles: every drafted token is a copy from text that its request may use."""

from __future__ import annotations

import numpy as np
import pytest
from explained import PHRASES, Explained, K
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentspec_runtime.drafting import DraftScope
from agentspec_runtime.observe import DraftSource

NAMES = ("a", "b", "c", "d")

piece = st.tuples(st.sampled_from(PHRASES), st.integers(0, 2), st.integers(1, 5)).map(
    lambda p: p[0][p[1] : p[1] + p[2]]
)
text = st.lists(piece, max_size=4).map(lambda pieces: [t for part in pieces for t in part])
scopes = st.builds(
    DraftScope,
    namespace=st.sampled_from(["x", "x", "y"]),
    session=st.sampled_from([None, "s", "s", "t"]),
    reach=st.sampled_from(["corpus", "corpus", "session", "request"]),
)


class ExplainedDrafts(RuleBasedStateMachine):
    """Hypothesis chooses the calls, and shortens a sequence that fails."""

    @initialize(learning=st.booleans(), prior=st.booleans())
    def build(self, learning: bool, prior: bool) -> None:
        self.checked = Explained(learning=learning, use_prior=prior)

    @rule(
        name=st.sampled_from(NAMES), prompt=text, scope=scopes, sampled=st.integers(0, 3), wait=st.booleans()
    )
    def start(self, name: str, prompt: list[int], scope: DraftScope, sampled: int, wait: bool) -> None:
        self.checked.start(name, prompt, scope, sampled=sampled, wait=wait)

    @rule(prompt=text, answer=text, scope=scopes)
    def earlier_request(self, prompt: list[int], answer: list[int], scope: DraftScope) -> None:
        """A whole request, beginning to end, while others run."""
        self.checked.start("earlier", prompt, scope, sampled=0, wait=False)
        self.checked.observe(["earlier"], [answer])
        self.checked.finish("earlier", keep=True)
        self.checked.settle()

    @rule(budget=st.integers(0, 40))
    def work(self, budget: int) -> None:
        self.checked.work(budget)

    @rule(data=st.data(), price=st.sampled_from([0.0, 0.0, 0.3, 0.9]))
    def draft(self, data: st.DataObject, price: float) -> None:
        """All running requests and an unknown one, in any order, with any caps."""
        names = data.draw(st.permutations([*self.checked.running, "nobody"]))
        caps = data.draw(st.lists(st.integers(-1, K + 3), min_size=len(names), max_size=len(names)))
        self.checked.draft(names, caps, price)

    @precondition(lambda self: self.checked.running)
    @rule(data=st.data())
    def observe(self, data: st.DataObject) -> None:
        """The target model agrees with a part of each draft and goes on, or says something else."""
        running = self.checked.running
        names = data.draw(st.permutations([*running, "nobody"]))
        names = names[: data.draw(st.integers(1, len(names)))]
        new_ids = []
        for name in names:
            drafted = running[name].draft if name in running else []
            new_ids.append([*drafted[: data.draw(st.integers(0, len(drafted)))], *data.draw(piece)])
        self.checked.observe(names, new_ids)

    @precondition(lambda self: self.checked.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:
        self.checked.finish(data.draw(st.sampled_from(sorted(self.checked.running))), keep=keep)

    @rule()
    def finish_nobody(self) -> None:
        self.checked.drafter.finish("nobody")

    @invariant()
    def knows_exactly_the_running(self) -> None:
        if hasattr(self, "checked"):
            self.checked.check_known()


ExplainedDrafts.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestExplainedDrafts = ExplainedDrafts.TestCase


def _random_text(random: np.random.Generator, pieces: int) -> list[int]:
    out: list[int] = []
    for _ in range(int(random.integers(0, pieces + 1))):
        start = int(random.integers(0, 3))
        phrase = PHRASES[int(random.integers(len(PHRASES)))]
        out += phrase[start : start + int(random.integers(1, 6))]
    return out


def _random_scope(random: np.random.Generator) -> DraftScope:
    return DraftScope(
        namespace=str(random.choice(["x", "x", "y"])),
        session=[None, "s", "s", "t"][int(random.integers(4))],
        reach=random.choice(["corpus", "corpus", "session", "request"]),
    )


@pytest.mark.parametrize("seed", range(6))
def test_long_random_life_cycles(seed: int) -> None:
    """The same in 2,000 random calls each: deeper states than a search that must also shrink gets to."""
    random = np.random.default_rng(seed)
    checked = Explained(learning=seed % 2 == 0, use_prior=seed % 3 == 0)
    for _ in range(2000):
        action = int(random.integers(10))
        name = NAMES[int(random.integers(len(NAMES)))]
        running = sorted(checked.running)
        if action <= 1:
            wait = bool(random.integers(2))
            checked.start(
                name,
                _random_text(random, 3),
                _random_scope(random),
                sampled=int(random.integers(4)),
                wait=wait,
            )
        elif action == 2 and running:
            checked.finish(running[int(random.integers(len(running)))], keep=bool(random.integers(4)))
        elif action == 3:
            checked.work(int(random.integers(0, 40)))
        elif action == 4:
            checked.settle()
        elif action <= 7:
            names = [str(n) for n in random.permutation([*running, "nobody"])]
            caps = random.integers(-1, K + 4, len(names)).tolist()
            checked.draft(names, caps, float(random.choice([0.0, 0.0, 0.3])))
        else:
            new_ids = []
            for other in running:
                drafted = checked.running[other].draft
                kept = drafted[: int(random.integers(0, len(drafted) + 1))]
                new_ids.append([*kept, *_random_text(random, 1)])
            checked.observe(running, new_ids)
        checked.check_known()
    for source in (DraftSource.REQUEST, DraftSource.SESSION, DraftSource.CORPUS):
        assert checked.num_from[source] > 50, "the run was to meet every source"
