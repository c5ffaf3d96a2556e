"""An event loop whose clock jumps to the next timer: latencies in tests are exact, and take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from agentspec_runtime.bench.load import Call, Chunk

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(make: Coroutine[None, None, T], loop: VirtualLoop) -> T:
    try:
        return loop.run_until_complete(make)
    finally:
        loop.close()


@dataclass
class ScriptedEngine:
    """Answers with the recorded tokens in the chunks and at the gaps (seconds) that a script names.

    `script` maps (session, turn) to [(gap before the chunk, tokens in it), ...]. `lose` drops the last
    token of a turn, `corrupt` changes its first.
    """

    script: Mapping[tuple[str, int], list[tuple[float, int]]]
    lose: frozenset[tuple[str, int]] = frozenset()
    corrupt: frozenset[tuple[str, int]] = frozenset()
    running: int = 0
    most_running: int = 0
    prompts: list[tuple[str, int, list[int]]] = field(default_factory=list)

    async def generate(self, call: Call) -> AsyncIterator[Chunk]:
        key = (call.session, call.turn)
        self.prompts.append((*key, list(call.prompt_ids)))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        tokens = list(call.output_ids)
        if key in self.lose:
            tokens.pop()
        if key in self.corrupt:
            tokens[0] += 1
        for gap, count in self.script[key]:
            await asyncio.sleep(gap)
            yield Chunk(token_ids=tokens[:count], cached_tokens=len(call.prompt_ids) // 2)
            del tokens[:count]
        self.running -= 1
