"""Recordings as tokens: what a replay and the simulator run on, cached on disk.

A growing chat repeats its whole prompt in every call. On disk a request therefore holds how much it
shares with the request before it, and the rest; in memory the requests of a growing chat are views of
one array. That makes 5,900 calls of long agent runs a 10 MB file that opens in a fraction of a second.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from agentspec_runtime.bench.chat_tokens import (
    ChatTokenizer,
    Tokens,
    load_chat_tokenizer,
    tokenizer_fingerprint,
)
from agentspec_runtime.bench.recordings import Recording, file_sha256, read_recordings
from agentspec_runtime.errors import RecordingError

__all__ = ["Fitting", "TokenRequest", "TokenTrajectory", "fit_context", "load_tokens", "shuffled", "tokenize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """One model call. The last token of `output_ids` is the end token of the answer."""

    prompt_ids: Tokens
    output_ids: Tokens
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrajectory:
    """One agent run as tokens. Fields are those of `Recording`; `copy` numbers the copies of one, from 1."""

    id: str
    group: str
    workload: str
    model: str
    fidelity: str
    requests: tuple[TokenRequest, ...]
    copy: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Forced tokens of the whole run."""
        return sum(len(request.output_ids) for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """What is left of trajectories under a context limit, and what was not."""

    trajectories: tuple[TokenTrajectory, ...]
    skipped_requests: int
    skipped_trajectories: int


def load_tokens(
    path: Path | str,
    model: str,
    *,
    chat_template: Path | None = None,
    cache_dir: Path | None = None,
    limit: int | None = None,
) -> list[TokenTrajectory]:
    """Trajectories of one recording file, in its order, as tokens of `model`.

    Args:
        path: recording file.
        model: model directory or hub name whose tokenizer and chat template are used.
        chat_template: template file to use instead of the model's.
        cache_dir: folder of the token cache; None takes `~/.cache/agentspec/tokens`.
        limit: only the first so many trajectories.

    Raises:
        RecordingError: the file is not a recording, or the template cannot render it.
        ConfigurationError: the model has no usable tokenizer or template.
    """
    source = Path(path)
    folder = cache_dir or _default_cache()
    key = sha256(f"{file_sha256(source)} {tokenizer_fingerprint(model, chat_template)}".encode()).hexdigest()
    cached = folder / f"{key[:32]}.npz"
    trajectories = _read(cached) if cached.is_file() else None
    if trajectories is None:
        tokenizer = load_chat_tokenizer(model, chat_template)
        trajectories = [tokenize(recording, tokenizer) for recording in read_recordings(source)]
        _write(cached, trajectories)
        trajectories = _read(cached) or trajectories  # the shared-array form: far less memory
    return trajectories[:limit]


def tokenize(recording: Recording, tokenizer: ChatTokenizer) -> TokenTrajectory:
    """One recording as tokens.

    Raises:
        RecordingError: the chat template refuses a prompt of it.
    """
    tokenizer.forget()
    requests = []
    for number, request in enumerate(recording.requests):
        prompt, target = recording.prompt(request), recording.target(request)
        try:
            requests.append(
                TokenRequest(
                    prompt_ids=tokenizer.prompt(prompt, recording.tools),
                    output_ids=tokenizer.answer(prompt, target, recording.tools),
                    wait_s=request.wait_s,
                )
            )
        except RecordingError as error:
            raise RecordingError(f"{recording.id}, request {number}: {error}") from error
    return TokenTrajectory(
        id=recording.id,
        group=recording.group,
        workload=recording.workload,
        model=recording.model,
        fidelity=recording.fidelity,
        requests=tuple(requests),
    )


def fit_context(trajectories: Iterable[TokenTrajectory], max_model_len: int | None) -> Fitting:
    """Leave out requests whose prompt and answer together exceed `max_model_len` tokens.

    The limit is the engine's, so every method is measured on the same requests. A trajectory that has
    nothing left is left out as a whole.
    """
    kept: list[TokenTrajectory] = []
    skipped_requests = skipped_trajectories = 0
    for trajectory in trajectories:
        fitting = tuple(
            request
            for request in trajectory.requests
            if max_model_len is None or len(request.prompt_ids) + len(request.output_ids) <= max_model_len
        )
        skipped_requests += len(trajectory.requests) - len(fitting)
        if fitting:
            kept.append(_with_requests(trajectory, fitting))
        else:
            skipped_trajectories += 1
    return Fitting(
        trajectories=tuple(kept),
        skipped_requests=skipped_requests,
        skipped_trajectories=skipped_trajectories,
    )


def shuffled(trajectory: TokenTrajectory, random: np.random.Generator) -> TokenTrajectory:
    """The same with the tokens of each answer in random order, its end token excepted.

    As long as before, of the same tokens, and nothing foretells it: what drafting costs where it cannot pay.
    """
    requests = [
        TokenRequest(
            prompt_ids=request.prompt_ids,
            output_ids=np.append(random.permutation(request.output_ids[:-1]), request.output_ids[-1:]),
            wait_s=request.wait_s,
        )
        for request in trajectory.requests
    ]
    return _with_requests(trajectory, tuple(requests))


def _with_requests(trajectory: TokenTrajectory, requests: tuple[TokenRequest, ...]) -> TokenTrajectory:
    return replace(trajectory, requests=requests)


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "agentspec" / "tokens"


def _common_prefix(left: Tokens, right: Tokens) -> int:
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size


def _write(path: Path, trajectories: Sequence[TokenTrajectory]) -> None:
    """Cache file, written beside its place and moved there, so that two runs cannot spoil it."""
    rows: list[tuple[int, int, int]] = []  # shared with the request before, prompt length, output length
    pieces: list[Tokens] = []
    waits: list[float] = []
    for trajectory in trajectories:
        before = np.empty(0, dtype=np.int32)
        for request in trajectory.requests:
            shared = _common_prefix(before, request.prompt_ids)
            rows.append((shared, len(request.prompt_ids), len(request.output_ids)))
            pieces += [request.prompt_ids[shared:], request.output_ids]
            waits.append(request.wait_s)
            before = np.concatenate((request.prompt_ids, request.output_ids))
    head = [[t.id, t.group, t.workload, t.model, t.fidelity, len(t.requests)] for t in trajectories]
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        np.savez_compressed(
            file,
            head=np.frombuffer(json.dumps(head).encode(), dtype=np.uint8),
            rows=np.asarray(rows, dtype=np.int64).reshape(-1, 3),
            tokens=np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32),
            waits=np.asarray(waits, dtype=np.float64),
        )
    Path(file.name).replace(path)


def _read(path: Path) -> list[TokenTrajectory] | None:
    """Content of a cache file; None where it is damaged, so that it is made again."""
    try:
        with np.load(path) as data:
            head = json.loads(data["head"].tobytes())
            rows, tokens, waits = data["rows"], data["tokens"], data["waits"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    trajectories: list[TokenTrajectory] = []
    row, offset = 0, 0
    for identity, group, workload, model, fidelity, count in head:
        requests = _unpack(rows[row : row + count], tokens[offset:], waits[row : row + count])
        offset += sum(int(prompt - shared + output) for shared, prompt, output in rows[row : row + count])
        row += count
        trajectories.append(
            TokenTrajectory(
                id=identity, group=group, workload=workload, model=model, fidelity=fidelity, requests=requests
            )
        )
    return trajectories


def _unpack(
    rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    tokens: Tokens,
    waits: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> tuple[TokenRequest, ...]:
    """Requests of one trajectory: views of one array as long as each extends the one before it."""
    requests: list[TokenRequest] = []
    offset = first = 0
    before = np.empty(0, dtype=np.int32)
    while first < len(rows):
        last = first
        while last + 1 < len(rows) and rows[last + 1][0] == rows[last][1] + rows[last][2]:
            last += 1
        chain = rows[first : last + 1]
        buffer = np.empty(int(chain[-1][1] + chain[-1][2]), dtype=np.int32)
        buffer[: chain[0][0]] = before[: chain[0][0]]
        size = len(buffer) - int(chain[0][0])
        buffer[chain[0][0] :] = tokens[offset : offset + size]
        offset += size
        for (_, prompt, output), wait in zip(chain, waits[first : last + 1], strict=True):
            end = int(prompt + output)
            requests.append(
                TokenRequest(
                    prompt_ids=buffer[: int(prompt)], output_ids=buffer[int(prompt) : end], wait_s=float(wait)
                )
            )
        before, first = buffer, last + 1
    return tuple(requests)
