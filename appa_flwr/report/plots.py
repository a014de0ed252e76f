"""The pictures of a report, each drawn by one function from typed values and returned as the bytes of a PNG.

Figures are built without pyplot, so nothing global is touched and no display is needed. Colours are those of
Okabe and Ito, which the colour-blind tell apart; policies and rules differ in marker or dash too.

Axis letters: G groups, I iterations.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from appa_flwr.report import predictor
from appa_flwr.report.artifacts import Iteration, Phase, Round, is_known, write_atomically
from appa_flwr.report.findings import Way
from appa_flwr.report.predictor import ContextCurve, GroupScores

FloatArray = npt.NDArray[np.float64]

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#D6C613",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
GREY, LIGHT_GREY, SHADE = "#767676", "#C4C4C4", "#E8E8E8"
GROUP_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, YELLOW, BLACK)
GROUP_DASHES, GROUP_MARKERS = ("-", "--"), ("o", "s")
"""The second of each from the ninth named group on."""

POLICY_STYLE: Mapping[str, tuple[str, str, str, str]] = {
    # policy: (name, colour, marker, dash)
    "base": ("Base", GREY, "s", "--"),
    "sft": ("SFT", BLUE, "^", "-."),
    "ppo": ("PPO", VERMILION, "o", "-"),
    "uniform": ("Uniform answer", BLACK, "x", ":"),
    "majority": ("Majority answer", PURPLE, "P", ":"),
    "ceiling-average": ("Ceiling (average)", GREEN, "D", ":"),
    "ceiling-min": ("Ceiling (worst group)", GREEN, "v", ":"),
}
RULE_STYLE: Mapping[str, tuple[str, str]] = {
    "average": (BLUE, "o"),
    "min": (PURPLE, "s"),
    "appa": (VERMILION, "*"),
}
LEVEL_DASHES: Mapping[str, str] = {"mean-of-others": "-.", "nearest-question": "--", "uniform": ":"}
OTHER_RULE_STYLES = tuple(zip((GREEN, ORANGE, SKY, YELLOW, BLACK), "^PdX<", strict=True))

DOTS_PER_INCH = 110
WIDTH = 10.0
"""Inches: 1100 pixels, the width at which the page shows a picture without scaling it."""

MOST_NAMED_GROUPS = 12
"""Above this, lines of single groups cannot be told apart: all are grey and the extremes are named."""
NAMED_LOWEST, NAMED_HIGHEST = 4, 3
MOST_MARKED_ITERATIONS = 30
SMOOTHING_WINDOW = 5
LONGEST_LABEL = 26

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "white",
    # A group may be called "$50k-$100k": that is no formula.
    "text.parse_math": False,
}


@dataclass(frozen=True)
class TradeOffPoint:
    """One rule, or one reference answer, in the plane of Avg AS and Min AS.

    Attributes:
        name: the rule's or reference's name.
        avg_as: Avg AS of each seed, in [0, 1].
        min_as: Min AS of the same seeds, as many as `avg_as`.
        reference: True for an answer no rule trained (uniform, ceilings): drawn hollow, without spread.
    """

    name: str
    avg_as: tuple[float, ...]
    min_as: tuple[float, ...]
    reference: bool = False


def _label(name: str) -> str:
    """A name that fits, and that a legend does not drop (matplotlib hides labels that start with "_")."""
    half = LONGEST_LABEL // 2
    # Cut in the middle: names that share a beginning ("... aged 18-29", "... aged 30-49") stay apart.
    short = name if len(name) <= LONGEST_LABEL else name[: half - 1] + "…" + name[-half:]
    return " " + short if short.startswith("_") else short


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(draw: Callable[[], Figure]) -> bytes:
    """Draws under our style and encodes; the tight box keeps every label that sticks out inside."""
    with mpl.rc_context(STYLE):
        figure = draw()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, bbox_inches="tight", pad_inches=0.1)
    return buffer.getvalue()


def _as_array(values: Iterable[float | None]) -> FloatArray:
    """Numbers with NaN, which leaves a gap in a line, for those not measured."""
    return np.array([float("nan") if value is None or not is_known(value) else value for value in values])


def _spread(positions: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Moves positions apart so that labels placed there do not overlap.

    Args:
        positions: where the labels would like to be.
        gap: least distance between two of them; shrunk where they cannot all fit.
        low: the least position allowed.
        high: the greatest.

    Returns:
        A position for each, in the order given, at least `gap` apart and ordered as they were.
    """
    count = len(positions)
    gap = min(gap, (high - low) / max(count - 1, 1))
    order = sorted(range(count), key=lambda index: positions[index])
    rightwards, leftwards = [0.0] * count, [0.0] * count
    previous, following = -math.inf, math.inf
    for index in order:
        rightwards[index] = previous = max(positions[index], previous + gap)
    for index in reversed(order):
        leftwards[index] = following = min(positions[index], following - gap)
    # Both keep the gaps, so their mean does, and it leaves nobody pushed to one side only.
    placed = [(right + left) / 2 for right, left in zip(rightwards, leftwards, strict=True)]
    for rank, index in enumerate(order):
        placed[index] = max(placed[index], low + rank * gap)
    for rank, index in enumerate(reversed(order)):
        placed[index] = min(placed[index], high - rank * gap)
    return placed


def _mark_points(count: int) -> str | None:
    """A marker for short curves, where a single point would show no line."""
    return "o" if count <= MOST_MARKED_ITERATIONS else None


def _iteration_axis(axes: Axes, iterations: Sequence[Iteration], *, label: bool = True) -> None:
    first, last = iterations[0].iteration, iterations[-1].iteration
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    if label:
        axes.set_xlabel("PPO iteration")


def _shade_fall_back(axes: Axes, iterations: Sequence[Iteration]) -> None:
    """Greys the iterations in which the rule took the plain mean, neighbours as one strip."""
    start: int | None = None
    for position, line in enumerate(iterations):
        if line.fell_back and start is None:
            start = line.iteration
        follows = position + 1 < len(iterations) and iterations[position + 1].fell_back
        if start is not None and not follows:
            axes.axvspan(start - 0.5, line.iteration + 0.5, color=SHADE, linewidth=0, zorder=0)
            start = None


# --- per group ------------------------------------------------------------------------------------


def spider(per_group: Mapping[str, Mapping[str, float]], groups: Sequence[str], *, metric: str) -> bytes:
    """Per-group alignment scores of several policies on one polar picture.

    Source: "Per-Group Alignment: Spider Plot Analysis".

    Args:
        per_group: policy -> group -> score in [0, 1]; drawn in this order; without a score there is a gap.
        groups: three or more group names, clockwise from the top.
        metric: its name, for the title.

    Returns:
        A PNG. The radial axis does not start at 0 (it says where), since scores differ by a few hundredths.

    Raises:
        ValueError: fewer than three groups.
    """
    least = 3
    if len(groups) < least:
        raise ValueError(f"a spider plot needs {least} groups or more, got {len(groups)}")

    def draw() -> Figure:
        many = len(groups) > MOST_NAMED_GROUPS
        figure = _figure(9.0, 8.0 if many else 6.5)
        axes: Any = figure.add_subplot(projection="polar")
        angles_G = np.linspace(0, 2 * np.pi, len(groups), endpoint=False)
        closed_G = np.append(angles_G, angles_G[0])
        for policy, scores in per_group.items():
            name, colour, marker, dash = POLICY_STYLE[policy]
            values_G = _as_array(scores.get(group) for group in groups)
            axes.plot(
                closed_G,
                np.append(values_G, values_G[0]),
                color=colour,
                linestyle=dash,
                marker=marker,
                markersize=4,
                linewidth=2.2 if policy == "ppo" else 1.5,
                label=name,
                zorder=4 if policy == "ppo" else 3,
            )
            if policy == "ppo" and np.isfinite(values_G).all():
                axes.fill(closed_G, np.append(values_G, values_G[0]), color=colour, alpha=0.12)
        measured = [value for scores in per_group.values() for value in scores.values() if is_known(value)]
        step = 0.05
        floor = max(0.0, math.floor(min(measured, default=0.0) / step - 0.5) * step)
        top = min(1.0, math.ceil(max(measured, default=1.0) / step) * step)
        axes.set_theta_offset(np.pi / 2)
        axes.set_theta_direction(-1)
        axes.set_ylim(floor, top)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], prune="upper"))
        # Between two spokes, so that the numbers do not lie on a line of scores.
        axes.set_rlabel_position(180.0 / len(groups) if not many else 540.0 / len(groups))
        axes.tick_params(axis="y", labelsize=8, labelcolor="#444444", zorder=10)
        _name_spokes(axes, angles_G, groups, rim=top, upright=not many)
        title = f"Alignment score per group ({metric}); the centre is {floor:.2f}, the rim {top:.2f}"
        figure.suptitle(title, fontsize=11)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
        return figure

    return _png(draw)


def _name_spokes(axes: Any, angles_G: FloatArray, groups: Sequence[str], *, rim: float, upright: bool) -> None:
    """Writes each group's name outside its spoke, along the spoke where upright ones would collide."""
    axes.set_xticks(angles_G, [])
    quarter, half, full = 90.0, 180.0, 360.0
    edge = 1e-6
    for angle, group in zip(np.degrees(angles_G), groups, strict=True):
        right, top_or_bottom = angle < half, min(angle % half, half - angle % half) < edge
        rotation = 0.0
        if not upright:
            rotation = quarter - angle if right else 3 * quarter - angle
        across = "center" if upright and top_or_bottom else ("left" if right else "right")
        upward = "center"
        if upright and top_or_bottom:
            upward = "bottom" if angle % full < quarter else "top"
        axes.annotate(
            _label(group),
            xy=(math.radians(angle), rim),
            xytext=_outwards(angle),
            textcoords="offset points",
            ha=across,
            va=upward,
            rotation=rotation,
            rotation_mode="anchor",
            fontsize=10 if upright else 8,
            annotation_clip=False,
        )


def _outwards(angle: float) -> tuple[float, float]:
    """An offset in points away from the centre; the angle is in degrees, clockwise from the top."""
    distance = 6.0
    return distance * math.sin(math.radians(angle)), distance * math.cos(math.radians(angle))


def _smoothed(values_I: FloatArray, window: int) -> FloatArray:
    """Centred mean over up to `window` measured neighbours; an iteration without a value stays without."""
    half = window // 2
    smooth_I = np.full_like(values_I, np.nan)
    for position in np.flatnonzero(np.isfinite(values_I)):
        smooth_I[position] = np.nanmean(values_I[max(0, position - half) : position + half + 1])
    return smooth_I


def _last_known(values_I: FloatArray) -> float:
    known = values_I[np.isfinite(values_I)]
    return float(known[-1]) if known.size else float("nan")


def group_curves(
    iterations: Sequence[Iteration],
    groups: Sequence[str],
    pick: Callable[[Iteration], Mapping[str, float | None]],
    *,
    title: str,
    axis: str,
    smooth: bool = False,
    shade: bool = False,
    level: float | None = None,
) -> bytes:
    """One line a group over the iterations.

    Up to `MOST_NAMED_GROUPS` groups each has its colour and dash, named at the right in the order in which
    the lines end. Of more, all are grey and only the lowest and highest at the end are named.

    Args:
        iterations: one or more.
        groups: group names.
        pick: the value per group of an iteration; an absent or None one leaves a gap.
        title: what the picture shows.
        axis: the y axis with its unit.
        smooth: draw a centred mean over `SMOOTHING_WINDOW` iterations of long runs (the title then says so).
        shade: grey the iterations in which the rule took the plain mean.
        level: a value to mark by a dotted line, such as the equal weight.

    Returns:
        A PNG.
    """
    smooth = smooth and len(iterations) > MOST_MARKED_ITERATIONS

    def draw() -> Figure:
        figure = _figure(WIDTH, 4.4)
        axes = figure.add_subplot()
        steps_I = [line.iteration for line in iterations]
        curves: dict[str, FloatArray] = {}
        for group in groups:
            values_I = _as_array(pick(line).get(group) for line in iterations)
            curves[group] = _smoothed(values_I, SMOOTHING_WINDOW) if smooth else values_I
        ends = {group: _last_known(values_I) for group, values_I in curves.items()}
        ranked = sorted((group for group in groups if math.isfinite(ends[group])), key=ends.__getitem__)
        if len(groups) <= MOST_NAMED_GROUPS:
            named = {group: number for number, group in enumerate(groups) if group in ranked}
        else:
            extremes = ranked[:NAMED_LOWEST] + ranked[NAMED_LOWEST:][-NAMED_HIGHEST:]
            named = {group: number for number, group in enumerate(extremes)}
            for group in groups:
                axes.plot(steps_I, curves[group], color=LIGHT_GREY, linewidth=0.8, zorder=2)
        handles: dict[str, Line2D] = {}
        for group, number in named.items():
            (handles[group],) = axes.plot(
                steps_I,
                curves[group],
                color=GROUP_COLOURS[number % len(GROUP_COLOURS)],
                linewidth=1.6,
                zorder=3,
                linestyle=GROUP_DASHES[number // len(GROUP_COLOURS)],
                marker=GROUP_MARKERS[number // len(GROUP_COLOURS)] if _mark_points(len(steps_I)) else None,
                markersize=3.5,
            )
        if level is not None:
            axes.axhline(level, color="#444444", linestyle=":", linewidth=1.2)
        if shade:
            _shade_fall_back(axes, iterations)
        order = [group for group in reversed(ranked) if group in named]
        heading = None if len(groups) <= MOST_NAMED_GROUPS else f"extremes of {len(groups)} at the end"
        figure.legend(
            [handles[group] for group in order],
            [_label(group) for group in order],
            loc="outside right center",
            title=heading,
            fontsize=9,
            title_fontsize=9,
        )
        _iteration_axis(axes, iterations)
        axes.set_ylabel(axis)
        axes.set_title(title + (f" (mean over {SMOOTHING_WINDOW} iterations)" if smooth else ""))
        return figure

    return _png(draw)


# --- training -------------------------------------------------------------------------------------


def fairness(iterations: Sequence[Iteration], *, threshold: float | None, title: str) -> bytes:
    """FI over the iterations, with the threshold and the iterations in which the rule took the plain mean.

    Source: Equation "fi".

    Args:
        iterations: one or more.
        threshold: the rule's tau, None for a rule without; above 1 (never fall back) it is not drawn.
        title: what the picture shows.

    Returns:
        A PNG.
    """

    def draw() -> Figure:
        figure = _figure(WIDTH, 3.8)
        axes = figure.add_subplot()
        _shade_fall_back(axes, iterations)
        axes.plot(
            [line.iteration for line in iterations],
            _as_array(line.fairness_index for line in iterations),
            color=BLUE,
            linewidth=1.8,
            marker=_mark_points(len(iterations)),
            markersize=4,
            label="FI",
            zorder=3,
        )
        if threshold is not None and threshold <= 1:
            axes.axhline(threshold, color=VERMILION, linestyle="--", linewidth=1.4, label=f"threshold {threshold:g}")
        if any(line.fell_back for line in iterations):
            axes.fill_between([], [], color=SHADE, label="plain mean taken")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
        _iteration_axis(axes, iterations)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_ylabel("fairness index (0 to 1)")
        axes.set_title(title)
        return figure

    return _png(draw)


def ppo_health(iterations: Sequence[Iteration]) -> bytes:
    """Small pictures of what tells a healthy PPO from a sick one.

    Args:
        iterations: one or more.

    Returns:
        A PNG of eight panels.
    """
    panels: tuple[tuple[str, str, Callable[[Iteration], float]], ...] = (
        ("Aggregated reward", "mean, 0 to 1", lambda line: line.reward),
        ("Format score", "mean, 0 to 1", lambda line: line.format_score),
        ("KL to the reference", "nats", lambda line: line.kl),
        ("Entropy", "nats per token", lambda line: line.entropy),
        ("Policy loss", "loss", lambda line: line.policy_loss),
        ("Value loss", "loss", lambda line: line.value_loss),
        ("Clipped tokens", "share, 0 to 1", lambda line: line.clip_fraction),
        ("Response length", "tokens", lambda line: line.response_length),
    )
    columns = 2

    def draw() -> Figure:
        rows = len(panels) // columns
        figure = _figure(WIDTH, 2.1 * rows)
        for position, (name, unit, pick) in enumerate(panels):
            axes = figure.add_subplot(rows, columns, position + 1)
            values_I = _as_array(pick(line) for line in iterations)
            axes.plot(
                [line.iteration for line in iterations],
                values_I,
                color=BLUE,
                linewidth=1.5,
                marker=_mark_points(len(iterations)),
                markersize=3.5,
            )
            _iteration_axis(axes, iterations, label=position >= len(panels) - columns)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
            axes.ticklabel_format(axis="y", useOffset=False)
            axes.set_title(name)
            axes.set_ylabel(unit)
        return figure

    return _png(draw)


def seconds_per_iteration(iterations: Sequence[Iteration], *, title: str) -> bytes:
    """Stacked bars: what each iteration spent its seconds on.

    Args:
        iterations: one or more.
        title: what the picture shows.

    Returns:
        A PNG.
    """
    names = {
        "rollout": "rollouts",
        "federation_wait": "waiting for groups",
        "reference": "reference and values",
        "update": "PPO update",
    }
    colours = {"rollout": SKY, "federation_wait": VERMILION, "reference": YELLOW, "update": BLUE}

    def draw() -> Figure:
        figure = _figure(WIDTH, 3.8)
        axes = figure.add_subplot()
        steps_I = [line.iteration for line in iterations]
        below_I = np.zeros(len(iterations))
        for number, part in enumerate(dict.fromkeys(part for line in iterations for part in line.seconds)):
            values_I = np.nan_to_num(_as_array(line.seconds.get(part, 0.0) for line in iterations))
            axes.bar(
                steps_I,
                values_I,
                bottom=below_I,
                width=1.0 if len(steps_I) > MOST_MARKED_ITERATIONS else 0.7,
                color=colours.get(part, GROUP_COLOURS[number % len(GROUP_COLOURS)]),
                label=names.get(part, _label(part)),
            )
            below_I += values_I
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=9)
        _iteration_axis(axes, iterations)
        axes.set_ylabel("seconds")
        axes.set_title(title)
        axes.grid(visible=False, axis="x")
        return figure

    return _png(draw)


def seconds_per_phase(phases: Sequence[Phase]) -> bytes:
    """A bar a phase, in the order in which they ran.

    Args:
        phases: one or more.

    Returns:
        A PNG.
    """

    def draw() -> Figure:
        figure = _figure(WIDTH, 1.0 + 0.36 * len(phases))
        axes = figure.add_subplot()
        rows = range(len(phases))
        bars = axes.barh(rows, [phase.seconds for phase in phases], color=BLUE, height=0.65)
        axes.bar_label(bars, [f"{phase.seconds:.1f} s" for phase in phases], padding=4, fontsize=9)
        axes.set_yticks(rows, [_label(phase.name) for phase in phases])
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("seconds")
        axes.set_title("Time per phase")
        return figure

    return _png(draw)


def loss_curve(rounds: Sequence[Round], *, chosen: int) -> bytes:
    """The predictor's loss over its federated rounds, and its validation error below where a round has one.

    Args:
        rounds: one or more.
        chosen: number of the round whose weights were kept, 0 for none.

    Returns:
        A PNG.
    """
    losses = [(entry.round, entry.loss) for entry in rounds]
    errors = [(entry.round, entry.validation) for entry in rounds if entry.validation is not None]
    panels = [("loss\n(mean over groups)", losses, BLUE, "o")]
    if errors:
        panels.append(("error, held-out\n(natural JS distance)", errors, VERMILION, "s"))

    def draw() -> Figure:
        figure = _figure(WIDTH, 1.0 + 2.2 * len(panels))
        stacked = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for axes, (label, points, colour, marker) in zip(stacked, panels, strict=True):
            axes.plot(
                [x for x, _ in points],
                _as_array(y for _, y in points),
                color=colour,
                linewidth=1.6,
                marker=marker if _mark_points(len(points)) else None,
                markersize=4,
            )
            if chosen:
                axes.axvline(chosen, color="#444444", linestyle=":", linewidth=1.4)
            axes.set_ylabel(label)
        stacked[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
        stacked[-1].set_xlabel("federated round")
        kept = f"; dotted: round {chosen}, the one kept" if chosen else ""
        stacked[0].set_title(f"PluralLLM pretraining; lower is better{kept}")
        return figure

    return _png(draw)


CONTEXT_COLUMNS = 2


def predictor_by_context(curves: Sequence[ContextCurve]) -> bytes:
    """The predictor's score against the number of context answers, beside the baselines.

    Args:
        curves: one or more; each has a panel, all with the same score axis.

    Returns:
        A PNG.
    """
    styles = dict(zip(predictor.PREDICTORS, OTHER_RULE_STYLES, strict=True))
    sizes = sorted({size for curve in curves for size in curve.js})

    def draw() -> Figure:
        columns = min(CONTEXT_COLUMNS, len(curves))
        rows = -(-len(curves) // columns)
        figure = _figure(WIDTH, 1.0 + 3.6 * rows)
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        panels, spare = grid.flat[: len(curves)], grid.flat[len(curves) :]
        for axes in spare:
            axes.remove()
        handles: dict[str, Line2D] = {}
        for axes, curve in zip(panels, curves, strict=True):
            colour, marker = styles["pluralllm"]
            (handles["pluralllm"],) = axes.plot(
                list(curve.js), _as_array(curve.js.values()), color=colour, marker=marker, linewidth=2.0, zorder=3
            )
            for name, value in curve.levels.items():
                handles[name] = axes.axhline(
                    value, color=styles[name][0], linestyle=LEVEL_DASHES[name], linewidth=1.8, zorder=2
                )
            axes.margins(y=0.08)
            axes.set_title(_context_title(curve), fontsize=10)
        panels[0].set_xscale("log", base=2)
        panels[0].set_xticks(sizes, [str(size) for size in sizes])
        panels[0].minorticks_off()
        for axes in panels[-columns:]:  # each is the lowest of its column
            axes.set_xlabel("context answers of the group (logarithmic)")
            axes.tick_params(labelbottom=True)
        figure.supylabel("JS against the groups' own answers (0 to 1)", fontsize=10)
        figure.suptitle("PluralLLM by context size; higher is better", fontsize=11)
        order = [name for name in predictor.PREDICTORS if name in handles]
        figure.legend(
            [handles[name] for name in order],
            [predictor.PREDICTORS[name] for name in order],
            loc="outside lower center",
            ncols=len(order),
            fontsize=9,
        )
        return figure

    return _png(draw)


def _context_title(curve: ContextCurve) -> str:
    groups, _, questions = curve.part.partition(" / ")
    title = f"{groups} groups, {questions} questions, {curve.answers} answers"
    if curve.fewer is not None:
        title += f"\nmean of the others: {curve.fewer[0]:.0f} of {curve.fewer[1]:.0f} answers"
    return title


def predictor_by_group(groups: Sequence[GroupScores]) -> bytes:
    """A row a group: the predictor, and what costs nothing, against the group's own held-out answers.

    Args:
        groups: one or more, drawn from top to bottom.

    Returns:
        A PNG.
    """

    def draw() -> Figure:
        figure = _figure(WIDTH, 1.2 + 0.32 * len(groups))
        axes = figure.add_subplot()
        names = dict.fromkeys(name for group in groups for name in group.js)
        for name, (colour, marker) in zip(names, OTHER_RULE_STYLES, strict=False):
            rows = [(group.js[name], row) for row, group in enumerate(groups) if name in group.js]
            axes.plot(*zip(*rows, strict=True), linestyle="none", color=colour, marker=marker, label=_label(name))
        labels = [_label(group.name) + (" (unseen)" if group.unseen else "") for group in groups]
        axes.set_yticks(range(len(groups)), labels)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xlabel("JS against the group's own held-out answers (0 to 1)")
        axes.set_title("PluralLLM by group")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
        return figure

    return _png(draw)


# --- results --------------------------------------------------------------------------------------


def way_to_ceiling(ways: Sequence[tuple[str, Way]], *, metric: str) -> bytes:
    """Bars from base to ceiling, filled as far as PPO came, with the uniform answer and SFT marked.

    Args:
        ways: (name of the targets, way), one or more, drawn from top to bottom.
        metric: its name, for the axis.

    Returns:
        A PNG.
    """
    height, thickness, edge = 1.25, 0.30, 0.04

    def draw() -> Figure:
        figure = _figure(WIDTH, 0.9 + height * len(ways))
        axes = figure.add_subplot()
        values = [value for _, way in ways for value in way.positions.values()]
        span = max(max(values) - min(values), 0.01)
        low, high = min(values) - edge * span, max(values) + edge * span
        axes.set_xlim(low, high)
        axes.set_ylim(len(ways) - 0.35, -0.65)
        for row, (_, way) in enumerate(ways):
            _draw_way(axes, way, row=row, thickness=thickness, low=low, high=high)
        axes.set_yticks(range(len(ways)), [_way_name(targets, way) for targets, way in ways])
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"alignment score ({metric}, 0 to 1)")
        axes.set_title("The way from base to the best shared answer")
        return figure

    return _png(draw)


def _way_name(targets: str, way: Way) -> str:
    covered = "no way to go" if way.covered is None else f"{way.covered:.0%} covered"
    return f"{way.measure}\n{targets}\n{covered}"


def _draw_way(axes: Axes, way: Way, *, row: int, thickness: float, low: float, high: float) -> None:
    """One bar with its markers; the names hang below, moved apart and joined to the markers by thin lines."""
    label_gap, label_depth, line_start = 0.115, 0.36, 0.6
    ceiling_name = next(policy for policy in way.positions if policy.startswith("ceiling"))
    base, ceiling, ppo = way.positions["base"], way.positions[ceiling_name], way.positions["ppo"]
    axes.barh(row, ceiling - base, left=base, height=thickness, color=SHADE, zorder=2)
    axes.barh(
        row,
        ppo - base,
        left=base,
        height=thickness,
        zorder=2,
        color=ORANGE if ppo >= base else LIGHT_GREY,
        hatch=None if ppo >= base else "///",
        edgecolor="white",
        linewidth=0,
    )
    span = high - low
    places = _spread(
        list(way.positions.values()),
        gap=label_gap * span,
        low=low + label_gap / 2 * span,
        high=high - label_gap / 2 * span,
    )
    for (policy, value), place in zip(way.positions.items(), places, strict=True):
        name, colour, marker, _ = POLICY_STYLE[policy]
        name = "Ceiling" if policy == ceiling_name else name
        axes.plot(
            value,
            row,
            marker=marker,
            color=colour,
            markersize=9,
            markeredgewidth=2,
            linestyle="none",
            zorder=4,
        )
        axes.plot(
            [value, place],
            [row + thickness * line_start, row + label_depth - 0.02],
            color=GREY,
            linewidth=0.8,
            zorder=3,
        )
        axes.text(
            place,
            row + label_depth,
            f"{name.replace(' answer', '')} {value:.3f}",
            ha="center",
            va="top",
            fontsize=9,
            color=colour,
        )


def trade_off(points: Sequence[TradeOffPoint], path: Path, *, metric: str = "js") -> Path:
    """Min AS against Avg AS of several rules, up and right is better.

    Source: "Fairness-Alignment Trade-off Analysis".

    Args:
        points: one or more; a rule's error bars are the standard deviation over its seeds (ddof 1), absent
            for one seed.
        path: where the PNG goes; written beside and renamed.
        metric: its name, for the axes.

    Returns:
        The path.

    Raises:
        ValueError: no points, or a point whose two tuples differ in length or are empty.
    """
    for point in points:
        if not point.avg_as or len(point.avg_as) != len(point.min_as):
            raise ValueError(f"{point.name}: needs one Min AS for each of one or more Avg AS")
    if not points:
        raise ValueError("a trade-off plot needs one point or more")

    def draw() -> Figure:
        figure = _figure(WIDTH, 5.6)
        axes = figure.add_subplot()
        others = [point.name for point in points if not point.reference and point.name not in RULE_STYLE]
        for point in points:
            average, minimum = float(np.mean(point.avg_as)), float(np.mean(point.min_as))
            if point.reference:
                name, _, marker, _ = POLICY_STYLE.get(point.name, (_label(point.name), GREY, "D", ":"))
                axes.plot(
                    average,
                    minimum,
                    marker=marker,
                    markersize=10,
                    markerfacecolor="none",
                    markeredgecolor="#444444",
                    markeredgewidth=1.8,
                    linestyle="none",
                    label=name,
                )
                continue
            colour, marker = (
                RULE_STYLE.get(point.name) or OTHER_RULE_STYLES[others.index(point.name) % len(OTHER_RULE_STYLES)]
            )
            count = len(point.avg_as)
            spread = (np.std(point.avg_as, ddof=1), np.std(point.min_as, ddof=1)) if count > 1 else (None, None)
            axes.plot(point.avg_as, point.min_as, marker=".", color=colour, alpha=0.45, linestyle="none")
            axes.errorbar(
                average,
                minimum,
                xerr=spread[0],
                yerr=spread[1],
                marker=marker,
                color=colour,
                capsize=3,
                markersize=14 if marker == "*" else 9,
                markeredgecolor="white",
                linestyle="none",
                label=f"{_label(point.name)} ({count} seed{'s' if count > 1 else ''})",
            )
        low = min(*axes.get_xlim(), *axes.get_ylim())
        high = max(*axes.get_xlim(), *axes.get_ylim())
        limits = axes.get_xlim(), axes.get_ylim()
        axes.plot([low, high], [low, high], color=LIGHT_GREY, linewidth=1, zorder=1, label="all groups equal")
        axes.set_xlim(*limits[0])
        axes.set_ylim(*limits[1])
        axes.set_xlabel(f"Avg AS ({metric}, 0 to 1)")
        axes.set_ylabel(f"Min AS ({metric}, 0 to 1)")
        axes.set_title("Fairness-alignment trade-off (bars: standard deviation over seeds)")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
        return figure

    return write_atomically(path, _png(draw))
