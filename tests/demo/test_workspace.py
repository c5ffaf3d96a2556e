"""The coding agent's tools: what a model may get wrong comes back as text, and nothing leaves the folder."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from agentspec_runtime.demo.sandbox import Limits
from agentspec_runtime.demo.workspace import ERROR_PREFIX, TESTS_PASSED, Workspace

STUB = "def double(n):\n    # Return n times two.\n"
TESTS = "from double import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
GOOD = STUB + "    return n * 2\n"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path, {"double.py": STUB, "test_double.py": TESTS}, limits=Limits(wall_s=5))


def test_list_read_write_and_test(workspace: Workspace) -> None:
    assert workspace.list_files() == "double.py\ntest_double.py"
    assert workspace.read_file(path="double.py") == STUB
    assert not workspace.run_tests().endswith(TESTS_PASSED)
    assert workspace.write_file(path="double.py", code=GOOD) == "wrote double.py"
    assert workspace.run_tests() == f"PASS test_double\n{TESTS_PASSED}"


def test_a_failing_test_names_its_line(workspace: Workspace) -> None:
    workspace.write_file(path="double.py", code="def double(n):\n    return n\n")
    assert workspace.run_tests() == ("FAIL test_double: AssertionError  at: assert double(2) == 4\n1 failed")


@pytest.mark.parametrize("path", ["../secret.py", "/etc/passwd", "nothing.py", "", ".", "a\x00b", "x" * 5000])
def test_a_wrong_path_is_answered_with_the_right_ones(workspace: Workspace, path: str) -> None:
    for answer in (workspace.read_file(path=path), workspace.write_file(path=path, code=GOOD)):
        assert answer.startswith(ERROR_PREFIX)
        assert answer.endswith("the files are double.py, test_double.py")
        assert len(answer) < 300


def test_a_link_out_of_the_folder_is_no_file(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "link.py").symlink_to("/etc/hostname")
    assert workspace.read_file(path="link.py").startswith(ERROR_PREFIX)


@pytest.mark.parametrize(
    ("code", "reason"),
    [("def double(n:\n", "not valid Python"), ("x\x00y", "not valid Python"), ("#" * 5000, "at most")],
)
def test_code_that_cannot_be_used_is_not_written(workspace: Workspace, code: str, reason: str) -> None:
    answer = workspace.write_file(path="double.py", code=code)
    assert answer.startswith(ERROR_PREFIX)
    assert reason in answer
    assert workspace.read_file(path="double.py") == STUB


def test_the_tests_cannot_be_rewritten(workspace: Workspace) -> None:
    assert "cannot be changed" in workspace.write_file(path="test_double.py", code="pass")
    assert workspace.read_file(path="test_double.py") == TESTS


def test_hidden_tests_decide_and_leave_no_trace(workspace: Workspace, tmp_path: Path) -> None:
    workspace.write_file(path="double.py", code="def double(n):\n    return 4\n")
    hidden = "from double import double\n\n\ndef test_more():\n    assert double(3) == 6\n"
    assert workspace.tests_pass()
    assert not workspace.tests_pass(hidden)
    assert workspace.list_files() == "double.py\ntest_double.py"
    workspace.write_file(path="double.py", code=GOOD)
    assert workspace.tests_pass(hidden)


def test_tests_that_never_end_are_reported(tmp_path: Path) -> None:
    workspace = Workspace(
        tmp_path, {"test_x.py": "def test_x():\n    while True: pass\n"}, limits=Limits(wall_s=0.5)
    )
    assert workspace.run_tests() == "the tests did not end within 0.5 s"


def test_exiting_early_is_no_pass(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, {"a.py": "import os\nos._exit(0)\n", "test_a.py": "import a\n"})
    assert not workspace.tests_pass()


def test_tools_keep_the_signature_that_frameworks_read(workspace: Workspace) -> None:
    names = [tool.__name__ for tool in workspace.tools()]
    assert names == ["list_files", "read_file", "write_file", "run_tests"]
    assert list(inspect.signature(workspace.write_file).parameters) == ["path", "code"]
    assert all(tool.__doc__ for tool in workspace.tools())
