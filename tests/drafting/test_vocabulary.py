"""Token texts and lexical classes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec_runtime.drafting import TokenTable
from agentspec_runtime.drafting.vocabulary import NUM_CLASSES


@given(st.lists(st.binary(max_size=8), max_size=50))
def test_every_token_can_be_read_back(tokens: list[bytes]) -> None:
    table = TokenTable(tokens)
    assert table.vocab_size == len(tokens)
    read = [table.text[table.offsets[i] : table.offsets[i + 1]].tobytes() for i in range(len(tokens))]
    assert read == tokens
    assert ((table.classes >= 0) & (table.classes < NUM_CLASSES)).all()


def test_classes_tell_lexical_kinds_apart() -> None:
    kinds = [b"\n", b" ", b"42", b" word", b" Word", b"word", b"Word", b"a1"]
    kinds += [b"),\n", b"(", b")", b'"', b".", b"+"]
    classes = TokenTable(kinds).classes.tolist()
    assert len({0, *classes}) == len(kinds) + 1
    assert TokenTable([b" other", b" words"]).classes.tolist() == [classes[3]] * 2


def test_a_part_of_a_character_has_a_class() -> None:
    """Byte-level tokens split characters; such a token is no error."""
    table = TokenTable(["é".encode()[:1], "日本".encode()[1:3], b"\xff"])
    assert (table.classes < NUM_CLASSES).all()


def test_special_tokens_are_a_class_of_their_own() -> None:
    """Also when their ids are outside the table, as some tokenizers report them."""
    table = TokenTable([b"a", b"<|im_end|>", b"b"], special=[1, 7, -1])
    assert table.classes[1] == 0
    assert table.classes[0] == table.classes[2] != 0


@pytest.mark.parametrize("size", [0, 1, 49_152])
def test_an_opaque_table_knows_its_size_only(size: int) -> None:
    table = TokenTable.opaque(size)
    assert table.vocab_size == size
    assert not table.classes.any()
    assert table.offsets.tolist() == [0] * (size + 1)
