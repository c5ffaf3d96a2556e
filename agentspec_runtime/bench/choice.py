"""Which method is fastest, by kind of traffic and load: several replays put together, as picture and table.

One row of charts for each kind of traffic: throughput, and P99 of a turn, both as factors of plain in the
same repeat. The table also names the best single method of each cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from agentspec_runtime.bench import charts
from agentspec_runtime.bench.charts import Series
from agentspec_runtime.bench.page import markdown_table
from agentspec_runtime.bench.results import load_rows
from agentspec_runtime.bench.summary import CellSummary, ratio, summarise

__all__ = ["Traffic", "choice_svg", "choice_table", "read_traffic", "write_choice"]

_PLAIN: Final = "plain"

_Cells: TypeAlias = Mapping[str, CellSummary]
_Value: TypeAlias = Callable[[_Cells, CellSummary], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One kind of traffic: the cells of every method that was replayed on it."""

    name: str
    cells: tuple[CellSummary, ...]

    @property
    def sizes(self) -> list[int]:
        """Numbers of agents."""
        return sorted({cell.concurrency for cell in self.cells})

    def at(self, concurrency: int) -> dict[str, CellSummary]:
        """Cells by method."""
        return {cell.method: cell for cell in self.cells if cell.concurrency == concurrency}


def read_traffic(folder: Path) -> Traffic:
    """The results of a replay.

    Raises:
        ConfigurationError: the folder holds none.
    """
    rows = load_rows(folder / "results.jsonl")
    return Traffic(name=rows[0].workload, cells=tuple(summarise(rows)))


def write_choice(traffic: Sequence[Traffic], folder: Path) -> list[Path]:
    """choice.svg and choice.md; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"choice.svg": choice_svg(traffic) + "\n", "choice.md": choice_table(traffic)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def choice_svg(traffic: Sequence[Traffic]) -> str:
    """Throughput and P99 of a turn over those of plain; two charts for each kind of traffic."""
    colors = charts.method_colors(_methods(traffic))
    panels = []
    for kind in traffic:
        for label, value in (("tok/s over plain", _speedup), ("P99 of a turn over plain", _late)):
            panels.append(_chart(kind, f"{kind.name}: {label}", value, colors))
    return charts.stacked(panels, title="Methods by kind of traffic and number of agents", columns=2)


def choice_table(traffic: Sequence[Traffic]) -> str:
    """Throughput over plain of every method, `/` P99 of a turn over plain; the best single method last."""
    names = _short_names(_methods(traffic))
    methods = [name for name in names if name != _PLAIN]
    heading = ["traffic", "agents", "plain, tok/s", *(names[name] for name in methods), "best single"]
    table = []
    for kind in traffic:
        for size in kind.sizes:
            here = kind.at(size)
            plain = here.get(_PLAIN)
            speeds = [f"{plain.tok_s:.1f}" if plain else "-", *(_factors(here, name) for name in methods)]
            table.append([kind.name, str(size), *speeds, names.get(_best_single(here), "-")])
    return markdown_table(heading, table)


def _methods(traffic: Sequence[Traffic]) -> list[str]:
    return list(dict.fromkeys(cell.method for kind in traffic for cell in kind.cells))


def _chart(kind: Traffic, label: str, value: _Value, colors: Mapping[str, str]) -> str:
    names = _short_names(colors)
    series = []
    for method in dict.fromkeys(cell.method for cell in kind.cells):
        points = [
            (size, found)
            for size in kind.sizes
            if (cell := kind.at(size).get(method)) and (found := value(kind.at(size), cell)) is not None
        ]
        series.append(
            Series(
                name=names[method],
                x=[x for x, _ in points],
                y=[y for _, y in points],
                color=colors[method],
                dashed=method in charts.DASHED,
            )
        )
    return charts.lines(
        series,
        x_label="agents at the same time",
        y_label=label,
        x_ticks=kind.sizes,
        log_x=len(kind.sizes) > 1,
    )


def _short_names(methods: Iterable[str]) -> dict[str, str]:
    """Without settings, unless two methods differ in nothing else."""
    short = {method: method.partition(":")[0] for method in methods}
    taken = Counter(short.values())
    return {method: name if taken[name] == 1 else method for method, name in short.items()}


def _speedup(_here: _Cells, cell: CellSummary) -> float | None:
    return cell.speedup


def _late(here: _Cells, cell: CellSummary) -> float | None:
    plain = here.get(_PLAIN)
    return ratio(cell.turn_p99_by_repeat, plain.turn_p99_by_repeat) if plain else None


def _factors(here: _Cells, method: str) -> str:
    cell = here.get(method)
    if cell is None or cell.speedup is None:
        return "-"
    late = _late(here, cell)
    spread = ""
    if cell.speedup_range and cell.speedup_range[0] < cell.speedup_range[1]:
        spread = " ({:.2f}-{:.2f})".format(*cell.speedup_range)
    return f"{cell.speedup:.2f}{spread} / {'-' if late is None else f'{late:.2f}'}"


def _best_single(here: _Cells) -> str:
    """The fastest method over plain of the same repeats; not ours beside a model drafter or a part of it."""
    single = [cell for name, cell in here.items() if not name.startswith("agentspec-")]
    if not single:
        return "-"
    return max(single, key=lambda cell: (cell.speedup or 0.0, cell.tok_s)).method
