"""The page of a report: one file with its pictures inside and no script.

Jinja escapes every text that comes from a run: a group or a question may be called "<script>".
"""

import base64
from collections.abc import Iterable, Iterator, Mapping

import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from appa_flwr.core.text import duration, listed
from appa_flwr.report import frames, opening, predictor, template
from appa_flwr.report.tables import html
from appa_flwr.run import run_files
from appa_flwr.run.read import BY, GROUP, RunFiles
from appa_flwr.run.records import PPO, TRAINED_METHODS

FEW_QUESTIONS = 30
"""With fewer questions, bootstrap samples are too similar, and the intervals too narrow."""
METHODS_NOTE = (
    "Held-out questions, 0 to 1, higher is better, with 95 % intervals over questions. Where groups score nearly "
    "alike, the lowest of their scores is too low by chance. Intervals and differences of Min AS are corrected for "
    "this, so a difference is not exactly that of two scores in this table."
)
DIFFERENCES_NOTE = (
    "95 % intervals of paired differences, over questions; bold where the interval excludes 0. They do not cover how "
    "far runs with other seeds differ."
)
SAMPLE_NOTE = (
    " Ceilings are of a sample of the questions, as many as named: estimates, beside scores of all questions. "
    "Differences are over the same questions."
)

Picture = tuple[bytes, str]
"""PNG, and alternative text."""


def page(run: RunFiles, intervals: pd.DataFrame, pictures: Mapping[str, Picture]) -> str:
    """Make an HTML document that needs no other file; missing pictures are left out."""
    jinja = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    drawn = {
        name: [Markup(template.PICTURE).format(base64.b64encode(png).decode("ascii"), text, name)]
        for name, (png, text) in pictures.items()
    }
    sentences, sections = [*opening.sentences(run, intervals)], [*_sections(run, intervals, drawn)]
    text = Markup(" ").join(part for _, parts in sections for part in parts).striptags()
    return jinja.from_string(template.PAGE).render(
        name=run.folder.resolve().name,
        sentences=sentences,
        missing=_facts(missing(run)),
        glossary=_facts(opening.glossary(" ".join([text, *sentences]))),
        sections=sections,
    )


def _sections(
    run: RunFiles, intervals: pd.DataFrame, drawn: Mapping[str, list[Markup]]
) -> Iterator[tuple[str, list[Markup]]]:
    rule, summary = run.config.rule, run.summary
    if not summary.empty:
        note = METHODS_NOTE + (SAMPLE_NOTE if "sampled" in summary else "")
        levels = html(frames.methods(intervals, summary, rule=rule), caption=note, css="wide")
        every = _folded("All metrics", html(frames.all_metrics(run), css="wide"))
        yield "Scores", [*drawn.get("worst_group", ()), levels, every]
        few = run.questions is not None and run.questions.held_out < FEW_QUESTIONS
        note = DIFFERENCES_NOTE + (f" Over fewer than {FEW_QUESTIONS} questions they are too narrow." if few else "")
        differences = frames.differences(intervals, summary, rule=rule)
        yield "Differences", [html(minus, caption=note, sign=True, css="wide") for minus in differences]
    yield "Groups", [html(frames.in_short(frames.groups(run)), css="wide")]
    yield "Training", [_folded("Curves of training", picture) for picture in drawn.get("training", ())]
    for name, rounds in run.served.items():
        yield f"Served to {name}", [_facts(frames.served_facts(rounds)), *drawn.get(f"served_{name}", ())]
    if run.pluralllm is not None:
        scores = html(predictor.scores(run.pluralllm), caption=predictor.CAPTION)
        by_group = _folded("JS by group, held-out questions", html(frames.in_short(predictor.by_group(run.pluralllm))))
        steps = html(frames.in_short(predictor.steps(run.pluralllm)), caption=predictor.STEPS_CAPTION)
        yield "PluralLLM", [scores, by_group, _folded("Steps by group", steps), *drawn.get("pluralllm", ())]
    counts = [] if run.questions is None else [(key, str(count)) for key, count in run.questions if count]
    questions = [(f"{key.replace('_', ' ').capitalize()} questions", count) for key, count in counts]
    noise = [("Noise, by the owners' word", run.noise)] if run.noise else []
    yield "Survey", [_facts([("Survey", run.survey or run.config.survey), *noise, *questions])]
    keys = pd.DataFrame(sorted(run.config.flat().items()), columns=["Key", "Value"]).astype(str)
    yield "Provenance", [_facts(provenance(run)), _folded("All keys", html(keys, css="texts"))]


def _folded(title: str, content: Markup) -> Markup:
    return Markup(template.FOLDED).format(title, content) if content else content


def _facts(facts: Iterable[tuple[str, str]]) -> Markup:
    rows = Markup("").join(Markup(template.FACT).format(key, value) for key, value in facts)
    return Markup("<dl>{}</dl>").format(rows) if rows else rows


def missing(run: RunFiles) -> Iterator[tuple[str, str]]:
    """What an incomplete run lacks: scores of policies, iterations, and PluralLLM's card."""
    others = (PPO + BY + rule for rule in run.config.rules[1:])
    policies = (*TRAINED_METHODS, *others) if run.config.run.phases == "all" else ()
    if lost := [frames.method_name(name) for name in policies if name not in {*run.summary["method"]}]:
        yield "Without scores", ", ".join(lost)
    lacking: dict[str, list[str]] = {}
    for _, row in run.summary[run.summary["metric"] == run.metric].iterrows():
        scores = row.filter(regex=f"^{GROUP}")
        if away := listed([name.removeprefix(GROUP) for name in scores.index[scores.isna()]]):
            methods = lacking.setdefault(f"Not scored against {row['against']} by {away}", [])
            methods.append(frames.method_name(row["method"]))
    yield from ((what, ", ".join(methods)) for what, methods in lacking.items())
    if not run.iterations.empty:
        last = run.iterations.iloc[-1]
        if last["iteration"] < last["num_iterations"]:
            yield "Iterations", f"{last['iteration']} of {last['num_iterations']} were made"
    if run.by_mean:
        yield "Predicted by the mean of all groups", f"{run.by_mean}: their own answers could not be used"
    if run.pluralllm is None:
        yield "PluralLLM", f"no {run_files.CARD.name}"


def provenance(run: RunFiles) -> Iterator[tuple[str, str]]:
    """The command that repeats the run, the version that made it, and facts on its training."""
    config = run.config
    yield "Command", opening.command(config)
    if run.made_by:
        yield "Made by", run.made_by
    own = {"Task": config.task, "Model": config.model, "Rule": config.rule, "Metric": run.metric, "Seed": config.seed}
    yield from ((name, str(value)) for name, value in own.items())
    for name, values in (run_files.RULE_VALUES.read(run.folder) or {}).items():
        if name in config.rules:  # the folder of one of `baseline-rules` has the values of all
            yield f"Parameters of {name}", values.sentence()
    if not run.iterations.empty:
        last, parts = run.iterations.iloc[-1], run.iterations.filter(like="seconds/").sum()
        yield "Iterations", f"{last['iteration']} of {last['num_iterations']}"
        if (fell_back := run.iterations["fell_back"].dropna()).size:
            yield "Plain mean taken", f"in {int(fell_back.sum())} of {len(fell_back)} iterations"
        if run.iterations["kl_jumped"].any():
            numbers = run.iterations.loc[run.iterations["kl_jumped"], "iteration"].astype(str)
            yield "KL jumped", f"in iteration {', '.join(numbers)}"
        yield "Time of PPO", duration(parts.sum())
        if "seconds/federation_wait" in parts:
            yield "Waiting for groups", f"{parts['seconds/federation_wait'] / parts.sum():.1%} of PPO's time"
