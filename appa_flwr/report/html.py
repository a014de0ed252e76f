"""The page of a report: one file with its pictures inside and no script.

Every text that comes from a run passes through `_escape`: a group or a question may be called "<script>".

Axis letters: none.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from appa_flwr.config import split_names
from appa_flwr.report import findings, predictor
from appa_flwr.report.artifacts import (
    POLICIES,
    TRAINED_POLICIES,
    Example,
    PluralLLM,
    Run,
    Scalar,
    Scores,
    SummaryRow,
    is_known,
)

DASH = "–"
FAIRNESS_DECIMALS, SCORE_DECIMALS = 4, 3
"""As many as the paper's tables ("Full Quantitative Results") show."""

TARGETS_NAME, SURVEY_NAME = "PluralLLM targets", "survey truth"
POLICY_NAMES: Mapping[str, str] = {
    "base": "Base",
    "sft": "SFT",
    "ppo": "PPO",
    "uniform": "Uniform answer",
    "majority": "Majority answer",
    "ceiling-average": "Ceiling (average)",
    "ceiling-min": "Ceiling (worst group)",
}
METRIC_NAMES: Mapping[str, str] = {
    "js": "JS",
    "js-distance": "JS dist.",
    "wasserstein": "Was.",
    "cosine": "Cos.",
    "borda": "Bor.",
}
FIRST_KEYS = ("task", "survey", "groups", "model", "rule", "metric", "appa.fairness-threshold", "seed")
"""Config keys shown before all others: what a reader asks first."""

MOST_LISTED_GROUPS = 16

CSS = """
body{font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;color:#1b1b1b;
 background:#fff;max-width:1120px;margin:0 auto;padding:24px 20px 80px}
h1{font-size:1.7em;margin:0 0 .3em}h2{font-size:1.25em;margin:2.2em 0 .5em;border-bottom:1px solid #ccc}
h3{font-size:1.05em;margin:1.4em 0 .4em}p{margin:.5em 0;max-width:75em}
.scroll{overflow-x:auto}
table{border-collapse:collapse;margin:.6em 0;font-size:.92em;font-variant-numeric:tabular-nums}
th,td{padding:.28em .7em;text-align:right;border-bottom:1px solid #e2e2e2;white-space:nowrap}
th{background:#f4f4f4;font-weight:600}thead th{text-align:center}
tbody th,td.text{text-align:left;font-weight:400;background:none}
tr.rule>*{border-top:2px solid #888}td.edge,th.edge{border-left:1px solid #aaa}
table.wide{font-size:.8em}table.wide th,table.wide td{padding:.28em .42em}
sup{display:inline-block;width:0;line-height:0}
td.wrap{white-space:pre-wrap;overflow-wrap:anywhere;max-width:60em}
caption{caption-side:bottom;text-align:left;color:#555;padding-top:.4em;font-size:.95em}
img{max-width:100%;height:auto;display:block;margin:.6em 0}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:.15em 1.2em;margin:.8em 0}
.facts dt{color:#555}.facts dd{margin:0;overflow-wrap:anywhere}
.verdict,.warning,.missing{padding:.6em 1em;margin:1em 0;border-left:6px solid #0072B2;background:#f0f6fb}
.verdict.none{border-color:#D55E00;background:#fdf3ec}.warning{border-color:#D55E00;background:#fdf3ec}
.missing{border-color:#999;background:#f5f5f5}.verdict ul,.missing ul{margin:.3em 0;padding-left:1.3em}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font-size:.95em}
.answers{display:grid;grid-template-columns:1fr 1fr;gap:1em}.answers>div{background:#f7f7f7;padding:.5em .8em}
.small{color:#555;font-size:.92em}
"""


def _escape(value: object) -> str:
    return html.escape(str(value), quote=True)


def _number(value: float | None, decimals: int) -> str:
    return DASH if value is None or not is_known(value) else f"{value:.{decimals}f}"


def _tag(name: str, content: str, **attributes: str | int | None) -> str:
    """An element; content is HTML already, attributes get escaped (`class_` is class, None is left out)."""
    shown = "".join(
        f' {key.rstrip("_")}="{_escape(value)}"' for key, value in attributes.items() if value not in (None, "")
    )
    return f"<{name}{shown}>{content}</{name}>"


def _table(head: str, body: Iterable[str], *, caption: str = "", class_: str | None = None) -> str:
    inner = (_tag("caption", caption) if caption else "") + _tag("thead", head) + _tag("tbody", "\n".join(body))
    return _tag("div", _tag("table", inner, class_=class_), class_="scroll")


def _list(items: Iterable[str]) -> str:
    return _tag("ul", "".join(_tag("li", item) for item in items))


def _metric(name: str) -> str:
    return METRIC_NAMES.get(name, name)


def _best(rows: Sequence[Scores | None], pick: Callable[[Scores], float], decimals: int) -> float | None:
    """The best value as shown, so that two that print alike are both bold."""
    values = [round(pick(scores), decimals) for scores in rows if scores is not None and is_known(pick(scores))]
    return max(values, default=None)


def _is_best(value: float | None, best: float | None, decimals: int) -> bool:
    return best is not None and value is not None and is_known(value) and round(value, decimals) == best


Column = tuple[str, Callable[[Scores], float], int]
COLUMNS: tuple[Column, ...] = (
    ("FI", lambda scores: scores.fi, FAIRNESS_DECIMALS),
    ("Avg AS", lambda scores: scores.avg_as, SCORE_DECIMALS),
    ("Min AS", lambda scores: scores.min_as, SCORE_DECIMALS),
)


def _score_cell(run: Run, policy: str, *, metric: str, column: Column, survey: bool, edge: bool) -> str:
    """One number: bold where best of base, SFT and PPO; a dagger where not above the uniform answer."""
    name, pick, decimals = column
    scores = run.scores(policy, metric, survey=survey)
    value = None if scores is None else pick(scores)
    shown = _number(value, decimals)
    if policy in TRAINED_POLICIES:
        ranked = [run.scores(other, metric, survey=survey) for other in TRAINED_POLICIES]
        if _is_best(value, _best(ranked, pick, decimals), decimals):
            shown = _tag("b", shown)
        uniform = run.scores("uniform", metric, survey=survey)
        # FI of the uniform answer says little (saying nothing makes it high), so only scores are compared.
        if name != "FI" and value is not None and uniform is not None:
            shown += _tag("sup", "†") if value - pick(uniform) <= findings.SHOWN_TIE else ""
    return _tag("td", shown, class_="edge" if edge else None)


def _format_cell(run: Run, policy: str, metric: str) -> str:
    def score(name: str) -> float | None:
        row = run.row(name, metric)
        return None if row is None else row.format_score

    shown = _number(score(policy), SCORE_DECIMALS)
    if policy in TRAINED_POLICIES:
        ranked = [value for name in TRAINED_POLICIES if (value := score(name)) is not None and is_known(value)]
        best = max((round(value, SCORE_DECIMALS) for value in ranked), default=None)
        if _is_best(score(policy), best, SCORE_DECIMALS):
            shown = _tag("b", shown)
    return _tag("td", shown, class_="edge")


def _rule_cell(run: Run, policy: str) -> str:
    return _tag("td", _escape(run.config.get("rule", DASH)) if policy == "ppo" else DASH, class_="text")


TABLE_NOTE = (
    "Bold: best of base, SFT and PPO. †: not above the uniform answer. FI, Avg AS, Min AS and format score "
    "lie in 0 to 1, higher is better."
)


def _present(run: Run) -> list[str]:
    return [policy for policy in POLICIES if any(row.policy == policy for row in run.summary)]


def _has_survey(run: Run) -> bool:
    return any(row.survey is not None for row in run.summary)


def _truths(run: Run) -> list[tuple[str, bool]]:
    return [(TARGETS_NAME, False), (SURVEY_NAME, True)] if _has_survey(run) else [(TARGETS_NAME, False)]


def training_metric_table(run: Run) -> str:
    """Policies by FI, Avg AS and Min AS on the training metric, against both truths side by side."""
    metric = run.training_metric or ""
    truths = _truths(run)
    above = (
        _tag("th", "Policy", rowspan=2)
        + _tag("th", "Server<br>agg.", rowspan=2)
        + "".join(_tag("th", name, colspan=len(COLUMNS), class_="edge") for name, _ in truths)
        + _tag("th", "Format<br>score", rowspan=2, class_="edge")
    )
    below = "".join(
        _tag("th", name, class_="edge" if number == 0 else None)
        for _ in truths
        for number, (name, _, _) in enumerate(COLUMNS)
    )
    body = [
        _tag(
            "tr",
            _tag("th", POLICY_NAMES[policy])
            + _rule_cell(run, policy)
            + "".join(
                _score_cell(run, policy, metric=metric, column=column, survey=survey, edge=number == 0)
                for _, survey in truths
                for number, column in enumerate(COLUMNS)
            )
            + _format_cell(run, policy, metric),
            class_="rule" if policy == "uniform" else None,
        )
        for policy in _present(run)
    ]
    caption = f"Training metric {_escape(_metric(metric))}, held-out questions. {TABLE_NOTE}"
    return _table(_tag("tr", above) + _tag("tr", below), body, caption=caption)


def all_metrics_table(run: Run) -> str:
    """Every metric in the layout of the paper's tables, with a block of rows per truth."""
    metrics = run.metrics
    above = (
        _tag("th", "Targets", rowspan=2)
        + _tag("th", "Method", rowspan=2)
        + _tag("th", "Server<br>agg.", rowspan=2)
        + "".join(_tag("th", name, colspan=len(metrics), class_="edge") for name, _, _ in COLUMNS)
        + _tag("th", "Format<br>score", rowspan=2, class_="edge")
    )
    below = "".join(
        _tag("th", _escape(_metric(metric)), class_="edge" if number == 0 else None)
        for _ in COLUMNS
        for number, metric in enumerate(metrics)
    )
    body = []
    for name, survey in _truths(run):
        present = _present(run)
        for position, policy in enumerate(present):
            cells = _tag("th", name, rowspan=len(present)) if position == 0 else ""
            cells += _tag("td", POLICY_NAMES[policy], class_="text") + _rule_cell(run, policy)
            for column in COLUMNS:
                for number, metric in enumerate(metrics):
                    cells += _score_cell(run, policy, metric=metric, column=column, survey=survey, edge=number == 0)
            cells += _format_cell(run, policy, run.training_metric or "")
            body.append(_tag("tr", cells, class_="rule" if position == 0 else None))
    return _table(_tag("tr", above) + _tag("tr", below), body, caption=TABLE_NOTE, class_="wide")


def per_group_table(run: Run) -> str:
    """A row per group on the training metric, the worst served by PPO (or by what there is) first."""
    metric = run.training_metric
    shown: list[tuple[str, str, bool]] = [
        ("Uniform" if policy == "uniform" else POLICY_NAMES[policy], policy, survey)
        for _, survey in _truths(run)
        for policy in ("base", "sft", "ppo", "uniform")
        if run.scores(policy, metric, survey=survey) is not None
    ]

    def score(group: str, policy: str, survey: bool) -> float | None:
        scores = run.scores(policy, metric, survey=survey)
        return None if scores is None else scores.per_group.get(group)

    def order(group: str) -> float:
        value = score(group, "ppo", False)
        return value if value is not None and is_known(value) else math.inf

    last = run.iterations[-1] if run.iterations else None
    absent = {group: sum(group in line.missing_groups for line in run.iterations) for group in run.groups}
    starts = {0, sum(not survey for _, _, survey in shown)}
    above = _tag("th", "Group", rowspan=2)
    for name, survey in _truths(run):
        width = sum(other == survey for _, _, other in shown)
        above += _tag("th", name, colspan=width, class_="edge") if width else ""
    if last is not None:
        above += _tag("th", "Last weight", rowspan=2, class_="edge") + _tag("th", "Iterations<br>missed", rowspan=2)
    below = "".join(
        _tag("th", name, class_="edge" if number in starts else None) for number, (name, _, _) in enumerate(shown)
    )
    body = []
    unseen = split_names(str(run.config.get("pluralllm.unseen-groups", "")))
    for group in sorted(run.groups, key=order):
        cells = _tag("th", _escape(group) + (" (unseen)" if group in unseen else ""))
        for number, (_, policy, survey) in enumerate(shown):
            value = _number(score(group, policy, survey), SCORE_DECIMALS)
            cells += _tag("td", value, class_="edge" if number in starts else None)
        if last is not None:
            cells += _tag("td", _number(last.weights.get(group), SCORE_DECIMALS), class_="edge")
            cells += _tag("td", str(absent[group]))
        body.append(_tag("tr", cells))
    caption = f"Alignment score ({_escape(_metric(metric or DASH))}) on held-out questions, worst served first."
    if unseen:
        caption += " Unseen: the group has not trained the preference predictor."
    head = _tag("tr", above) + (_tag("tr", below) if shown else "")
    return _table(head, body, caption=caption if shown else "")


def verdict(run: Run) -> str:
    """Whether PPO gained, in words and figures computed from the rows, against each truth."""
    blocks = []
    for name, survey in _truths(run):
        gains = findings.gains(run, survey=survey)
        if not gains:
            continue
        metric = _escape(_metric(run.training_metric or DASH))
        word = f"Against the {name} ({metric}): {findings.verdict_word(gains)}"
        passed = all(gain.verdict == "gain" for gain in gains)
        blocks.append(
            _tag(
                "div",
                _tag("b", word) + _list(_escape(findings.sentence(gain)) for gain in gains),
                class_="verdict" if passed else "verdict none",
            )
        )
    note = _tag("p", "One run with one seed: how far these differences vary between seeds is not known from it.")
    return "\n".join(blocks) + (note if blocks else "")


def way_text(run: Run) -> str:
    """The share of the way from base to ceiling, in one sentence a truth."""
    sentences = []
    for name, survey in _truths(run):
        parts = []
        for way in findings.ways(run, survey=survey):
            share = "base is at the ceiling already" if way.covered is None else f"{way.covered:.0%}"
            parts.append(f"{way.measure} {share}")
        if parts:
            sentences.append(f"Way from base to ceiling covered by PPO, {name}: {', '.join(parts)}.")
    return "".join(_tag("p", _escape(text)) for text in sentences)


def fall_back_text(run: Run) -> str:
    """How often the rule took the plain mean, with a warning where it hardly ever adapted."""
    found = findings.fall_back(run.iterations)
    rule = str(run.config.get("rule", "this one"))
    if found is None:
        text = f"The rule ({rule}) has no threshold: it never switches to the plain mean."
        return _tag("p", _escape(text)) if run.iterations else ""
    adaptive = found.total - found.fell_back
    text = (
        f"The rule ({rule}) fell back to the plain mean in {found.fell_back} of {found.total} iterations "
        f"({found.share:.1%}); it weighted the groups in {adaptive} ({1 - found.share:.1%})."
    )
    shown = _tag("p", _escape(text))
    if found.hardly_adaptive:
        warning = (
            f"Warning: the adaptive branch was taken in less than {1 / findings.HARDLY_EVER:.0%} of the "
            "iterations, so this run is in effect one with the rule average. A "
            "fairness-threshold above 1 keeps the branch open."
        )
        shown += _tag("div", warning, class_="warning")
    return shown


def _facts(pairs: Iterable[tuple[str, object]]) -> str:
    return _tag("dl", "".join(_tag("dt", _escape(k)) + _tag("dd", _escape(v)) for k, v in pairs), class_="facts")


def headline(run: Run) -> str:
    """Task, rule, metric, groups, seed, model, survey, iterations and total time."""
    groups = run.groups
    listed = ", ".join(groups[:MOST_LISTED_GROUPS]) + (", …" if len(groups) > MOST_LISTED_GROUPS else "")
    seconds = findings.total_seconds(run)
    last = run.iterations[-1] if run.iterations else None
    pairs: list[tuple[str, object]] = [
        (key.capitalize(), run.config[key])
        for key in ("task", "rule", "metric", "model", "survey", "seed")
        if run.config.get(key) not in (None, "")
    ]
    pairs.append(("Groups", f"{len(groups)}: {listed}" if groups else "unknown"))
    pairs.append(("Iterations", f"{last.iteration} of {last.num_iterations}" if last else "none"))
    pairs.append(("Total time", findings.duration(seconds) if seconds is not None else "unknown"))
    return _tag("h1", f"Report of run {_escape(run.folder.resolve().name)}") + _facts(pairs)


def missing(run: Run) -> str:
    """What a complete run has and this one lacks, empty for a complete run."""
    if not run.missing:
        return ""
    return _tag("div", _tag("b", "This report is incomplete") + _list(map(_escape, run.missing)), class_="missing")


def image(name: str, png: bytes, *, alt: str) -> str:
    """A picture inside the page, named as its file in plots/."""
    data = base64.b64encode(png).decode("ascii")
    return f'<img src="data:image/png;base64,{data}" alt="{_escape(alt)}" title="{_escape(name)}">'


def _pluralllm(found: PluralLLM) -> str:
    if not found.scores:
        return ""
    head = _tag("tr", "".join(_tag("th", name) for name in predictor.HEAD))
    body = [
        _tag(
            "tr",
            _tag("td", _escape(row.part), class_="text")
            + _tag("td", _escape(row.predictor), class_="text")
            + "".join(_tag("td", _number(value, SCORE_DECIMALS)) for value in row.scores)
            + _tag("td", f"{row.cells:.0f}"),
            class_="rule" if row.first else None,
        )
        for row in predictor.rows(found)
    ]
    sentences = [*filter(None, [predictor.kept(found)]), *predictor.uncertainty(found)]
    return _table(head, body, caption=predictor.note(found)) + _list(map(_escape, sentences))


def _by_context(found: PluralLLM) -> str:
    curves = predictor.context_curves(found)
    if not curves:
        return ""
    head, body = predictor.context_rows(curves)
    lines = [
        _tag("tr", _tag("td", _escape(part), class_="text") + "".join(_tag("td", value) for value in values))
        for part, *values in body
    ]
    return _table(_tag("tr", "".join(_tag("th", name) for name in head)), lines, caption=predictor.CONTEXT_TITLE)


def _targets_error(found: PluralLLM) -> str:
    """How far the learned targets can be trusted, for beside the alignment scores."""
    return "".join(_tag("p", _escape(sentence), class_="small") for sentence in predictor.trust(found))


def _example(example: Example) -> str:
    answers = "".join(
        _tag("div", _tag("b", name) + _tag("pre", _escape(answer)))
        for name, answer in (("SFT", example.sft), ("PPO", example.ppo))
    )
    options = _tag("ol", "".join(_tag("li", _escape(option)) for option in example.options))
    reward = _number(example.mean_reward, SCORE_DECIMALS)
    return (
        _tag("h3", _escape(example.question))
        + options
        + _tag("div", answers, class_="answers")
        + _tag("p", f"Mean reward over the groups: {reward}", class_="small")
    )


def _config(config: Mapping[str, Scalar]) -> str:
    order = [key for key in FIRST_KEYS if key in config] + sorted(set(config) - set(FIRST_KEYS))
    body = [
        _tag("tr", _tag("th", _escape(key)) + _tag("td", _escape(config[key]), class_="text wrap")) for key in order
    ]
    return _table(_tag("tr", _tag("th", "Key") + _tag("th", "Value")), body)


def _section(title: str, *parts: str) -> str:
    """A heading with its parts; nothing where all parts are empty."""
    content = "\n".join(part for part in parts if part)
    return _tag("h2", title) + "\n" + content if content else ""


def _results(rows: Sequence[SummaryRow], run: Run) -> str:
    if not rows:
        return ""
    everything = _tag("h3", "All metrics") + all_metrics_table(run) if len(run.metrics) > 1 else ""
    error = _targets_error(run.pluralllm) if run.pluralllm else ""
    return training_metric_table(run) + error + everything


def page(run: Run, pictures: Mapping[str, tuple[bytes, str]]) -> str:
    """The whole page.

    Args:
        run: the run.
        pictures: name of the picture -> (PNG, text for those who cannot see it); an absent one is left out.

    Returns:
        An HTML document that needs nothing beside it.
    """

    def picture(name: str) -> str:
        return image(name, pictures[name][0], alt=pictures[name][1]) if name in pictures else ""

    waiting = findings.federation_share(run.iterations)
    waiting_text = (
        "" if waiting is None else _tag("p", f"{waiting:.1%} of the iterations' time was spent waiting for groups.")
    )
    sections = [
        headline(run),
        missing(run),
        verdict(run),
        _section("Results", _results(run.summary, run)),
        _section("Way to the ceiling", way_text(run), picture("way_to_ceiling")),
        _section(
            "Per group",
            picture("spider"),
            per_group_table(run) if run.groups else "",
        ),
        _section(
            "Fairness and weights",
            fall_back_text(run),
            picture("fairness"),
            picture("weights"),
            picture("history"),
            picture("rewards"),
        ),
        _section("PPO health", picture("ppo_health")),
        _section("Time", picture("seconds_per_phase"), waiting_text, picture("seconds_per_iteration")),
        _section(
            "Preference predictor",
            _pluralllm(run.pluralllm) if run.pluralllm else "",
            picture("pluralllm"),
            _by_context(run.pluralllm) if run.pluralllm else "",
            picture("pluralllm_context"),
            picture("pluralllm_groups"),
        ),
        _section("Sample answers", *(_example(example) for example in run.examples)),
        _section("Configuration", _config(run.config)),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        + _tag("title", f"Run {_escape(run.folder.resolve().name)}")
        + _tag("style", CSS)
    )
    body = "\n".join(section for section in sections if section)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
