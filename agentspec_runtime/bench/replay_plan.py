"""What a replay is to do: the plan, what cannot be planned, and what is noted of it beside the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from agentspec_runtime.bench.recordings import file_sha256
from agentspec_runtime.bench.results import finished_cells
from agentspec_runtime.engine.args import JsonValue
from agentspec_runtime.errors import ConfigurationError

__all__ = ["ReplayPlan", "check_continues", "check_folders", "check_plan", "mode_of", "notes_of", "separated"]


_SAME: Final = (
    *("model", "mode", "part", "max_model_len", "max_turns", "session_reuse", "copies", "waits", "shuffled"),
)
"""Notes that results in one folder have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What to replay. `trajectories` has one entry, or one per concurrency; None takes all."""

    files: tuple[Path, ...]
    model: str
    out: Path
    methods: tuple[str, ...]
    concurrency: tuple[int, ...]
    trajectories: tuple[int | None, ...] = (None,)
    repeat: int = 1
    max_turns: int | None = None
    max_model_len: int = 8192
    part: Literal["all", "tune", "test"] = "all"
    rate_per_s: float | None = None
    honour_waits: bool = True
    reuse: bool = True
    seed: int = 0
    chat_template: Path | None = None
    copies: bool = False
    """Repeat trajectories until there are as many as asked for (`replay_engine.with_copies`)."""
    shuffled: bool = False
    """Answers in random order of their tokens (`tokens.shuffled`)."""
    engine: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def workload(self) -> str:
        """Name of what is replayed, from the files."""
        return "+".join(_stem(file) for file in self.files) + "-shuffled" * self.shuffled

    def trajectories_at(self, index: int) -> int | None:
        """Number of trajectories at the concurrency with this index."""
        return self.trajectories[index if len(self.trajectories) > 1 else 0]


def separated(plan: ReplayPlan, shuffled: Sequence[Path] = ()) -> list[ReplayPlan]:
    """The plan once per recording, each with a folder of its own, for `replay_together`; then once for each
    that is to be replayed shuffled.
    """
    each = [replace(plan, files=(file,)) for file in plan.files]
    each += [replace(plan, files=(file,), shuffled=True) for file in shuffled]
    return [replace(one, out=plan.out / one.workload) for one in each]


def check_plan(plan: ReplayPlan) -> None:
    """Refuse what cannot be replayed, before anything starts.

    Raises:
        ConfigurationError: settings that do not fit.
    """
    if not plan.files:
        raise ConfigurationError("no recording given: --traces FILE...")
    if not plan.concurrency or min(plan.concurrency) < (0 if plan.rate_per_s else 1):
        raise ConfigurationError(f"--concurrency needs numbers from 1, got {list(plan.concurrency)}")
    if len(plan.trajectories) not in (1, len(plan.concurrency)):
        raise ConfigurationError(
            f"--trajectories takes one number, or one per concurrency ({len(plan.concurrency)}), "
            f"got {len(plan.trajectories)}"
        )
    if plan.copies and plan.reuse:
        # Suffix decoding keeps one memory for all requests, whatever their salt: it would find the answers
        # of one copy in the text of another.
        raise ConfigurationError("copies of trajectories need --session-reuse off")
    if len(set(plan.methods)) != len(plan.methods):
        raise ConfigurationError("a method is named twice in --methods")
    for file in plan.files:
        if not file.is_file():
            raise ConfigurationError(f"{file}: no such file")


def check_folders(plans: Sequence[ReplayPlan]) -> None:
    """Recordings in one folder would take each other's results for their own, and share a cache salt.

    Raises:
        ConfigurationError: two of them would.
    """
    first: dict[str, ReplayPlan] = {}
    for plan in plans:
        before = first.setdefault(plan.workload, plan)
        if before is not plan:
            ours, other = (", ".join(map(str, one.files)) for one in (plan, before))
            raise ConfigurationError(
                f"--separate: {other} and {ours} have the same name, {plan.workload!r}, and would share one "
                "folder of results: rename one of them, or replay them one after the other"
            )


def check_continues(plan: ReplayPlan) -> None:
    """Cells that are in the folder are not run again, so they must come from the same requests.

    Raises:
        ConfigurationError: they do not.
    """
    provenance = plan.out / "provenance.json"
    if not finished_cells(plan.out) or not provenance.is_file():
        return
    before = json.loads(provenance.read_text(encoding="utf-8"))
    notes, now = before["notes"], notes_of(plan)
    differing = [name for name in _SAME if name in notes and notes[name] != now[name]]
    if "concurrency" in notes:
        counts, old = _counts(now), _counts(notes)
        if any(old[size] != counts[size] for size in old.keys() & counts.keys()):
            differing.append("trajectories")
    if before["traces"] != {file.name: file_sha256(file) for file in plan.files}:
        differing.append("recordings")
    if differing:
        raise ConfigurationError(
            f"--out {plan.out} holds results with another {', '.join(differing)}: name another folder"
        )


def _counts(notes: Mapping[str, str | int | float | bool | None]) -> dict[str, str]:
    """Trajectories by concurrency, of notes."""
    sizes, counts = str(notes["concurrency"]).split(","), str(notes["trajectories"]).split(",")
    return dict(zip(sizes, counts if len(counts) > 1 else counts * len(sizes), strict=True))


def notes_of(plan: ReplayPlan) -> dict[str, str | int | float | bool | None]:
    """What the provenance of a result says about its plan."""
    return {
        "model": Path(plan.model).name,
        "mode": mode_of(plan),
        "part": plan.part,
        "max_model_len": plan.max_model_len,
        "max_turns": plan.max_turns,
        "session_reuse": plan.reuse,
        "copies": plan.copies,
        "waits": plan.honour_waits,
        "shuffled": plan.shuffled,
        "concurrency": ",".join(map(str, plan.concurrency)),
        "trajectories": ",".join(map(str, plan.trajectories)),
        "forced": "recorded output of the same length for all methods; temperature 0; end token included",
    }


def mode_of(plan: ReplayPlan) -> str:
    """How the agents arrive, in words."""
    if plan.rate_per_s is None:
        return "closed loop"
    capped = "capped " if max(plan.concurrency) > 0 else ""
    return f"{capped}open loop, {plan.rate_per_s:g}/s"


def _stem(file: Path) -> str:
    return file.name.split(".")[0]
