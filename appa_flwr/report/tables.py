"""DataFrames as tables of the page, of a terminal or in Markdown.

Cells are texts, numbers, or intervals; the columns of a frame may have two levels. With `sign`, intervals are
differences: the estimate is shown, in bold if they exclude 0. Of levels the sample's number is shown. HTML is marked by
Jinja's `Markup`; all other text is escaped, since a group or a question may be called "<script>".
"""

import math
from collections.abc import Iterator

import pandas as pd
from markupsafe import Markup, escape
from rich.table import Table
from rich.text import Text

from appa_flwr.analysis.intervals import Interval
from appa_flwr.core import markdown as _markdown

DASH = "–"
DECIMALS = {"FI": 4, "FI readable": 4}
"""Column -> decimals; other columns have 3, as in the paper's tables."""


def show(frame: pd.DataFrame, *, title: str = "", sign: bool = False) -> Table:
    """Make a table for a terminal."""
    table = Table(title=Text(title) if title else None, title_justify="left")
    for levels in _heads(frame):
        table.add_column(Text("\n".join(filter(None, levels))))
    for row in _rows(frame, sign=sign):
        table.add_row(*(Text(text, "bold" if bold else "") for text, bold in row))
    return table


def html(frame: pd.DataFrame, *, caption: str = "", sign: bool = False, css: str = "") -> Markup:
    """Make a table for the page; empty for a frame without rows."""
    if frame.empty:
        return Markup("")
    texts = [
        [Markup("<b>{}</b>" if bold else "{}").format(text) for text, bold in row] for row in _rows(frame, sign=sign)
    ]
    cells = pd.DataFrame(texts, columns=frame.columns).rename(columns=lambda level: str(escape(level)))
    with pd.option_context("display.max_colwidth", None):
        table = Markup(cells.to_html(index=False, index_names=False, escape=False, border=0, classes=css or None))
    below = Markup('<p class="small">{}</p>').format(caption) if caption else ""
    return Markup('<div class="scroll">{}</div>{}').format(table, below)


def markdown(frame: pd.DataFrame, *, sign: bool = False) -> str:
    """Make a Markdown table for a comment or a card."""
    heads = (", ".join(filter(None, levels)) for levels in _heads(frame))
    rows = ([f"**{text}**" if bold else text for text, bold in row] for row in _rows(frame, sign=sign))
    return _markdown.table(heads, rows)


def _heads(frame: pd.DataFrame) -> list[tuple[str, ...]]:
    return [tuple(map(str, column if isinstance(column, tuple) else (column,))) for column in frame]


def _rows(frame: pd.DataFrame, *, sign: bool) -> Iterator[list[tuple[str, bool]]]:
    """Text of each cell, and whether it is bold."""
    decimals = [next((DECIMALS[level] for level in levels if level in DECIMALS), 3) for levels in _heads(frame)]
    for row in frame.astype(object).itertuples(index=False, name=None):
        yield [_text(cell, places, sign=sign) for cell, places in zip(row, decimals, strict=True)]


def _text(cell: object, decimals: int, *, sign: bool) -> tuple[str, bool]:
    if isinstance(cell, Interval):
        spec = f"{'+' if sign else ''}.{decimals}f"
        # no-break spaces, so that a narrow column breaks only between a value and its interval
        span = f" ({cell.low:{spec}}\xa0to\xa0{cell.high:{spec}})" if math.isfinite(cell.low) else ""
        around = f"\xa0±{cell.sd:.{decimals}f}" if not sign and math.isfinite(cell.sd) else ""
        return _number(cell.value if sign else cell.sample, spec) + around + span, sign and cell.excludes_zero
    if cell is None or isinstance(cell, float):
        return _number(cell, f".{decimals}f"), False
    return str(cell), False


def _number(value: float | None, spec: str) -> str:
    """Format a number, or a dash for a missing number."""
    known = value is not None and math.isfinite(value)
    return format(value, spec.replace(".", "z.", 1)) if known else DASH  # z: no negative zero
