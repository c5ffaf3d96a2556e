"""The coding agent's tools: list, read and write files of one folder, and run its tests.

Every tool answers with text and raises nothing for what a model may get wrong: a wrong path or an empty
file comes back as a line that starts with `ERROR_PREFIX` and says what would have been right. Answers are the
same for the same folder (no times, no absolute paths, sorted names), so that two runs of an agent can be
compared token by token.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from agentspec_runtime.client.tool import tool
from agentspec_runtime.demo.sandbox import Limits, run_python
from agentspec_runtime.hints import SegmentKind

__all__ = ["ERROR_PREFIX", "TESTS_PASSED", "Workspace"]

ERROR_PREFIX: Final = "error: "
TESTS_PASSED: Final = "all tests passed"

_MAX_FILE_CHARS: Final = 4000
"""About 1,200 tokens: a file that the embedded model's 8k context can hold several times."""

# Plain assert functions, run by hand: pytest's report holds times and paths, and is not installed with
# the package. Prints one line per test.
_RUNNER: Final = f"""
import pathlib, sys, traceback
failed = count = 0
for path in sorted(pathlib.Path(".").glob("test_*.py")):
    scope = {{"__name__": path.stem}}
    try:
        exec(compile(path.read_text(), str(path), "exec"), scope)
    except Exception as error:
        print(f"FAIL {{path}}: {{type(error).__name__}}: {{error}}")
        failed += 1
        continue
    lines = path.read_text().splitlines()
    for name, test in list(scope.items()):
        if not name.startswith("test_") or not callable(test):
            continue
        count += 1
        try:
            test()
            print(f"PASS {{name}}")
        except Exception as error:
            failed += 1
            at = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
            line = lines[at[-1] - 1].strip() if at else ""
            print(f"FAIL {{name}}: {{type(error).__name__}} {{error}} at: {{line}}")
if not count and not failed:
    sys.exit("no tests found")
print("{TESTS_PASSED}" if not failed else f"{{failed}} failed")
sys.exit(bool(failed))
"""


class Workspace:
    """One folder that an agent works in. The folder is the caller's; nothing outside it is touched."""

    def __init__(self, folder: Path, files: Mapping[str, str], *, limits: Limits | None = None) -> None:
        self._folder = folder.resolve()
        self._limits = limits or Limits()
        for name, text in files.items():
            (self._folder / name).write_text(text, encoding="utf-8")

    def tools(self) -> list[Callable[..., str]]:
        """The four tools, as plain functions that a framework can take as they are."""
        return [self.list_files, self.read_file, self.write_file, self.run_tests]

    @tool
    def list_files(self) -> str:
        """List the files of the project."""
        return "\n".join(self._names()) or "(no files)"

    @tool(kind=SegmentKind.FILE)
    def read_file(self, path: str) -> str:
        """Read a file of the project."""
        found = self._find(path)
        if found is None:
            return self._unknown(path)
        return found.read_text(encoding="utf-8", errors="replace")[:_MAX_FILE_CHARS]

    @tool
    def write_file(self, path: str, code: str) -> str:
        """Replace a file of the project with new Python code."""
        found = self._find(path)
        if found is None:
            return self._unknown(path)
        if found.name.startswith("test_"):
            return f"{ERROR_PREFIX}{found.name} holds the tests and cannot be changed"
        if len(code) > _MAX_FILE_CHARS:
            return f"{ERROR_PREFIX}code of {len(code)} characters, at most {_MAX_FILE_CHARS}"
        try:
            ast.parse(code)
        except (SyntaxError, ValueError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            return f"{ERROR_PREFIX}not written, this is not valid Python: {reason}"
        found.write_text(code.rstrip("\n") + "\n", encoding="utf-8")
        return f"wrote {found.name}"

    @tool
    def run_tests(self) -> str:
        """Run the tests of the project."""
        return self._run_tests()

    def _run_tests(self) -> str:
        with tempfile.TemporaryDirectory(prefix="agentspec-") as name:
            runner = Path(name) / "runner.py"
            runner.write_text(_RUNNER)
            run = run_python(runner, folder=self._folder, limits=self._limits)
        if run.timed_out:
            return f"{run.output}the tests did not end within {self._limits.wall_s:g} s"
        return run.output.strip() or f"the tests ended with status {run.return_code}"

    def tests_pass(self, extra: str = "") -> bool:
        """Verdict on the folder as it is, with more (hidden) test functions if given."""
        path = self._folder / "test_hidden.py"
        try:
            if extra:
                path.write_text(extra, encoding="utf-8")
            return self._run_tests().endswith(TESTS_PASSED)
        finally:
            path.unlink(missing_ok=True)

    def _names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir() if path.is_file())

    def _find(self, path: str) -> Path | None:
        # Membership in the listing, not path arithmetic: "..", absolute paths and links lead nowhere.
        name = path.removeprefix("./")
        found = self._folder / name
        return found if name in self._names() and not found.is_symlink() else None

    def _unknown(self, path: str) -> str:
        return f"{ERROR_PREFIX}no file named {path[:80]!r}; the files are {', '.join(self._names())}"
