"""The page of a report: one file with its pictures inside and no script.

Jinja escapes every text that comes from a run: a group or a question may be called "<script>".

No axis letters: everything here is one number of a named method, metric or group.
"""

from __future__ import annotations

import base64
import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined

from appa_flwr.config import Config, to_toml
from appa_flwr.config.ranges import AUTO_METRICS
from appa_flwr.report import accuracy, findings, second_rule, template
from appa_flwr.report.artifacts import RunArtifacts, is_known
from appa_flwr.report.plots.style import METHOD_STYLE
from appa_flwr.run.records import (
    CEILINGS,
    DO,
    FEW_SHOT,
    METHODS,
    MODEL,
    OWN_PREDICTION,
    TRAINED_METHODS,
    TRIVIAL_BASELINES,
    Card,
)

DASH = "–"
FORMAT, FI_READABLE, SKILL = "Format\nscore", "FI\nreadable", "Skill"
MEASURES = ("FI", *findings.MEASURES)
ALL_MEASURES = ("FI", FI_READABLE, *findings.MEASURES, SKILL)
SCORE_DECIMALS = 3
DECIMALS = {"FI": 4, FI_READABLE: 4, SKILL: 1}
"""Of other measures `SCORE_DECIMALS`: as many as the paper's tables ("Full Quantitative Results") show."""

METHOD_NAMES = {method: name for method, (name, *_) in METHOD_STYLE.items()}
METRIC_NAMES = {"js": "JS", "js-distance": "JS dist.", "wasserstein": "Was.", "cosine": "Cos.", "borda": "Bor."}
FIRST_KEYS = ("task", "survey", "groups", "model", "rule", "metric", "appa.fairness-threshold", "seed")
"""Config keys shown before all others: what a reader asks first."""
MOST_LISTED_GROUPS = 16
TABLE_NOTE = (
    "Bold: best of base, SFT and PPO, an FI only of those above the uniform answer. †: not above the uniform answer. "
    "FI, Avg AS, Min AS and format score lie in 0 to 1, higher is better."
)
READABLE_NOTE = (
    "FI readable: FI over the answers that could be read, since one that could not is worth 0 to all groups and counts "
    "as perfectly fair in FI. Skill: 100 (1 - d / d of the uniform answer) with d = 1 - Avg AS; 100 is perfect, 0 as "
    "good as the uniform answer."
)
UNREADABLE_NOTE = "‡: most answers could not be read, so FI says nothing."
FEW_SHOT_NOTE = "Few-shot: the base model, not trained, with answered training questions in its prompt."
RULES_NOTE = (
    "Free answers, no language model: where a policy that can answer anything ends under each rule, on this run's "
    "predictions for held-out questions. Intervals: 95 %, over questions. appa-printed has the paper's threshold "
    "and temperature, appa-open never takes the plain mean."
)
DO_NOTE = (
    "(do): the probabilities that the same model gives the letters when asked for one; other rows are what it writes."
)
OWN_NOTE = (
    "Each group's prediction: every group gets an answer of its own, perfect against predictions by construction."
)


class Cell(NamedTuple):
    """A cell of a table: its text, its CSS classes, how many columns and rows it takes, bold or with a dagger."""

    text: str
    css: str | None = None
    tag: str = "td"
    across: int | None = None
    down: int | None = None
    bold: bool = False
    dagger: bool = False


class Table(NamedTuple):
    """Rows of a head and of blocks, between which the page draws a line."""

    head: list[list[Cell]]
    blocks: list[list[list[Cell]]]
    caption: str = ""
    css: str | None = None


class Column(NamedTuple):
    """A column of numbers: a measure by a metric, against the survey answers or predictions."""

    measure: str
    metric: str
    survey: bool = False

    def value(self, run: RunArtifacts, method: str) -> float | None:
        """The number of a method, None where it was not measured."""
        if self.measure == FORMAT:
            return None if (row := run.row(method, self.metric)) is None else row.format_score
        scores = run.scores(method, self.metric, survey=self.survey)
        if scores is None:
            return None
        return {
            "FI": scores.fi,
            FI_READABLE: scores.fi_readable,
            "Avg AS": scores.avg_as,
            "Min AS": scores.min_as,
            SKILL: scores.skill,
        }[self.measure]


Spans = Mapping[str, Sequence[Column]]
"""Title -> the columns below it."""


def _number(value: float | None, decimals: int = SCORE_DECIMALS) -> str:
    return f"{value:z.{decimals}f}" if is_known(value) else DASH  # z: no negative zero


def _percent(share: float, decimals: int = 1) -> str:
    return f"{share:.{decimals}%}"


def _edge(number: int) -> str | None:
    """The CSS class of the first column of a span."""
    return None if number else "edge"


def _head(left: Iterable[str], spans: Mapping[str, Sequence[str]], right: Iterable[str]) -> list[list[Cell]]:
    """Two rows: names that stand over both, and titles that span the names of their columns."""
    above = [Cell(name, tag="th", down=2) for name in left]
    above += [Cell(title, "edge", "th", across=len(names)) for title, names in spans.items()]
    above += [Cell(name, "edge", "th", down=2) for name in right]
    below = [Cell(name, _edge(number), "th") for names in spans.values() for number, name in enumerate(names)]
    return [above, below] if below else [above]


def _plain_table(head: Iterable[str], rows: Iterable[Sequence[str]], *, texts: int, caption: str) -> Table:
    """A table whose first `texts` columns are words; a line is drawn where the first one changes."""
    blocks = [
        [[Cell(text, "text" if number < texts else None) for number, text in enumerate(row)] for row in block]
        for _, block in itertools.groupby(rows, key=lambda row: row[0])
    ]
    return Table([[Cell(name, tag="th") for name in head]], blocks, caption)


def metric_name(run: RunArtifacts) -> str:
    """The training metric as tables call it."""
    return METRIC_NAMES.get(run.training_metric, run.training_metric)


def truths(run: RunArtifacts) -> list[tuple[str, bool]]:
    """(name, whether it is the survey's) of what the answers are compared with."""
    both = [("predictions", False), ("survey answers", True)]
    return both if any(row.survey is not None for row in run.summary) else both[:1]


def _score_cell(run: RunArtifacts, method: str, column: Column, css: str | None) -> Cell:
    """One number: bold where best of base, SFT and PPO; a dagger where not above the uniform answer."""
    decimals = DECIMALS.get(column.measure, SCORE_DECIMALS)
    value = column.value(run, method)
    shown = _number(value, decimals)
    if value is None or shown == DASH:
        return Cell(shown, css)
    # Saying nothing is fair to all, so an FI counts only with answers that can be read and score above the uniform one.
    of_scores, average = column.measure in findings.MEASURES, column._replace(measure="Avg AS")
    rated = [
        other
        for other in TRAINED_METHODS
        if of_scores or not (_unreadable(run, other) or _under_uniform(run, other, average))
    ]
    # As shown, so that two that print alike are both bold.
    others = {_number(column.value(run, other), decimals) for other in rated} - {DASH}
    best = method in rated and shown == max(others, key=float)
    return Cell(shown, css, bold=best, dagger=of_scores and method != "uniform" and _under_uniform(run, method, column))


def _under_uniform(run: RunArtifacts, method: str, column: Column) -> bool:
    """True where a score is not above the uniform answer's; False where one of the two is unknown."""
    value, uniform = column.value(run, method), column.value(run, "uniform")
    return value is not None and uniform is not None and value - uniform <= findings.SHOWN_TIE


def _method_row(run: RunArtifacts, method: str, spans: Spans) -> list[Cell]:
    """The rule, the numbers of each span of columns, and the format score."""
    row = [Cell(run.settings.rule if method in ("ppo", DO["ppo"]) else DASH, "text")]
    for columns in (*spans.values(), [Column(FORMAT, run.training_metric)]):
        row += [_score_cell(run, method, column, _edge(number)) for number, column in enumerate(columns)]
    return row


def _present(run: RunArtifacts) -> list[str]:
    present = dict.fromkeys(row.method for row in run.summary)
    return [method for method in METHODS if method in present] + _models(run)


def _models(run: RunArtifacts) -> list[str]:
    """Methods of `appa eval`, in the order in which they were scored."""
    return list(dict.fromkeys(row.method for row in run.summary if row.method.startswith(MODEL)))


def _unreadable(run: RunArtifacts, method: str) -> bool:
    return any(row.mostly_unreadable for row in run.summary if row.method == method)


def _name(run: RunArtifacts, method: str) -> str:
    """A method as tables call it, marked where most of its answers could not be read."""
    return METHOD_NAMES.get(method, method.removeprefix(MODEL)) + ("‡" if _unreadable(run, method) else "")


def _notes(run: RunArtifacts) -> Iterable[str]:
    """Notes a reader needs on the rows and columns that are there."""
    yield TABLE_NOTE
    if any(row.mostly_unreadable for row in run.summary):
        yield UNREADABLE_NOTE
    if FEW_SHOT in _present(run):
        yield FEW_SHOT_NOTE
    if set(DO.values()) & set(_present(run)):
        yield DO_NOTE
    if OWN_PREDICTION in _present(run):
        yield OWN_NOTE


def training_metric_table(run: RunArtifacts) -> Table:
    """Methods by all measures on the training metric, against both truths next to each other."""
    spans = {
        name: [Column(measure, run.training_metric, survey) for measure in ALL_MEASURES] for name, survey in truths(run)
    }
    rows = {method: [Cell(_name(run, method), tag="th"), *_method_row(run, method, spans)] for method in _present(run)}
    kinds = (_models(run), TRAINED_METHODS, (FEW_SHOT, *DO.values()), (*TRIVIAL_BASELINES, OWN_PREDICTION, *CEILINGS))
    blocks = [[rows[method] for method in kind if method in rows] for kind in kinds]
    head = _head(["Method", "Server\nagg."], dict.fromkeys(spans, ALL_MEASURES), [FORMAT])
    caption = f"Training metric {metric_name(run)}, held-out questions. {' '.join(_notes(run))} {READABLE_NOTE}"
    return Table(head, [block for block in blocks if block], caption)


def all_metrics_table(run: RunArtifacts) -> Table:
    """Every metric in the layout of the paper's tables, with a block of rows per truth."""
    blocks = []
    for name, survey in truths(run):
        spans = {measure: [Column(measure, metric, survey) for metric in run.metrics] for measure in MEASURES}
        block = [[Cell(_name(run, method), "text"), *_method_row(run, method, spans)] for method in _present(run)]
        block[0].insert(0, Cell(name, tag="th", down=len(block)))
        blocks.append(block)
    names = [METRIC_NAMES.get(metric, metric) for metric in run.metrics]
    head = _head(["Against", "Method", "Server\nagg."], dict.fromkeys(MEASURES, names), [FORMAT])
    return Table(head, blocks, " ".join(_notes(run)), "wide")


def per_group_table(run: RunArtifacts) -> Table:
    """A row per group on the training metric, the worst served by PPO (or by what there is) first."""
    spans: dict[str, dict[str, Mapping[str, float]]] = {}
    for name, survey in truths(run):
        for method in ("base", "sft", "ppo", "uniform"):
            if (scores := run.scores(method, run.training_metric, survey=survey)) is not None:
                spans.setdefault(name, {})[METHOD_NAMES[method].removesuffix(" answer")] = scores.per_group
    by_ppo = next(iter(spans.values()), {}).get(METHOD_NAMES["ppo"], {})
    unseen = run.settings.unseen_group_names
    rows = []
    for group in sorted(run.groups, key=lambda group: by_ppo[group] if is_known(by_ppo.get(group)) else math.inf):
        row = [Cell(group + (" (unseen)" if group in unseen else ""), tag="th")]
        for methods in spans.values():
            row += [Cell(_number(found.get(group)), _edge(number)) for number, found in enumerate(methods.values())]
        if run.iterations:
            missed = sum(group in line.missing_groups for line in run.iterations)
            row += [Cell(_number(run.iterations[-1].weights.get(group)), "edge"), Cell(str(missed), "edge")]
        rows.append(row)
    caption = f"Alignment score ({metric_name(run)}) on held-out questions, worst served first." if spans else ""
    if unseen:
        caption += " Unseen: the group has not trained the preference predictor."
    names = {name: list(methods) for name, methods in spans.items()}
    last = ["Last weight", "Iterations\nmissed"] if run.iterations else []
    return Table(_head(["Group"], names, last), [rows], caption)


def rules_table(run: RunArtifacts) -> Table:
    """The end of free answers that follow each rule on this run's predictions."""
    assert run.differences is not None
    spans = {name: ("Avg AS", "Min AS", "Min AS less\naverage's") for name, _ in truths(run)}
    rows = []
    for rule, found in run.differences.rules.items():
        row = [Cell(rule, tag="th")]
        for _, survey in truths(run):
            end = found.survey if survey else found.predicted
            over = DASH if end is None else "{:+.3f} ({:+.3f} to {:+.3f})".format(*end.over_average)
            numbers = [None, None] if end is None else [end.avg_as, end.min_as]
            row += [Cell(text, _edge(number)) for number, text in enumerate([*map(_number, numbers), over])]
        rows.append([*row, Cell(DASH if found.fell_back is None else _percent(found.fell_back, 0), "edge")])
    return Table(_head(["Rule"], spans, ["Took the\nplain mean"]), [rows], RULES_NOTE)


def shown_config(run: RunArtifacts) -> dict[str, str]:
    """Every key with its value, and with what it came to where it left a choice to the run."""
    came_to = {"metric": run.settings.reward_metric if run.settings.metric in AUTO_METRICS else ""}
    if run.groups and not run.settings.group_names:
        came_to["groups"] = f"all {len(run.groups)}"
    if run.iterations and not run.settings.ppo.num_iterations:
        came_to["ppo.num-iterations"] = str(run.iterations[-1].num_iterations)
    values = run.settings.flat()
    return {
        key: f"{values[key]} (here {came_to[key]})".strip() if came_to.get(key) else f"{values[key]}".strip()
        for key in dict.fromkeys((*FIRST_KEYS, *sorted(values)))
    }


def config_table(run: RunArtifacts) -> Table:
    """All keys, those that a reader asks for first on top."""
    rows = [[Cell(key, tag="th"), Cell(value, "text wrap")] for key, value in shown_config(run).items()]
    return Table([[Cell("Key", tag="th"), Cell("Value", tag="th")]], [rows])


def facts(run: RunArtifacts) -> Iterable[tuple[str, str]]:
    """Settings that a reader asks for first, questions, groups, iterations, time, and how to have the run again."""
    config = shown_config(run)
    yield from ((key.capitalize(), config[key]) for key in ("task", "rule", "metric", "model", "survey"))
    if run.questions is not None:
        yield "Questions", run.questions.sentence()
    yield "Seed", config["seed"]
    groups = run.groups
    listed = ", ".join(groups[:MOST_LISTED_GROUPS]) + (", …" if len(groups) > MOST_LISTED_GROUPS else "")
    yield "Groups", f"{len(groups)}: {listed}" if groups else "unknown"
    last = run.iterations[-1] if run.iterations else None
    yield "Iterations", f"{last.iteration} of {last.num_iterations}" if last else "none"
    seconds = findings.total_seconds(run)
    yield "Total time", "unknown" if seconds is None else findings.duration(seconds)
    if run.made_by:
        yield "Made by", run.made_by
    yield "Again by", command(run.settings)


def command(config: Config) -> str:
    """The command that makes the same run in a simulation, under another name."""
    default, apart = Config.load({}).flat(), ("run-name", "run.output-dir", "run.resume")
    set_here = {key: value for key, value in config.flat().items() if value != default[key] and key not in apart}
    texts = [f"{key}={value if isinstance(value, str) else to_toml(value)}" for key, value in set_here.items()]
    return shlex.join(["appa", "run", *(part for text in texts for part in ("-c", text))])


def predictor_table(found: Card) -> Table:
    """The preference predictor's scores, a block of rows per part."""
    rows = [
        (row.part, row.predictor, *map(_number, row.scores), f"{row.num_answers:.0f}") for row in accuracy.rows(found)
    ]
    return _plain_table(accuracy.HEAD, rows, texts=2, caption=accuracy.note(found))


def context_table(found: Card) -> Table | None:
    """Its scores by number of context answers, None where these were not measured."""
    curves = accuracy.context_curves(found)
    return _plain_table(*accuracy.context_rows(curves), texts=1, caption=accuracy.CONTEXT_TITLE) if curves else None


_JINJA = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
_JINJA.filters |= {
    "base64": lambda png: base64.b64encode(png).decode("ascii"),
    "number": _number,
    "percent": _percent,
}
_JINJA.globals |= {"findings": findings, "accuracy": accuracy, "second_rule": second_rule}
_JINJA.globals |= {
    made.__name__: made
    for made in (
        facts, truths, metric_name, training_metric_table, all_metrics_table, per_group_table, predictor_table,
        context_table, config_table, rules_table,
    )
}  # fmt: skip


def page(run: RunArtifacts, pictures: Mapping[str, tuple[bytes, str]]) -> str:
    """An HTML document that needs no other file.

    `pictures`: name -> (PNG, text for those who cannot see it); an absent one is left out.
    """
    return _JINJA.from_string(template.PAGE).render(run=run, pictures=pictures)
