"""docs/field-reports.md names tests: they exist, and every case is answered."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "field-reports.md").read_text(encoding="utf-8")


def test_every_named_file_exists() -> None:
    for name in set(re.findall(r"tests/[\w/]+\.py", TABLE)):
        assert (ROOT / name).is_file(), name


def test_every_named_test_exists() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    names = set(re.findall(r"\btest_\w+\b(?!\.py)", TABLE))
    assert names
    missing = {name for name in names if f"def {name}(" not in sources and f"{name}.py" not in str(files)}
    assert not missing


def test_each_case_is_answered_once() -> None:
    cases = [int(number) for number in re.findall(r"^\| FR-(\d\d) \|", TABLE, re.MULTILINE)]
    assert cases == list(range(1, 62))
