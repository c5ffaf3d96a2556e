"""Summary and report: factors within repeats, the verdict, the doubts, and a file that stands alone."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from agentspec_runtime.bench.choice import read_traffic, write_choice
from agentspec_runtime.bench.limits import Limits, write_limits
from agentspec_runtime.bench.measure import DraftCounts, ResultRow
from agentspec_runtime.bench.report import write_report
from agentspec_runtime.bench.results import load_rows
from agentspec_runtime.bench.summary import Cost, doubts, summarise, verdict
from agentspec_runtime.errors import ConfigurationError


def row(method: str, concurrency: int, repeat: int, tok_s: float, **changes: object) -> ResultRow:
    base = ResultRow(
        method=method, concurrency=concurrency, repeat=repeat, workload="w<1>", mode="closed loop",
        trajectories=4, turns=80, out_tokens=100, prompt_tokens=1000, wall_s=36.0, tok_s=tok_s,
        decode_tok_s=None, ttft_p50=0.1, ttft_p95=0.2, ttft_p99=0.3, tpot_p50=0.01, tpot_p95=0.02,
        tpot_p99=0.03, gap_p50=0.01, gap_p95=0.02, gap_p99=0.03, turn_p50=1.0, turn_p95=2.0, turn_p99=3.0,
        task_p50=4.0, task_p95=5.0, task_p99=6.0, slip_p95=0.0, steps=50, tokens_per_step=2.0, drafted=100,
        accepted=50, rejected=50, rejected_share=0.5, draft_ms_per_step=0.3, step_ms_p50=20.0,
        batch_histogram={str(concurrency): 10}, tokens_histogram={"2": 50}, turn_quantiles=(0.5, 1.5),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


PLAIN: dict[str, object] = {
    "steps": 100, "tokens_per_step": 1.0, "drafted": 0, "accepted": 0, "rejected": 0, "rejected_share": 0.0,
    "tokens_histogram": {"1": 100},
}  # fmt: skip
ROWS = [
    row("agentspec", 8, 0, 30.0, turn_p99=2.4, by_block={"code": DraftCounts(drafted=100, accepted=50)},
        by_source={"corpus": DraftCounts(drafted=100, accepted=50)}),
    row("agentspec", 8, 1, 24.0, turn_p99=2.4),
    row("suffix", 8, 0, 25.0),
    row("suffix", 8, 1, 20.0),
    row("plain", 8, 0, 20.0, **PLAIN),
    row("plain", 8, 1, 12.0, **PLAIN),
]  # fmt: skip

PUBLISHED = sorted((Path(__file__).resolve().parents[2] / "docs" / "benchmarks").rglob("results.jsonl"))


def test_factors_are_medians_of_ratios_within_repeats() -> None:
    """1.5x and 2.0x within repeats: 1.75x, although the medians of the rates differ by 1.69x."""
    cells = {cell.method: cell for cell in summarise(ROWS)}
    assert list(cells) == ["plain", "suffix", "agentspec"]
    assert cells["agentspec"].speedup == pytest.approx(1.75)
    assert cells["agentspec"].speedup_range == (1.5, 2.0)
    assert cells["agentspec"].tok_s == 27.0
    assert cells["agentspec"].tasks_per_hour == 400.0
    assert cells["agentspec"].mean_batch == 8.0
    assert cells["agentspec"].by_block["code"] == DraftCounts(drafted=100, accepted=50)


def test_the_verdict_compares_with_plain_and_the_best_other() -> None:
    [sentence] = verdict(summarise(ROWS))
    assert sentence == (
        "At 8 agents: agentspec gave 1.75x the throughput of plain and 1.20x that of suffix, the best other "
        "method; P99 turn latency 0.80x of plain's."
    )
    [without] = verdict(summarise(ROWS[:4]))
    assert without == "At 8 agents: agentspec was fastest with 27 tok/s."


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mismatched": 1}, "did not emit the recorded tokens"),
        ({"preemptions": 2}, "preempted"),
        ({"fillers": 30}, "agentspec at 8 agents verified 30 zeros instead of drafts"),
        ({"internal_errors": 1}, "Errors of ours were survived in runs of agentspec"),
        ({"tokens_histogram": {"2": 49}}, "100 tokens arrived and 98 were emitted in steps"),
        ({"turns": 29}, "Fewer than 30 turns at a concurrency of 8"),
        ({"mode": "open loop, 1/s", "slip_p95": 4.0}, "slipped by up to 4.0 s"),
    ],
)
def test_what_speaks_against_a_result_is_said(change: dict[str, object], says: str) -> None:
    clean = doubts(summarise(ROWS), ROWS)
    rows = [replace(ROWS[0], **change), *ROWS[1:]]  # type: ignore[arg-type]
    found = doubts(summarise(rows), rows)
    assert clean == []
    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize("method", ["plain", "plain-sync"])
def test_plain_that_does_not_emit_one_token_per_step_is_a_doubt(method: str) -> None:
    rows = [*ROWS, replace(ROWS[-1], method=method, repeat=2, steps=99)]
    [doubt] = doubts(summarise(rows), rows)
    assert doubt.startswith(f"{method} emitted 100 tokens in 99 steps at 8 agents")


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: "/".join(file.parts[-3:-1]))
def test_plain_of_every_published_result_emitted_one_token_per_step(file: Path) -> None:
    rows = load_rows(file)
    assert any(row.method == "plain" for row in rows)
    assert not [doubt for doubt in doubts(summarise(rows), rows) if "counted wrongly" in doubt]
    assert {row.mismatched for row in rows} == {0}


def test_missing_reference_single_repeat_and_small_batches_are_doubts() -> None:
    rows = [replace(ROWS[0], batch_histogram={"1": 9, "8": 1})]
    told = " ".join(doubts(summarise(rows), rows))
    assert "no plain row" in told
    assert "One repeat" in told
    assert "only 1.7 requests" in told


def save(folder: Path) -> None:
    lines = [json.dumps(asdict(one)) for one in ROWS]
    (folder / "results.jsonl").write_text("\n".join([*lines, '{"method": "cut']))
    (folder / "provenance.json").write_text(json.dumps({"notes": {"model": "m&m"}, "argv": ["<b>"]}))
    write_limits(folder / "limits.json", [Limits(concurrency=8, lz=9.0, o3=8.0, o2=6.0, o1=4.0)])


def test_the_report_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    save(tmp_path)
    html_file, markdown_file = write_report(tmp_path, Cost(per_hour=4.0))
    html, markdown = html_file.read_text(), markdown_file.read_text()
    assert "<script" not in html
    assert not re.search(r"(src|href)=|@import|url\(", html)
    assert set(re.findall(r"https?://[^\"' <]+", html)) <= {"http://www.w3.org/2000/svg"}
    assert "w&lt;1&gt;" in html
    assert "m&amp;m" in html
    for shown in ("1.75x the throughput", "1.75x (1.50 to 2.00)", "$0.0100", "O2/1: best occurrence"):
        assert shown in html
    assert "| agentspec | 27.0 tok/s, 1.75x (1.50 to 2.00) |" in markdown
    # Throughput; P50, P95, P99 and distribution of turns; by block and by source; steps, batch; limits.
    assert html.count("<svg") == 10
    for question in ("pay", "agent feel", "wasted", "steps look like", "limit", "task cost", "All numbers"):
        assert question in "".join(re.findall(r"<h2>.*?</h2>", html)), question
    assert ">block: code<" in html
    assert ">source: corpus<" in html


def test_rows_survive_their_file_and_a_line_that_was_cut_off(tmp_path: Path) -> None:
    save(tmp_path)
    assert load_rows(tmp_path / "results.jsonl") == ROWS
    (tmp_path / "results.jsonl").write_text('{"cut')
    with pytest.raises(ConfigurationError, match="no finished cell"):
        load_rows(tmp_path / "results.jsonl")
    with pytest.raises(ConfigurationError, match="no such file"):
        load_rows(tmp_path / "none.jsonl")


def test_kinds_of_traffic_are_put_together(tmp_path: Path) -> None:
    """The best single method may be ours, never ours with something beside it."""
    folders = {"w": ROWS, "v": [row("agentspec-assist:assist=eagle3:HEAD", 8, 0, 99.0), *ROWS[2:]]}
    for name, rows in folders.items():
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(asdict(replace(one, workload=name))) + "\n" for one in rows)
        (tmp_path / name / "results.jsonl").write_text(text)
    picture, table = write_choice([read_traffic(tmp_path / name) for name in folders], tmp_path / "out")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.read_text().splitlines()]
    assert lines[0] == [
        *("traffic", "agents", "plain, tok/s", "suffix", "agentspec", "agentspec-assist", "best single"),
    ]
    suffix = "1.46 (1.25-1.67) / 1.00"
    assert lines[2] == ["w", "8", "16.0", suffix, "1.75 (1.50-2.00) / 0.80", "-", "agentspec"]
    assert lines[3] == ["v", "8", "16.0", suffix, "-", "4.95 / 1.00", "suffix"]
    labels = re.findall(r'aria-label="([wv]: [^"]+)"', picture.read_text())
    assert labels == [
        *(
            "w: tok/s over plain by agents at the same time",
            "w: P99 of a turn over plain by agents at the same time",
        ),
        *(
            "v: tok/s over plain by agents at the same time",
            "v: P99 of a turn over plain by agents at the same time",
        ),
    ]
