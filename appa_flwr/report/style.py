"""Style of every picture: colours and one set of defaults.

Figures are built without pyplot, so no global state changes and no display is needed. Colours are Okabe and Ito's
palette for colour-blind readers; methods and rules also differ in marker or dash.
"""

import functools
import io
from collections.abc import Callable
from typing import Any, ParamSpec

import matplotlib as mpl
from matplotlib.figure import Figure

P = ParamSpec("P")

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#D6C613", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY, LIGHT_GREY, SHADE = "#767676", "#C4C4C4", "#E8E8E8"
GROUP_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, YELLOW, BLACK)

WIDTH = 7.0
"""Inches: 770 pixels. On a telephone a picture has half of that, and its letters can still be read."""
LONGEST_LABEL = 26

STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "savefig.dpi": 110,
    # The tight box includes labels that extend beyond the figure.
    "savefig.bbox": "tight",
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "lines.markersize": 4,
    "legend.frameon": False,
    # A group may be called "$50k-$100k", which is not a formula.
    "text.parse_math": False,
}


def picture(draw: Callable[P, Figure]) -> Callable[P, bytes]:
    """Decorate a function that draws a figure: it draws in our style and returns a PNG."""

    @functools.wraps(draw)
    def encoded(*args: P.args, **keywords: P.kwargs) -> bytes:
        with mpl.rc_context(STYLE):
            buffer = io.BytesIO()
            draw(*args, **keywords).savefig(buffer, format="png")
        return buffer.getvalue()

    return encoded


def label(name: str) -> str:
    """Shorten a name, and keep a legend from dropping it (matplotlib hides labels that start with "_")."""
    half = LONGEST_LABEL // 2
    # Cut in the middle, so that names with the same beginning ("... aged 18-29", "... aged 30-49") stay distinct.
    short = name if len(name) <= LONGEST_LABEL else name[: half - 1] + "…" + name[-half:]
    return " " + short if short.startswith("_") else short
