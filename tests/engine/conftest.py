"""Assertions in the shared modules of these tests are explained like those of the tests."""

import pytest

pytest.register_assert_rewrite("conversation", "scripted_engine")
