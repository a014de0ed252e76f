"""The page of a report: one file with its pictures inside and no script.

Jinja escapes every text that comes from a run: a group or a question may be called "<script>".

No axis letters: everything here is one number of a named method, metric or group.
"""

from __future__ import annotations

import base64
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from appa_flwr.analysis.intervals import Interval
from appa_flwr.config import Config
from appa_flwr.config.keys import to_word
from appa_flwr.config.ranges import AUTO_METRICS, PAPER_FAIRNESS_THRESHOLD, PAPER_TEMPERATURE
from appa_flwr.core import markdown
from appa_flwr.report import accuracy, findings, second_rule, template
from appa_flwr.report.artifacts import DASH, RunArtifacts, is_known, number
from appa_flwr.report.plots.style import METHOD_STYLE
from appa_flwr.run import cards, records
from appa_flwr.run.predictions import of_question
from appa_flwr.run.records import METHODS, MODEL, TRAINED_METHODS

FORMAT, FI_READABLE, SKILL = "Format\nscore", "FI\nreadable", "Skill"
MEASURES = ("FI", *findings.MEASURES)
FIELDS = {"FI": "fi", FI_READABLE: "fi_readable", "Avg AS": "avg_as", "Min AS": "min_as"} | {
    SKILL: "skill",
    FORMAT: "format_score",
}
ALL_MEASURES = ("FI", FI_READABLE, *findings.MEASURES, SKILL)
DECIMALS = {"FI": 4, FI_READABLE: 4, SKILL: 1}
"""Of other measures 3: as many as the paper's tables ("Full Quantitative Results") show."""

METHOD_NAMES = {method: name for method, (name, *_) in METHOD_STYLE.items()}
METRIC_NAMES = {"js": "JS", "js-distance": "JS dist.", "wasserstein": "Was.", "cosine": "Cos.", "borda": "Bor."}
FIRST_KEYS = ("task", "survey", "groups", "model", "rule", "metric", "appa.fairness-threshold", "seed")
"""Config keys shown before all others: what a reader asks first."""
MOST_LISTED_GROUPS = 16
TABLE_NOTE = (
    "Bold: best of base, SFT and PPO, an FI only of those above the uniform answer. †: not above the uniform answer. "
    "FI, Avg AS, Min AS and format score lie in 0 to 1, higher is better."
)
NOT_RELEASED = "not released"
SUMS_NOTE = (
    "The server has seen only sums over the groups: weights, histories and rewards of single groups are known to "
    "nobody but each of them; an alignment score is here where the group's owner releases it, and Min AS where all do."
)
READABLE_NOTE = (
    "FI readable: FI over the answers that could be read, since one that could not is worth 0 to all groups and counts "
    "as perfectly fair in FI. Skill: 100 (1 - d / d of the uniform answer) with d = 1 - Avg AS; 100 is perfect, 0 as "
    "good as the uniform answer."
)
RULES_NOTE = (
    "Free answers, no language model: where a policy that can answer anything ends under each rule, on this run's "
    "predictions for held-out questions. Intervals: 95 %, over questions. appa-printed has the paper's threshold "
    "and temperature, appa-open never takes the plain mean."
)


class Table(NamedTuple):
    """A table of the page.

    Attributes:
        columns: name -> the names of the columns below it; none where it is a column itself.
        blocks: rows of texts, and what stands before them all if anything does; a line is drawn between blocks.
        caption: below the table.
        texts: how many of the first columns are words.
        css: class of the table.
    """

    columns: Mapping[str, Sequence[str]]
    blocks: Sequence[tuple[str, Sequence[Sequence[str]]]]
    caption: str = ""
    texts: int = 1
    css: str | None = None

    @property
    def classes(self) -> list[str | None]:
        """CSS class of each column: words are on the left, and a line stands before the columns of each name."""
        begins = [not number for names in self.columns.values() for number in range(len(names) or 1)]
        edges = [begin and any(self.columns.values()) for begin in begins]
        return ["text" if n < self.texts else "edge" if edge else None for n, edge in enumerate(edges)]


class Column(NamedTuple):
    """A column of numbers: a measure by a metric, against the survey answers or predictions."""

    measure: str
    metric: str
    survey: bool = False

    def value(self, run: RunArtifacts, method: str) -> float | None:
        """The number of a method, None where it was not measured."""
        scores = run.scores(method, self.metric, survey=self.survey)
        found: float | None = None if scores is None else getattr(scores, FIELDS[self.measure])
        return found


def metric_name(run: RunArtifacts) -> str:
    """The training metric as tables call it."""
    return METRIC_NAMES.get(run.training_metric, run.training_metric)


def summed(run: RunArtifacts) -> bool:
    """True if the server has seen only sums over the groups."""
    return run.settings.run.sums == "secure"


def truths(run: RunArtifacts) -> list[tuple[str, bool]]:
    """(name, whether it is the survey's) of what the answers are compared with."""
    both = [("predictions", False), ("survey answers", True)]
    return both if any(row.survey is not None for row in run.summary) else both[:1]


def _score(run: RunArtifacts, method: str, column: Column) -> str:
    """One number: bold where best of base, SFT and PPO; a dagger where not above the uniform answer."""
    decimals = DECIMALS.get(column.measure, 3)
    shown = number(column.value(run, method), decimals)
    if shown == DASH:
        return shown
    # Saying nothing is fair to all, so an FI counts only with answers that can be read and score above the uniform one.
    of_scores, average = column.measure in findings.MEASURES, column._replace(measure="Avg AS")
    rated = [
        other
        for other in TRAINED_METHODS
        if of_scores or not (_unreadable(run, other) or _under_uniform(run, other, average))
    ]
    # As shown, so that two that print alike are both bold.
    others = {number(column.value(run, other), decimals) for other in rated} - {DASH}
    best = method in rated and shown == max(others, key=float)
    dagger = of_scores and method != "uniform" and _under_uniform(run, method, column)
    return Markup("<b>{}</b>" if best else "{}").format(shown) + Markup("<sup>†</sup>" if dagger else "")


def _under_uniform(run: RunArtifacts, method: str, column: Column) -> bool:
    """True where a score is not above the uniform answer's; False where one of the two is unknown."""
    value, uniform = column.value(run, method), column.value(run, "uniform")
    return value is not None and uniform is not None and value - uniform <= findings.SHOWN_TIE


def _name(method: str) -> str:
    """What a method is called; a model of `appa eval` has the name that it was given."""
    return METHOD_NAMES.get(method, method.removeprefix(MODEL))


def _method_row(run: RunArtifacts, method: str, columns: Iterable[Column]) -> list[str]:
    """The method, its rule, its numbers, and the format score."""
    name = _name(method) + ("‡" if _unreadable(run, method) else "")
    rule = run.settings.rule if method == "ppo" else DASH
    return [name, rule, *(_score(run, method, column) for column in (*columns, Column(FORMAT, run.training_metric)))]


def _present(run: RunArtifacts) -> list[str]:
    present = dict.fromkeys(row.method for row in run.summary)
    return [*(method for method in METHODS if method in present), *run.models]


def _unreadable(run: RunArtifacts, method: str) -> bool:
    return any(row.mostly_unreadable for row in run.summary if row.method == method)


def _notes(run: RunArtifacts) -> str:
    """Notes a reader needs on the rows and columns that are there."""
    notes = [TABLE_NOTE]
    if summed(run):
        notes.append(SUMS_NOTE)
    if any(row.mostly_unreadable for row in run.summary):
        notes.append("‡: most answers could not be read, so FI says nothing.")
    if records.OWN_PREDICTION in _present(run):
        own = "Each group's prediction: every group gets an answer of its own"
        notes.append(f"{own}, perfect against predictions by construction.")
    return " ".join(notes)


def training_metric_table(run: RunArtifacts) -> Table:
    """Methods by all measures on the training metric, against both truths next to each other."""
    columns = [Column(measure, run.training_metric, survey) for _, survey in truths(run) for measure in ALL_MEASURES]
    rows = {method: _method_row(run, method, columns) for method in _present(run)}
    kinds = (
        run.models,
        TRAINED_METHODS,
        (*records.TRIVIAL_BASELINES, records.OWN_PREDICTION, *records.CEILINGS),
    )
    blocks = [[rows[method] for method in kind if method in rows] for kind in kinds]
    head = {"Method": (), "Server\nagg.": (), **{name: ALL_MEASURES for name, _ in truths(run)}, FORMAT: ()}
    caption = f"Training metric {metric_name(run)}, held-out questions. {_notes(run)} {READABLE_NOTE}"
    return Table(head, [("", block) for block in blocks if block], caption, texts=2)


def all_metrics_table(run: RunArtifacts) -> Table:
    """Every metric in the layout of the paper's tables, with a block of rows per truth."""
    blocks = []
    for name, survey in truths(run):
        columns = [Column(measure, metric, survey) for measure in MEASURES for metric in run.metrics]
        blocks.append((name, [_method_row(run, method, columns) for method in _present(run)]))
    names = [METRIC_NAMES.get(metric, metric) for metric in run.metrics]
    head = {"Against": (), "Method": (), "Server\nagg.": (), **dict.fromkeys(MEASURES, names), FORMAT: ()}
    return Table(head, blocks, _notes(run), texts=3, css="wide")


def per_group_table(run: RunArtifacts) -> Table:
    """A row per group on the training metric, the worst served by PPO (or by what there is) first."""
    spans: dict[str, dict[str, Mapping[str, float]]] = {}
    for name, survey in truths(run):
        for method in ("base", "sft", "ppo", *run.models, "uniform"):
            if (scores := run.scores(method, run.training_metric, survey=survey)) is not None:
                spans.setdefault(name, {})[_name(method).removesuffix(" answer")] = scores.per_group
    best = _name(run.models[-1] if run.models else "ppo")
    by_ppo = next(iter(spans.values()), {}).get(best, {})
    unseen = run.settings.unseen_group_names
    rows = []
    for group in sorted(run.groups, key=lambda group: by_ppo[group] if is_known(by_ppo.get(group)) else math.inf):
        row = [group + (" (unseen)" if group in unseen else "")]
        shown = [number(found.get(group)) for methods in spans.values() for found in methods.values()]
        row += [NOT_RELEASED if summed(run) and score == DASH else score for score in shown]
        if run.iterations:
            missed = sum(group in line.missing_groups for line in run.iterations)
            row += [] if summed(run) else [number(run.iterations[-1].weights.get(group))]
            row.append(str(missed))
        rows.append(row)
    caption = f"Alignment score ({metric_name(run)}) on held-out questions, worst served first." if spans else ""
    if unseen:
        caption += " Unseen: the group has not trained the preference predictor."
    names = {name: tuple(methods) for name, methods in spans.items()}
    last = ((() if summed(run) else ("Last weight",)) + ("Iterations\nmissed",)) if run.iterations else ()
    return Table({"Group": (), **names, **dict.fromkeys(last, ())}, [("", rows)], caption)


def served_groups_table(lines: Sequence[records.ServedRound]) -> Table:
    """Seconds of each group in the rounds that it answered, the slowest in the last one first, those missing before."""
    last, rows = lines[-1], []
    for group in sorted(last.rewards, key=lambda group: -last.group_seconds.get(group, math.inf)):
        took = [line.group_seconds[group] for line in lines if group in line.group_seconds]
        mean, longest = (sum(took) / len(took), max(took)) if took else (None, None)
        missed = sum(group in line.missing_groups for line in lines)
        rows.append([group, *map(number, (last.group_seconds.get(group), mean, longest)), str(missed)])
    head = ("Group", "Seconds,\nlast round", "Mean", "Longest", "Rounds\nmissed")
    return Table(dict.fromkeys(head, ()), [("", rows)])


def rules_table(run: RunArtifacts) -> Table:
    """The end of free answers that follow each rule on this run's predictions."""
    assert run.differences is not None
    rows = []
    for rule, found in run.differences.rules.items():
        row = [rule]
        for _, survey in truths(run):
            end = found.survey if survey else found.predicted
            row += (
                [DASH] * 3
                if end is None
                else [number(end.avg_as), number(end.min_as), Interval(*end.over_average).signed]
            )
        rows.append([*row, DASH if found.fell_back is None else f"{found.fell_back:.0%}"])
    spans = {name: ("Avg AS", "Min AS", "Min AS less\naverage's") for name, _ in truths(run)}
    return Table({"Rule": (), **spans, "Took the\nplain mean": ()}, [("", rows)], RULES_NOTE)


def shown_config(run: RunArtifacts) -> dict[str, str]:
    """Every key with its value, and with what it came to where it left a choice to the run."""
    came_to = dict(run.auto)
    came_to["metric"] = run.settings.reward_metric if run.settings.metric in AUTO_METRICS else ""
    if not run.settings.pluralllm.learning_rate:
        came_to["pluralllm.learning-rate"] = str(run.settings.pluralllm.local_learning_rate)
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
    return Table({"Key": (), "Value": ()}, [("", list(shown_config(run).items()))], texts=2, css="config")


def facts(run: RunArtifacts) -> Iterable[tuple[str, str]]:
    """Settings that a reader asks for first, questions, groups, iterations, time, and how to have the run again."""
    config = shown_config(run)
    yield from ((key.capitalize(), config[key]) for key in ("task", "rule"))
    if "appa" in (run.settings.rule, run.settings.baseline_rule):
        appa = run.settings.appa
        printed = f"the paper's: {PAPER_TEMPERATURE} and {PAPER_FAIRNESS_THRESHOLD}"
        yield "Parameters of appa", f"T = {appa.temperature}, tau = {appa.fairness_threshold} ({printed})"
    yield from ((key.capitalize(), config[key]) for key in ("metric", "model"))
    yield "Survey", run.survey or config["survey"]
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
    texts = [f"{key}={to_word(value)}" for key, value in set_here.items()]
    return shlex.join(["appa", "serve" if config.run.phases == "serve" else "run", *texts])


def targets_table(run: RunArtifacts, example: records.Example) -> Table | None:
    """What each group is predicted to answer to an example's question; None in runs that kept no predictions."""
    found = of_question(run.predictions, example.question, example.options)
    if found is None:
        return None
    rows = [[str(group), *(number(share, 2) for share in shares)] for group, shares in found.iterrows()]
    return Table({"Group": (), **dict.fromkeys(example.options, ())}, [("", rows)])


def short(run: RunArtifacts) -> str:
    """The report in Markdown, as long as a comment on a pull request: verdict, main scores, how it was made."""
    by_rule = second_rule.second_rule(run)
    verdicts = [second_rule.sentence(found) for found in by_rule] or [
        f"Against the {name} ({metric_name(run)}): {findings.verdict_word(findings.gains(run, survey=survey))}"
        for name, survey in truths(run)
    ]
    columns = [Column(measure, run.training_metric, survey) for _, survey in truths(run) for measure in MEASURES]
    head = [f"{measure}, {name}" for name, _ in truths(run) for measure in MEASURES]
    rows = [
        [
            _name(method),
            *(number(column.value(run, method), DECIMALS.get(column.measure, 3)) for column in columns),
        ]
        for method in _present(run)
    ]
    made = [f"- {key}: {value}" for key, value in facts(run) if key not in ("Again by", "Questions", "Groups")]
    parts = [f"## {markdown.text(run.folder.resolve().name)}", *map(markdown.text, verdicts)]
    parts += [markdown.table(["method", *head], rows)] if rows else []
    parts.append("\n".join([*map(markdown.text, made), f"- Again by: `{command(run.settings)}`"]))
    return "\n\n".join(parts) + "\n"


def predictor_table(found: cards.Card) -> Table:
    """The preference predictor's scores, a block of rows per part."""
    return Table(dict.fromkeys(accuracy.HEAD, ()), list(accuracy.blocks(found).items()), accuracy.note(found), texts=2)


_JINJA = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
_JINJA.filters |= {"base64": lambda png: base64.b64encode(png).decode("ascii"), "number": number}
_JINJA.globals |= {"findings": findings, "accuracy": accuracy, "second_rule": second_rule}
_JINJA.globals |= {
    made.__name__: made
    for made in (
        facts, truths, metric_name, training_metric_table, all_metrics_table, per_group_table, predictor_table,
        config_table, rules_table, served_groups_table, targets_table,
    )
}  # fmt: skip


def page(run: RunArtifacts, pictures: Mapping[str, tuple[bytes, str]]) -> str:
    """An HTML document that needs no other file.

    `pictures`: name -> (PNG, text for those who cannot see it); an absent one is left out.
    """
    return _JINJA.from_string(template.PAGE).render(run=run, pictures=pictures)
