"""How many tokens of an answer the API kept when a stop string ended it.

vLLM looks for stop strings in its API process, which cuts the answer at the token that completes one and
then aborts the request. The engine learns only of the abort, and has run a step or more beyond. To account
for what the user got, it finds the same token by itself: the first one after `min_tokens` with which the
text holds a stop string (vLLM: `check_stop_strings`, "the stop string that completes earliest").

Works on bytes, since tokens are pieces of UTF-8. Control tokens have no text unless the request shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["StopStrings", "TokenText"]


class TokenText(Protocol):
    """Bytes of a token; empty where it has none."""

    def __call__(self, token_id: int, /) -> bytes: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class StopStrings:
    """The stop strings of a request, as bytes, and the number of tokens before they count."""

    stops: tuple[bytes, ...]
    min_tokens: int

    def num_kept(self, token_ids: Sequence[int], text_of: TokenText, *, num_recent: int) -> int | None:
        """Tokens up to and including the one that completes a stop string; None if none does.

        A stop string is expected among the last `num_recent` tokens: the answer would have ended before.
        """
        first = max(len(token_ids) - num_recent, self.min_tokens, 0)
        if first >= len(token_ids):
            return None
        # A stop string may begin before the recent tokens; each token has at least a byte, or no text.
        begin = self._begin(token_ids, first, text_of)
        text = b"".join(text_of(token_id) for token_id in token_ids[begin:first])
        for index in range(first, len(token_ids)):
            before = len(text)
            text += text_of(token_ids[index])
            if any(text.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in self.stops):
                return index + 1
        return None

    def _begin(self, token_ids: Sequence[int], first: int, text_of: TokenText) -> int:
        need = max(map(len, self.stops)) - 1
        begin = first
        while begin > 0 and need > 0:
            begin -= 1
            need -= len(text_of(token_ids[begin]))
        return begin
