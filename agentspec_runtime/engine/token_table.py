"""The drafter's vocabulary out of vLLM's tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from agentspec_runtime.drafting import TokenTable

__all__ = ["Tokenizer", "build_token_table"]

_log = logging.getLogger("agentspec.engine")
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE: Final = "\u2581"
_BYTE_LEVEL_SPACE: Final = "\u0120"


class Tokenizer(Protocol):
    """What is needed of a tokenizer; vLLM's `TokenizerLike` has it."""

    @property
    def all_special_ids(self) -> list[int]: ...  # noqa: D102  (a protocol: the names are the tokenizer's)
    def __len__(self) -> int: ...
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...  # noqa: D102


def build_token_table(tokenizer: Tokenizer | None, vocab_size: int) -> TokenTable:
    """Token table of `vocab_size` ids; ids that the tokenizer does not have are opaque.

    Knows byte-level BPE (GPT-2's mapping of bytes to characters) and SentencePiece pieces. Anything
    else, and any failure, gives an opaque table: drafts are still made, on ids alone.
    """
    if tokenizer is None:
        return TokenTable.opaque(vocab_size)
    try:
        count = min(len(tokenizer), vocab_size)
        pieces = tokenizer.convert_ids_to_tokens(list(range(count)))
        decode = _decoder(pieces)
        tokens = [decode(piece) if isinstance(piece, str) else bytes(piece or b"") for piece in pieces]
        tokens.extend([b""] * (vocab_size - count))
        return TokenTable(tokens, tokenizer.all_special_ids)
    except Exception:  # noqa: BLE001  (third-party tokenizers raise anything; the server must start)
        _log.warning("cannot read the tokenizer's tokens; drafting without token texts", exc_info=True)
        return TokenTable.opaque(vocab_size)


def _decoder(pieces: Sequence[str | bytes | None]) -> Callable[[str], bytes]:
    sample = [p for p in pieces if isinstance(p, str)]
    if any(_BYTE_LEVEL_SPACE in p for p in sample[:5000]) or not any(
        _SENTENCEPIECE_SPACE in p for p in sample
    ):
        table = _byte_level_table()
        return lambda piece: _from_byte_level(piece, table)
    return _from_sentencepiece


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (openai/gpt-2, encoder.py, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


def _from_byte_level(piece: str, table: dict[str, int]) -> bytes:
    try:
        return bytes(table[c] for c in piece)
    except KeyError:
        return piece.encode("utf-8", "replace")


def _from_sentencepiece(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace(_SENTENCEPIECE_SPACE, " ").encode("utf-8", "replace")
