"""Assertions in the shared modules of these tests are explained like those of the tests."""

from typing import Any

import pytest

pytest.register_assert_rewrite("conversation", "near_tie", "scripted_engine")

from conversation import Answer, ask_all  # noqa: E402
from request_mix import greedy_requests  # noqa: E402


@pytest.fixture(scope="session")
def plain_answers(plain_server: Any) -> dict[str, Answer]:
    """What the plain server says to the mix of requests."""
    return ask_all(plain_server.base_url, greedy_requests("SmolLM2-135M-Instruct"), at_once=8)
