"""Draw which text of an answer became a draft: an SVG for the documentation, made from a recording.

    python scripts/draw_drafts.py RECORDING.jsonl[.gz] OUT.svg [--trajectory N] [--request N] [--survival 0.3]

Every step of the target model is underlined once; tokens on a coloured ground were drafted and
accepted, struck-out ones drafted and rejected. Colours tell the source of the draft.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

import numpy as np

from agentspec_runtime.bench.chat_tokens import load_vocabulary
from agentspec_runtime.bench.ours import OurRival
from agentspec_runtime.bench.simulate import replay_request
from agentspec_runtime.bench.tally import Tally
from agentspec_runtime.bench.tokens import load_tokens
from agentspec_runtime.drafting import SOURCES, TokenTable
from agentspec_runtime.embedded import prepare_embedded_model

_COLOURS = {"request": "#cfe8cf", "session": "#cfe0f5", "corpus": "#f5e6c8"}
_COLUMNS, _LINE, _CHAR = 100, 20, 7.8
_LEGEND = 30


def spans_of(rival: OurRival, output: np.ndarray, vocabulary: TokenTable) -> list[tuple[str, str, bool]]:
    """(text, source or "" for sampled, rejected) in reading order, with the last request of `rival` open."""
    spans: list[tuple[str, str, bool]] = []
    position = 0
    rival.extend(output[:1])
    spans.append((_text(vocabulary, output[0]), "", False))
    position = 1
    while position < len(output):
        candidate = rival.draft(0)
        rest = output[position:]
        accepted = 0
        while (
            accepted < min(len(candidate.token_ids), len(rest))
            and candidate.token_ids[accepted] == rest[accepted]
        ):
            accepted += 1
        sources = candidate.sources if candidate.sources is not None else []
        spans.extend(
            (_text(vocabulary, rest[i]), str(SOURCES[int(sources[i])]), False) for i in range(accepted)
        )
        for i in range(accepted, min(len(candidate.token_ids), accepted + 3)):
            text = _text(vocabulary, candidate.token_ids[i]).replace("\n", "\u21b5")
            spans.append((text, str(SOURCES[int(sources[i])]), True))
        if accepted < len(rest):
            spans.append((_text(vocabulary, rest[accepted]), "", False))
        taken = rest[: accepted + 1]
        rival.extend(taken)
        position += len(taken)
    return spans


def _text(vocabulary: TokenTable, token: int) -> str:
    raw = bytes(vocabulary.text[vocabulary.offsets[token] : vocabulary.offsets[token + 1]])
    return raw.decode("utf-8", "replace")


def svg(spans: list[tuple[str, str, bool]], title: str, max_lines: int = 34) -> str:
    """The picture."""
    body: list[str] = []
    x = y = 0
    for text, source, rejected in spans:
        for piece in _lines(text):
            if piece == "\n" or x + len(piece) > _COLUMNS:
                x, y = 0, y + 1
                if piece == "\n":
                    continue
            if y >= max_lines:
                break
            left, top = 10 + x * _CHAR, _LEGEND + 14 + y * _LINE
            if source and not rejected:
                body.append(
                    f'<rect x="{left:.1f}" y="{top}" width="{len(piece) * _CHAR:.1f}" height="17" '
                    f'fill="{_COLOURS[source]}"/>'
                )
            style = ' fill="#b33" text-decoration="line-through"' if rejected else ""
            body.append(
                f'<text x="{left:.1f}" y="{top + 13}"{style} xml:space="preserve">{escape(piece)}</text>'
            )
            if not source:
                body.append(
                    f'<line x1="{left:.1f}" x2="{left + len(piece) * _CHAR - 1:.1f}" y1="{top + 17}" '
                    f'y2="{top + 17}" stroke="#333" stroke-width="1.5"/>'
                )
            x += len(piece)
    height = _LEGEND + 30 + (min(y, max_lines - 1) + 1) * _LINE
    legend = "".join(
        f'<rect x="{360 + 130 * i}" y="8" width="14" height="14" fill="{colour}"/>'
        f'<text x="{380 + 130 * i}" y="20">{name}</text>'
        for i, (name, colour) in enumerate(_COLOURS.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{20 + _COLUMNS * _CHAR:.0f}" height="{height}" '
        'font-family="DejaVu Sans Mono, monospace" font-size="13">'
        '<rect width="100%" height="100%" fill="white"/>'
        f'<text x="10" y="20" font-weight="bold">{escape(title)}</text>{legend}{"".join(body)}</svg>'
    )


def _lines(text: str) -> list[str]:
    out: list[str] = []
    for i, part in enumerate(text.split("\n")):
        if i:
            out.append("\n")
        if part:
            out.append(part.replace("\t", "    "))
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recording", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trajectory", type=int, default=0)
    parser.add_argument("--request", type=int, default=-1)
    parser.add_argument("--survival", type=float, default=0.3)
    arguments = parser.parse_args()
    model = str(prepare_embedded_model(print))
    trajectories = load_tokens(arguments.recording, model)
    vocabulary = load_vocabulary(model)
    rival = OurRival("agentspec", arguments.survival, vocabulary)
    for number, trajectory in enumerate(trajectories[: arguments.trajectory + 1]):
        requests = list(trajectory.requests)
        last = number == arguments.trajectory
        wanted = arguments.request % len(requests) if last else len(requests)
        for i, request in enumerate(requests[:wanted]):
            replay_request(rival, f"{number}#{i}", trajectory.id, request, [Tally()])
        if last:
            request = requests[wanted]
            rival.start("drawn", trajectory.id, request.prompt_ids)
            spans = spans_of(rival, request.output_ids, vocabulary)
            steps = sum(1 for _, source, _ in spans if not source)
            title = f"{len(request.output_ids)} tokens in {steps} steps"
            arguments.out.write_text(svg(spans, title), encoding="utf-8")
            print(f"{arguments.out}: {title}")


if __name__ == "__main__":
    main()
