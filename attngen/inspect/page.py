"""The explanation of kernels as one HTML page that loads nothing: tiles of the mask, bands, plan, floors, source."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from attngen.errors import CallError
from attngen.inspect.explanation import Band, PlanExplanation
from attngen.render import render

#: Most kernels of a page: each has its source on it.
MOST = 12

#: Pixels of a tile along its shorter side, and colors of tiles of which some pairs are visible, all are.
_TILE, _FILLS = 12, ("#9cc3e6", "#1f5f99")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; margin: 0 auto; max-width: 1500px; padding: 0 24px 60px }
h1 { font-size: 24px } h2 { font-size: 19px; border-bottom: 2px solid #1f5f99; padding: 24px 0 4px; margin-top: 40px }
h3 { font-size: 16px; margin: 28px 0 8px } a { color: #1f5f99 }
td { white-space: pre-wrap } code, pre, .mono { font: 12.5px/1.45 ui-monospace, Menlo, Consolas, monospace }
table { border-collapse: collapse } td, th { text-align: left; vertical-align: top; padding: 3px 14px 3px 0 }
th { font-weight: 600; color: #51606f; white-space: nowrap }
td { overflow-wrap: anywhere } svg { max-width: 100%; height: auto }
.row { display: flex; flex-wrap: wrap; gap: 36px; align-items: flex-start } .row > div { flex: 1 1 320px; min-width: 0 }
.key { display: inline-block; width: 12px; height: 12px; border: 1px solid #888; margin: 0 5px 0 14px }
.bar { background: #9cc3e6; height: 13px; display: inline-block; vertical-align: middle; margin-right: 8px }
.bar.binding { background: #d9772b }
.source { width: 100%; table-layout: fixed; border-top: 1px solid #d5dce3 }
.source td { border-bottom: 1px solid #eef1f4; padding: 4px 12px 4px 0 }
.source td:first-child { width: 70% } .source pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere }
.source .n { color: #a3afba; display: inline-block; width: 38px; user-select: none }
.note { color: #51606f } .note b { color: #a04a00 }
@media (max-width: 800px) {
  th { white-space: normal } .source tr, .source td, .source td:first-child { display: block; width: auto }
}
"""


def page(title: str, explanations: Sequence[PlanExplanation]) -> str:
    """The page of some kernels. Raises CallError for too many."""
    if len(explanations) > MOST:
        raise CallError(
            f"{len(explanations)} kernels are too many for one page, at most {MOST}; name one of them, or a part of "
            "their names"
        )
    links = " · ".join(f'<a href="#{escape(e.plan.name)}">{escape(e.plan.name)}</a>' for e in explanations)
    body = "\n".join("\n".join(_kernel(explanation)) for explanation in explanations)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{f'<p>{links}</p>' if len(explanations) > 1 else ''}\n{body}\n</body>\n</html>\n"
    )


def _kernel(explanation: PlanExplanation) -> Iterator[str]:
    plan = explanation.plan
    yield f'<h2 id="{escape(plan.name)}">{escape(plan.name)}</h2>'
    yield '<div class="row">'
    yield f"<div><h3>Summary</h3>{_table(explanation.summary())}{_bands(explanation)}</div>"
    if explanation.tiles:
        yield f"<div><h3>Tiles</h3>{_tiles(explanation)}</div>"
    yield f"</div>{_visits(explanation)}"
    if explanation.schedule.floor is not None:
        yield f"<h3>Floor of a step</h3>{_floor(explanation)}"
    yield f"<h3>Plan</h3>{_table(explanation.facts(), 'mono')}"
    lines = list(explanation.schedule.floor_lines())
    if explanation.gradients:
        lines += explanation.gradients.lines()
    if lines:
        yield f"<details><summary>Floors in detail</summary><pre>{escape(chr(10).join(lines))}</pre></details>"
    yield f"<h3>Source</h3>{_source(render(plan).text, '//' if plan.backend == 'cuda' else '#')}"


def _table(rows: Sequence[tuple[str, str]], kind: str = "") -> str:
    cell = f'<td class="{kind}">' if kind else "<td>"
    cells = "".join(f"<tr><th>{escape(label)}</th>{cell}{escape(text)}</td></tr>" for label, text in rows)
    return f"<table>{cells}</table>"


def _bands(explanation: PlanExplanation) -> str:
    parts = [("some query sees", explanation.visible), ("all queries see", explanation.full)]
    if explanation.plan.direction == "backward":
        some, every = explanation.queries
        parts += [("some key is seen", some), ("all keys are seen", every)]
    rows = "".join(f"<tr><th>{label}</th><td class=mono>{_intervals(bands)}</td></tr>" for label, bands in parts)
    inexact = (
        "" if explanation.exact else "<p>Bands cannot express all of the mask: tiles are classified one by one.</p>"
    )
    return f"<h3>Bands</h3><table>{rows}</table>{inexact}"


def _intervals(bands: Sequence[Band]) -> str:
    return "<br>or ".join(escape(str(band)) for band in bands) or "none for certain"


def _tiles(explanation: PlanExplanation) -> str:
    """The tiles of the mask as SVG; each says its queries and keys where the mouse is over it."""
    plan, tiles = explanation.plan, explanation.tiles
    scale = _TILE / min(plan.tile_m, plan.tile_n)
    high, wide = plan.tile_m * scale, plan.tile_n * scale
    width, height = wide * len(tiles[0]), high * len(tiles)
    kinds = ("", "partial", "full")
    shapes = [
        f'<rect x="{wide * j:.4g}" y="{high * i:.4g}" width="{wide:.4g}" height="{high:.4g}" '
        f'fill="{_FILLS[kind - 1]}" stroke="#fff" stroke-width=".6"><title>queries from {i * plan.tile_m}, keys from '
        f"{j * plan.tile_n}: {kinds[kind]}</title></rect>"
        for i, row in enumerate(tiles)
        for j, kind in enumerate(row)
        if kind
    ]
    shown = ", of the first head and sequence" if explanation.place.startswith("all") else ""
    legend = "".join(
        f'<span class="key" style="background:{fill}"></span>{text}'
        for fill, text in ((_FILLS[1], "full: mask skipped"), (_FILLS[0], "partial"), ("#fff", "never loaded"))
    )
    return (
        f'<svg viewBox="-1 -1 {width + 2:.6g} {height + 2:.6g}" width="{min(width + 2, 560):.6g}" role="img">'
        f'<rect width="{width:.6g}" height="{height:.6g}" fill="#fff" stroke="#888"/>{"".join(shapes)}</svg>'
        f"<p>{explanation.tiles_seqlen} queries down, keys across, in tiles of {plan.tile_m} x {plan.tile_n}{shown}<br>"
        f"{legend}</p>"
    )


def _visits(explanation: PlanExplanation) -> str:
    if not explanation.visits:
        return "<p>Tiles are counted where torch is installed.</p>"
    times = dict(explanation.predicted)
    head = "<tr><th>tokens</th><th>full tiles</th><th>partial tiles</th><th>visible of the multiplied pairs</th>"
    head += "<th>predicted</th></tr>" if times else "</tr>"
    rows = "".join(
        f"<tr><td>{v.seqlen}</td><td>{v.full}</td><td>{v.partial}</td><td>{100 * v.efficiency:.1f} %</td>"
        + (f"<td>{times[v.seqlen]:.1f} µs</td>" if v.seqlen in times else "<td></td>" if times else "")
        + "</tr>"
        for v in explanation.visits
    )
    values = ", ".join(f"{name} = {value}" for name, value in explanation.scalars.items())
    tensors = "".join(f"<br>{escape(name)}: {escape(text)}" for name, text in explanation.tensors.items())
    assumed = f" (assumed: {', '.join(explanation.assumed)})" if explanation.assumed else ""
    given = f"<p>{escape(explanation.place)}{f'; {escape(values + assumed)}' if values else ''}{tensors}</p>"
    return f"<h3>Visits</h3><table>{head}{rows}</table>{given}"


def _floor(explanation: PlanExplanation) -> str:
    floor = explanation.schedule.floor
    assert floor is not None
    clocks = {name: floor.consumers * each for name, each in floor.parts.items()}
    most = max(clocks.values(), default=0) or 1
    rows = "".join(
        f'<tr><th>{escape(name)}</th><td><span class="bar{" binding" if name in floor.binding else ""}" '
        f'style="width:{360 * value / most:.0f}px"></span>{value} clocks</td></tr>'
        for name, value in clocks.items()
    )
    return f"<table>{rows}</table>"


def _source(text: str, comment: str) -> str:
    """The source in a column, and beside each run of lines the comment above it."""
    rows: list[tuple[list[str], list[str]]] = []
    note: list[str] = []
    code: list[str] = []
    lines = text.rstrip("\n").split("\n")
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if stripped.startswith(comment) and not stripped.startswith("#include"):
            if code:
                rows.append((note, code))
                note, code = [], []
            note.append(stripped.removeprefix(comment).strip())
        else:
            code.append(f'<span class="n">{number}</span>{escape(line)}')
    rows.append((note, code))
    cells = "".join(
        f'<tr><td><pre>{chr(10).join(code)}</pre></td><td class="note">{_math(" ".join(note))}</td></tr>'
        for note, code in rows
        if note or any(re.sub("<.*?>", "", line).strip() for line in code)
    )
    return f'<table class="source">{cells}</table>'


def _math(text: str) -> str:
    """A comment with its formulas in bold."""
    text = escape(text).replace("^T", "ᵀ")
    return re.sub(r"(?<![\w&])((?:dS|dP|dQ|dK|dV|S|P|O) \+?= [^.,:;]+)", r"<b>\1</b>", text)
