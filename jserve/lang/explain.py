"""A program's tree, for people: as text and as an HTML page.

Takes the steps of a trace or of a run (record.py) and says, for each place, what is constant, what
is generated under which constraint, where it branches, and for a run what was reused and computed.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from jserve.lang.backends.base import Usage
from jserve.lang.record import Step, total_usage

_WIDTH = 60  # characters of a text that are shown


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A row of the picture. `prefix`: part of the text that every run begins with."""

    depth: int
    kind: str
    text: str
    place: str = ""
    usage: Usage | None = None
    prefix: bool = False


def lines_of(steps: Sequence[Step], prefix_len: int = 0) -> list[Line]:
    """The rows of a tree, consecutive texts as one. `prefix_len` characters begin every run."""
    return list(_lines(steps, 0, prefix_len))


def as_text(name: str, steps: Sequence[Step], prefix_len: int = 0) -> str:
    rows = [name]
    for line in lines_of(steps, prefix_len):
        mark = "═" if line.prefix else "─"
        row = f"{'│  ' * line.depth}├{mark} {line.kind:<8} {line.text}"
        cost = "" if line.usage is None else f"  [{_cost(line.usage)}]"
        rows.append(f"{row}{cost}{'  ' if line.place else ''}{line.place}")
    total = total_usage(steps)
    if total.num_calls:
        rows.append(f"{total.num_calls} calls: {_cost(total)}")
    if prefix_len:
        rows.append("═ the text that every run begins with")
    return "\n".join(rows) + "\n"


def as_html(name: str, steps: Sequence[Step], prefix_len: int = 0) -> str:
    """A page of its own, without scripts and without anything from elsewhere."""
    lines, total = lines_of(steps, prefix_len), total_usage(steps)
    used = [line.usage for line in lines if line.usage is not None]
    widest = max((one.prompt_tokens + one.completion_tokens for one in used), default=0)
    rows = "\n".join(_row(line, widest) for line in lines)
    summary = f"{total.num_calls} calls: {_cost(total)}" if total.num_calls else "not run"
    title = html.escape(name)
    return (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{title}</title>\n"
        f"<style>{_STYLE}</style>\n<h1>{title}</h1>\n<p>{summary}. "
        "<span class=prefix>Grey ground</span>: the text that every run begins with. Bars: tokens "
        "of a prompt, <b class=cached>reused</b> and <b class=computed>computed</b>, and "
        f"<b class=made>generated</b> ones.</p>\n<table>\n{rows}\n</table>\n</html>\n"
    )


_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;max-width:75em}"
    "table{border-collapse:collapse}td{padding:.2em .8em;vertical-align:top}"
    "td.text{font-family:monospace;white-space:pre-wrap}td.place{color:#888}"
    ".prefix{background:#eee}.kind{font-weight:600}svg{display:block}"
    ".cached{color:#2a9d5c}.computed{color:#8e3a8e}.made{color:#3b6fd4}"
)
_BAR, _HEIGHT = 260, 14  # pixels


def _row(line: Line, widest: int) -> str:
    ground = ' class="prefix"' if line.prefix else ""
    indent = f"padding-left:{0.8 + 1.6 * line.depth:.1f}em"
    cells = (
        f'<td class="kind" style="{indent}">{line.kind}</td>',
        f'<td class="text">{html.escape(line.text)}</td>',
        f"<td>{_bar(line.usage, widest)}</td>",
        f'<td class="place">{html.escape(line.place)}</td>',
    )
    return f"<tr{ground}>{''.join(cells)}</tr>"


def _bar(usage: Usage | None, widest: int) -> str:
    if usage is None:
        return ""
    scale = _BAR / max(widest, 1)
    parts = (
        (usage.cached_tokens, "#2a9d5c"),
        (usage.computed_tokens, "#8e3a8e"),
        (usage.completion_tokens, "#3b6fd4"),
    )
    at, shapes = 0.0, []
    for tokens, colour in parts:
        width = tokens * scale
        shapes.append(
            f'<rect x="{at:.1f}" width="{width:.1f}" height="{_HEIGHT}" fill="{colour}"/>'
        )
        at += width
    picture = f'<svg width="{at:.0f}" height="{_HEIGHT}">{"".join(shapes)}</svg>'
    return f"{picture}{_cost(usage)}"


def _lines(steps: Sequence[Step], depth: int, prefix_len: int) -> Iterator[Line]:
    text, place = "", ""
    for step in list(steps):
        if step.kind in ("text", "role"):
            place = place or _place(step)
            text += step.text
            continue
        yield from _text_lines(depth, text, place, prefix_len)
        text, place, prefix_len = "", "", 0
        yield Line(depth, step.kind, _words(step), _place(step), step.usage)
        for number, branch in enumerate(step.branches):
            if step.kind == "fork":
                yield Line(depth + 1, "branch", str(number))
            yield from _lines(branch, depth + 2, 0)
    yield from _text_lines(depth, text, place, prefix_len)


def _text_lines(depth: int, text: str, place: str, prefix_len: int) -> Iterator[Line]:
    """The part that every run begins with, and the rest."""
    for part, prefix in ((text[:prefix_len], True), (text[prefix_len:], False)):
        if part:
            yield Line(depth, "text", _quoted(part), place, prefix=prefix)


def _words(step: Step) -> str:
    """What is special about a step, in a row's words."""
    name = step.name or ""
    answer = f"= {_quoted(step.text)}" if step.text and step.usage is not None else step.text
    detail = {
        "fork": f"into {step.detail}",
        "commit": f"shared by {step.detail} branches",
    }.get(step.kind, f"({_cut(step.detail)})" if step.detail else "")
    return " ".join(part for part in (name, detail, answer) if part)


def _cost(usage: Usage) -> str:
    made = f", {usage.completion_tokens} generated" if usage.completion_tokens else ""
    return f"{usage.cached_tokens} reused, {usage.computed_tokens} computed{made}"


def _place(step: Step) -> str:
    return f"{Path(step.site.file).name}:{step.site.line}"


def _quoted(text: str) -> str:
    return f"{_cut(text)!r}" + (f" ({len(text)} characters)" if len(text) > _WIDTH else "")


def _cut(text: str) -> str:
    half = _WIDTH // 2
    return text if len(text) <= _WIDTH else f"{text[:half]}…{text[-half:]}"
