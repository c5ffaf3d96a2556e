"""The methods that a replay compares, as engine arguments.

`NAME` or `NAME:key=value,key=value`: values go into vLLM's `speculative_config`, or for ours into
`EngineConfig` (`num_speculative_tokens` included), so that any setting of any method can be measured.

    plain              no speculation, asynchronous scheduling: the reference
    plain-sync         no speculation, synchronous scheduling: what our scheduler has to pay first
    ngram              vLLM's n-gram lookup with the settings of its documentation
    suffix             suffix decoding (arctic-inference) with vLLM's defaults, K 32
    eagle3             needs `model=HEAD`
    agentspec          ours
    agentspec-nohints  ours, ignoring what clients say
    agentspec-nobudget ours with a fixed survival threshold instead of the budget
    agentspec-assist   ours beside a model drafter of vLLM: agentspec-assist:assist=eagle3:HEAD
    agentspec-off      our scheduler, never drafting: its tax

All of them run on vLLM's first model runner, the only one that has every method.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from agentspec_runtime.engine.args import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    RUNNER_VARIABLE,
    JsonValue,
    engine_args,
    parse_assist,
)
from agentspec_runtime.engine.config import EngineConfig
from agentspec_runtime.errors import ConfigurationError

__all__ = ["METHOD_NAMES", "Method", "parse_method", "split_methods"]

_SPECULATIVE: Final[Mapping[str, Mapping[str, JsonValue]]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 32},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
}

_OURS: Final[Mapping[str, Mapping[str, JsonValue]]] = {
    "agentspec": {},
    "agentspec-nohints": {"hints": False},
    "agentspec-nobudget": {"budget": "fixed"},
    "agentspec-assist": {},
    "agentspec-off": {"speculate": "off"},
}

METHOD_NAMES: Final = ("plain", "plain-sync", *_SPECULATIVE, *_OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method. `label` is what was asked for, and what results are named after.

    `hints`: requests carry hints. `reuse`: text of earlier requests may be used for drafts.
    """

    label: str
    engine: Mapping[str, JsonValue]
    environment: Mapping[str, str] = field(default_factory=dict)
    ours: bool = False
    hints: bool = False
    reuse: bool = True


def split_methods(text: str) -> list[str]:
    """Labels of a comma-separated list, where a comma may also stand inside the settings of one method."""
    labels: list[str] = []
    for part in filter(None, (piece.strip() for piece in _split(text))):
        name = part.partition(":")[0]
        if "=" in name and labels:
            labels[-1] += f",{part}"
        else:
            labels.append(part)
    return labels


def parse_method(label: str, *, reuse: bool = True, telemetry: bool = False, cpu: bool = False) -> Method:
    """Engine arguments of a method.

    Args:
        label: name and settings as in the module docstring.
        reuse: False keeps every method from using text of earlier requests.
        telemetry: for ours, whether records go to Prometheus and spans while measuring.
        cpu: whether the engine is a CPU build (`engine_args`).

    Raises:
        ConfigurationError: unknown name or setting.
    """
    name, _, text = label.partition(":")
    settings = _settings(text, label)
    if name in ("plain", "plain-sync"):
        if settings:
            raise ConfigurationError(f"method {name!r} has no settings, got {text!r}")
        engine: dict[str, JsonValue] = {} if name == "plain" else {"async_scheduling": False}
        return Method(label=label, engine=engine, environment={RUNNER_VARIABLE: "0"})
    if name in _SPECULATIVE:
        config = {**_SPECULATIVE[name], **settings}
        if name == "suffix" and not reuse:
            config["suffix_decoding_max_cached_requests"] = 0
        if name == "eagle3" and "model" not in config:
            raise ConfigurationError("method 'eagle3' needs its head: eagle3:model=PATH_OR_NAME")
        return Method(
            label=label,
            engine={"speculative_config": config},
            environment={RUNNER_VARIABLE: "0"},
            reuse=reuse,
        )
    if name in _OURS:
        return _ours(label, name, settings, reuse=reuse, telemetry=telemetry, cpu=cpu)
    raise ConfigurationError(f"unknown method {name!r}: known are {', '.join(METHOD_NAMES)}")


def _ours(
    label: str, name: str, settings: dict[str, JsonValue], *, reuse: bool, telemetry: bool, cpu: bool
) -> Method:
    draft_length = settings.pop("num_speculative_tokens", DEFAULT_NUM_SPECULATIVE_TOKENS)
    if not isinstance(draft_length, int) or draft_length < 1:
        raise ConfigurationError(f"{label}: num_speculative_tokens must be a whole number above 0")
    assist = settings.pop("assist", None) if name == "agentspec-assist" else None
    if name == "agentspec-assist" and not isinstance(assist, str):
        raise ConfigurationError(f"{label}: needs its drafter: agentspec-assist:assist=eagle3:HEAD")
    scope: dict[str, JsonValue] = {} if reuse else {"scope": "request"}
    try:
        config = EngineConfig.model_validate({"telemetry": telemetry, **scope, **_OURS[name], **settings})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{label}: {where}: {first['msg']}") from None
    arguments = engine_args(
        config,
        num_speculative_tokens=draft_length,
        per_request_metrics=False,
        cpu=cpu,
        assist=parse_assist(assist) if isinstance(assist, str) else None,
    )
    engine: dict[str, JsonValue] = json.loads(json.dumps(arguments.kwargs))
    return Method(
        label=label,
        engine=engine,
        environment=dict(arguments.environment),
        ours=True,
        hints=config.hints,
        reuse=reuse,
    )


def _split(text: str) -> list[str]:
    """At commas outside of brackets: a setting may be a JSON list."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _settings(text: str, label: str) -> dict[str, JsonValue]:
    settings: dict[str, JsonValue] = {}
    for part in filter(None, _split(text)):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ConfigurationError(f"{label}: needed key=value, got {part!r}")
        try:
            settings[key.strip()] = json.loads(value)
        except json.JSONDecodeError:
            settings[key.strip()] = value.strip()
    return settings
