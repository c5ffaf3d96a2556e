"""What may stand where a hint should be, for every door that a hint comes through; and how many to try.

AGENTSPEC_FUZZ=100000 tries so many cases per property instead of a few hundred (docs/reliability.md).
"""

from __future__ import annotations

import json
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from agentspec_runtime.hints import Hint, SegmentKind


def fuzz(default: int) -> settings:
    """Settings of a property: `default` examples, or as many as the environment asks for."""
    wanted = int(os.environ.get("AGENTSPEC_FUZZ", "0"))
    return settings(
        max_examples=max(default, wanted),
        derandomize=not wanted,  # CI tries the same cases every time; a long run tries new ones
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
near_limits = st.sampled_from(
    [-1, 0, 1, 2, 127, 128, 129, 1000, 1001, 1024, 1025, 10**5, 10**6, 10**6 + 1, 2**63]
)
names = st.text(max_size=6) | st.sampled_from(
    ["", "s", "x" * 128, "x" * 129, "\x00", "<|im_end|>", "é" * 128]
)
kinds = st.sampled_from([str(kind) for kind in SegmentKind]) | names
marks = st.fixed_dictionaries(
    {"index": near_limits, "kind": kinds}, optional={"call_id": names, "future": json_values}
)
FIELDS = {
    "v": near_limits,
    "session": names,
    "agent": names,
    "parent": names | st.none(),
    "turn": near_limits | st.booleans(),
    "expect": st.lists(kinds, max_size=17),
    "marks": st.lists(marks, max_size=4) | st.just([{"index": 0, "kind": "file"}] * 129),
    "tools": near_limits,
    "speculate": near_limits | st.sampled_from(["auto", "off", "force", ""]),
    "latency": st.sampled_from(["interactive", "normal", "batch", "never"]),
    "scope": st.sampled_from(["corpus", "session", "request", "everything"]),
    "future": json_values,
}
"""Values that are right, at a limit or just behind it."""

likely = st.fixed_dictionaries({}, optional=FIELDS).map(json.dumps)
mixed = st.dictionaries(st.sampled_from([*FIELDS, "x"]), json_values, max_size=6).map(json.dumps)
broken = st.tuples(likely, st.integers(0, 200), st.text(max_size=3)).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + 1 :]
)
"""A hint with something cut out or put in."""
torn = st.tuples(st.sampled_from(["[", '{"a":']), st.integers(1, 2000)).map(lambda parts: parts[0] * parts[1])
nested = torn | st.integers(1, 2000).map(lambda depth: f'{{"future":{"[" * depth}{"]" * depth}}}')
"""Deep, whole or not. The parser takes 200 levels."""
large = st.integers(4000, 5000).map(lambda size: json.dumps({"future": "x" * size}))

texts = likely | mixed | broken | nested | large | st.text(max_size=60)
over_http = texts | json_values
"""What JSON can carry to the API."""
anything = over_http | st.binary(max_size=20) | st.builds(object) | st.builds(Hint)
"""What the Python API can carry past it."""
