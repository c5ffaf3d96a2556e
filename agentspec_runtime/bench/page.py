"""The shell of a report: one HTML file without scripts, and the same in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

__all__ = [
    "Report",
    "Section",
    "html_table",
    "markdown_table",
    "number",
    "origin",
    "report_of",
    "write_pages",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Heading, one sentence on how to read it, and the body as HTML and as Markdown ("" leaves it out)."""

    title: str
    lead: str
    html: str
    markdown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report in both forms."""

    html: str
    markdown: str


def report_of(
    title: str, intro: str, told: Sequence[str], doubted: Sequence[str], sections: Sequence[Section]
) -> Report:
    """What was found, what speaks against it, and the sections."""
    return Report(
        html=_html_page(title, intro, told, doubted, sections),
        markdown=_markdown_page(title, intro, told, doubted, sections),
    )


def origin(provenance: str) -> Section:
    """Where the numbers come from: the provenance file as it is."""
    return Section(
        title="Where this comes from",
        lead="Command, versions, machine, engine arguments of every method, and hashes of what was run.",
        html=f"<details><summary>Provenance</summary><pre>{escape(provenance)}</pre></details>",
        markdown=f"```json\n{provenance.strip()}\n```\n",
    )


def write_pages(report: Report, stem: Path) -> tuple[Path, Path]:
    """Write STEM.html and STEM.md; where they are."""
    html, markdown = stem.with_suffix(".html"), stem.with_suffix(".md")
    html.write_text(report.html, encoding="utf-8")
    markdown.write_text(report.markdown, encoding="utf-8")
    return html, markdown


def number(value: float | None, digits: int) -> str:
    """A number for a table, "-" for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def html_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the row of our own method stands out."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heading)
    body = "".join(
        f"<tr{' class=ours' if row[0] == 'agentspec' else ''}>"
        + "".join(f"<td>{escape(value)}</td>" for value in row)
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same in Markdown."""
    lines = ["| " + " | ".join(heading) + " |", "|" + " --- |" * len(heading)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2937;background:#fff;max-width:1320px}
body{margin:0 auto;padding:24px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 2px}
.intro,.lead,.note{color:#4b5563;max-width:95ch}.lead{margin:0 0 10px}
.told{font-size:17px;background:#eef6f2;border-left:4px solid #0b6e4f;padding:10px 16px;max-width:100ch}
.told p,.doubts p{margin:4px 0}
.doubts{background:#fdf6ec;border-left:4px solid #c2571a;padding:10px 16px;max-width:100ch}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(520px,1fr));gap:18px}
svg{width:100%;height:auto;max-width:680px}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}
th,td{padding:4px 8px;border-bottom:1px solid #e5e7eb;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}tr.ours td{background:#eef6f2;font-weight:600}
pre{white-space:pre-wrap;word-break:break-word;font-size:12px;background:#f9fafb;padding:12px}
"""


def _html_page(
    title: str, intro: str, told: Sequence[str], doubted: Sequence[str], sections: Sequence[Section]
) -> str:
    """One HTML file: title, what was found, what speaks against it, sections."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f'<h1>{escape(title)}</h1><p class="intro">{escape(intro)}</p>',
        '<div class="told">' + "".join(f"<p>{escape(line)}</p>" for line in told) + "</div>",
    ]
    if doubted:
        parts.append(
            '<div class="doubts"><p><b>Before you rely on it</b></p>'
            + "".join(f"<p>{escape(line)}</p>" for line in doubted)
            + "</div>"
        )
    parts += [
        f'<h2>{escape(section.title)}</h2><p class="lead">{escape(section.lead)}</p>{section.html}'
        for section in sections
    ]
    return "".join(parts) + "</body></html>\n"


def _markdown_page(
    title: str, intro: str, told: Sequence[str], doubted: Sequence[str], sections: Sequence[Section]
) -> str:
    """The same in Markdown, without charts."""
    parts = [f"# {title}\n", f"{intro}\n", "\n".join(f"- {line}" for line in told) + "\n"]
    if doubted:
        parts.append("Before you rely on it:\n\n" + "\n".join(f"- {line}" for line in doubted) + "\n")
    parts += [
        f"## {section.title}\n\n{section.lead}\n\n{section.markdown}"
        for section in sections
        if section.markdown
    ]
    return "\n".join(parts)
