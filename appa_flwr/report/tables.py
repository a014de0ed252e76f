"""A DataFrame as a table of the page, of a terminal or in Markdown: the only places where numbers become text.

Cells are texts, numbers, or intervals; the columns of a frame may have two levels. Jinja's `Markup` marks what is
HTML, all else is escaped: a group or a question may be called "<script>".
"""

from __future__ import annotations

import math

import pandas as pd
from markupsafe import Markup, escape
from rich.table import Table
from rich.text import Text

from appa_flwr.analysis.intervals import Interval
from appa_flwr.core import markdown as _markdown

DASH = "–"
DECIMALS = {"FI": 4, "FI readable": 4, "Skill": 1}
"""Of other columns 3, as many as the paper's tables show."""


def show(frame: pd.DataFrame, *, title: str = "", sign: bool = False) -> Table:
    """For a terminal."""
    table = Table(title=Text(title) if title else None, title_justify="left")
    for column in frame:
        table.add_column(Text("\n".join(filter(None, map(str, _levels(column))))))
    for row in _texts(frame, sign=sign).itertuples(index=False):
        table.add_row(*(Text(text, "bold" if bold else "") for text, bold in row))
    return table


def html(frame: pd.DataFrame, *, caption: str = "", sign: bool = False, css: str = "") -> Markup:
    """For the page; empty for a frame without rows."""
    if frame.empty:
        return Markup("")
    cells = _texts(frame, sign=sign).map(lambda cell: Markup("<b>{}</b>" if cell[1] else "{}").format(cell[0]))
    heads = [tuple(str(escape(level)) for level in _levels(column)) for column in frame]
    cells.columns = pd.MultiIndex.from_tuples(heads) if frame.columns.nlevels > 1 else pd.Index([h for (h,) in heads])
    with pd.option_context("display.max_colwidth", None):
        table = cells.to_html(index=False, escape=False, border=0, classes=css or None)
    below = Markup('<p class="small">{}</p>').format(caption) if caption else ""
    return Markup('<div class="scroll">{}</div>{}').format(Markup(table), below)


def markdown(frame: pd.DataFrame, *, sign: bool = False) -> str:
    """For a comment or a card."""
    heads = [", ".join(filter(None, map(str, _levels(column)))) for column in frame]
    rows = _texts(frame, sign=sign).itertuples(index=False)
    return _markdown.table(heads, ([f"**{text}**" if bold else text for text, bold in row] for row in rows))


def _levels(column: object) -> tuple[object, ...]:
    return column if isinstance(column, tuple) else (column,)


def _texts(frame: pd.DataFrame, *, sign: bool) -> pd.DataFrame:
    """(text, whether it is bold) of each cell; `sign` is for intervals of differences, bold where these leave 0."""
    texts = frame.astype(object).copy()
    for place, column in enumerate(frame):
        decimals = next((DECIMALS[level] for level in map(str, _levels(column)) if level in DECIMALS), 3)
        texts.isetitem(place, [_text(cell, decimals, sign=sign) for cell in frame.iloc[:, place]])
    return texts


def _text(cell: object, decimals: int, *, sign: bool) -> tuple[str, bool]:
    if isinstance(cell, Interval):
        spec = f"{'+' if sign else ''}.{decimals}f"
        # no-break spaces: a narrow column breaks between a value and its interval alone
        span = f" ({cell.low:{spec}}\xa0to\xa0{cell.high:{spec}})" if math.isfinite(cell.low) else ""
        return number(cell.value, spec) + span, sign and cell.excludes_zero
    if cell is None or isinstance(cell, float):
        return number(cell, f".{decimals}f"), False
    return str(cell), False


def number(value: float | None, spec: str = ".3f") -> str:
    """A number, or a dash where it was not measured."""
    known = value is not None and math.isfinite(value)
    return format(value, spec.replace(".", "z.", 1)) if known else DASH  # z: no negative zero
