"""The page of a report: one file with its pictures inside.

Jinja escapes every text that comes from a run: a group or a question may be called "<script>".
"""

import base64
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from appa_flwr.core.text import duration, listed
from appa_flwr.report import examples, frames, opening, plots, predictor, template
from appa_flwr.report.examples import Shown
from appa_flwr.report.tables import html
from appa_flwr.run import schema
from appa_flwr.run.pair_scores import SURVEY
from appa_flwr.run.read import BY, RunReader
from appa_flwr.run.records import KL_JUMP, LOOK_UPS, PPO, TRAINED_METHODS

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
PICTURE_NOTE = (
    "Against {}, with 95 % intervals over questions. A line of the lower picture is a group, from its score after SFT "
    "to that after PPO; dashed, it loses. The estimate of Min AS is above the lowest score of the groups, which is too "
    "low by chance where they score nearly alike."
)
NO_SURVEY_NOTE = (
    " There are no scores against survey: the groups' owners let none leave (truth in may-leave), or each has fewer "
    "than ten answers of its own to held-out questions."
)
BROKEN_NOTE = (
    f"KL jumped by more than {KL_JUMP:g} nat, or the format score fell by more than {plots.FALL:g} (dashed line). A "
    "warm-up (ppo.warmup-steps) makes the first jump smaller."
)

Picture = tuple[bytes, str]
"""PNG, and alternative text."""


def page(run: RunReader, intervals: pd.DataFrame, pictures: Mapping[str, Picture]) -> str:
    """Make an HTML document that needs no other file; missing pictures are left out."""
    jinja = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    drawn = defaultdict(Markup)
    for name, (png, text) in pictures.items():
        drawn[name] = Markup(template.PICTURE).format(base64.b64encode(png).decode("ascii"), text, name)
    sentences = [*opening.sentences(run, intervals)]
    sections = [*_sections(run, intervals, drawn)]
    shown = [*examples.shown(run)]
    text = Markup(" ").join(part for _, parts in sections for part in parts).striptags()
    terms = _facts(opening.glossary(" ".join([text, *sentences])))
    return jinja.from_string(template.PAGE).render(
        name=run.folder.resolve().name,
        sentences=map(opening.explained, sentences),
        again=opening.five_seeds(run.config) if len(sentences) > 1 else "",
        missing=_facts(missing(run)),
        **_of_examples(run, shown),
        sections=[*sections, ("Terms", [_folded("Terms of this page", terms)])],
    )


def _of_examples(run: RunReader, shown: Sequence[Shown]) -> dict[str, object]:
    """What the template needs to draw examples: them, and the classes of bars and dots by their names."""
    worst, own = examples.worst_off(run)[0], frames.method_name(PPO, run.config.rule)
    kinds = {PPO: "ppo", "sft": "sft", **dict.fromkeys(LOOK_UPS, "look-up")}
    bars = {label: kinds.get(method, "by") for method, label in examples.methods(run).items()}
    predicted = {dot.name in one.predicted: dot for one in shown for row in one.rows for dot in row.dots}
    dots = {"A group's own answer": ""} if False in predicted else {}
    dots |= {"PluralLLM's prediction of a group's answer": "predicted"} if True in predicted else {}
    dots |= {f"{worst}, the worst-off group": "worst"} if dots and len(run.groups) <= frames.MOST_GROUPS else {}
    apart = f"the {examples.OF_EACH} on which the groups' answers differ most, and of the others " if dots else ""
    chosen = (
        f"Held-out questions, chosen by a rule: {apart}the {examples.OF_EACH} with {own}'s lowest and the "
        f"{examples.OF_EACH} with its highest score of the worst-off group, {worst}. examples.json has all."
    )
    if run.config.task == "opa":
        chosen += " Numbers are places in a ranking; a longer bar is a higher place."
    if len(run.groups) > frames.MOST_GROUPS:
        chosen += (
            f" Where more than {frames.MOST_GROUPS} groups are known, dots are their {', '.join(frames.QUANTILES)}."
        )
    if not dots:
        chosen += " No group's answer or prediction has left its node, so there are no dots."
    return {"examples": shown, "chosen": opening.explained(chosen), "worst": worst, "bars": bars, "dots": dots}


def _sections(
    run: RunReader, intervals: pd.DataFrame, drawn: Mapping[str, Markup]
) -> Iterator[tuple[str, list[Markup]]]:
    summary, kinds = run.summary, {*run.summary["against"]}
    if not summary.empty:
        note = PICTURE_NOTE.format(summary["against"].iloc[0]) + ("" if SURVEY in kinds else NO_SURVEY_NOTE)
        yield "Whom it serves", [drawn["methods"], drawn["groups"], _note(note)]
    broken = plots.broken(run.iterations) if len(run.iterations) else []
    note = f"Iteration {', '.join(map(str, broken))}: {BROKEN_NOTE}" if broken else ""
    yield "Training", [drawn["training"], _note(note), _folded("More curves", drawn["more_training"])]
    for name, rounds in run.served.items():
        more = _folded("More curves", drawn[f"more_served_{name}"])
        yield f"Served to {name}", [_facts(frames.served_facts(rounds)), drawn[f"served_{name}"], more]
    yield "Tables", [*_tables(run, intervals)]
    if run.pluralllm is not None:
        scores = html(predictor.scores(run.pluralllm), caption=predictor.CAPTION)
        by_group = _folded("JS by group, held-out questions", html(frames.in_short(predictor.by_group(run.pluralllm))))
        steps = html(frames.in_short(predictor.steps(run.pluralllm)), caption=predictor.STEPS_CAPTION)
        curves = _folded("Curves of its training", drawn["pluralllm"])
        yield "PluralLLM", [scores, by_group, _folded("Steps by group", steps), curves]
    counts = [(key.replace("_", " ").capitalize(), count) for key, count in run.questions or () if count]
    among = {"Unanswered": "Unanswered among the training"}
    questions = [(f"{among.get(kind, kind)} questions", str(count)) for kind, count in counts]
    noise = [("Noise, by the owners' word", run.noise)] if run.noise else []
    yield "Survey", [_facts([("Survey", run.survey or run.config.survey), *noise, *questions])]
    keys = pd.DataFrame(sorted(run.config.flat().items()), columns=["Key", "Value"]).astype(str)
    yield "Provenance", [_facts(provenance(run)), _folded("All keys", html(keys, css="texts"))]


def _tables(run: RunReader, intervals: pd.DataFrame) -> Iterator[Markup]:
    rule, summary = run.config.rule, run.summary
    if not summary.empty:
        note = METHODS_NOTE + (SAMPLE_NOTE if "sampled" in summary else "")
        levels = html(frames.methods(intervals, summary, rule=rule), caption=note, css="wide")
        yield _folded("Scores of all methods", levels)
        few = run.questions is not None and run.questions.held_out < opening.ENOUGH
        note = DIFFERENCES_NOTE + (f" Over fewer than {opening.ENOUGH} questions they are too narrow." if few else "")
        minus = frames.differences(intervals, summary, rule=rule)
        tables = Markup("").join(html(frame, caption=note, sign=True, css="wide") for frame in minus)
        yield _folded("Differences", tables)
        yield _folded("All metrics", html(frames.all_metrics(run), css="wide"))
    yield _folded("Groups", html(frames.in_short(frames.groups(run)), css="wide"))


def _note(text: str) -> Markup:
    return Markup('<p class="small">{}</p>').format(opening.explained(text)) if text else Markup("")


def _folded(title: str, content: Markup) -> Markup:
    return Markup(template.FOLDED).format(title, content) if content else content


def _facts(facts: Iterable[tuple[str, str]]) -> Markup:
    rows = Markup("").join(Markup(template.FACT).format(key, value) for key, value in facts)
    return Markup("<dl>{}</dl>").format(rows) if rows else rows


def missing(run: RunReader) -> Iterator[tuple[str, str]]:
    """What an incomplete run lacks: scores of policies, iterations, and PluralLLM's card."""
    others = (PPO + BY + rule for rule in run.config.rules[1:])
    policies = (*TRAINED_METHODS, *others) if run.config.run.phases == "all" else ()
    if lost := [frames.method_name(name) for name in policies if name not in {*run.summary["method"]}]:
        yield "Without scores", ", ".join(lost)
    lacking: dict[str, list[str]] = {}
    holes = run.group_scores.isna()
    for against, method in holes.index[holes.any(axis=1)]:
        away = listed(holes.columns[holes.loc[against, method]].tolist())
        lacking.setdefault(f"Not scored against {against} by {away}", []).append(frames.method_name(method))
    yield from ((what, ", ".join(methods)) for what, methods in lacking.items())
    if not run.iterations.empty:
        last = run.iterations.iloc[-1]
        if last["iteration"] < last["num_iterations"]:
            yield "Iterations", f"{last['iteration']} of {last['num_iterations']} were made"
    if run.by_mean:
        yield "Predicted by the mean of all groups", f"{run.by_mean}: their own answers could not be used"
    if run.pluralllm is None:
        yield "PluralLLM", f"no {schema.CARD.name}"


def provenance(run: RunReader) -> Iterator[tuple[str, str]]:
    """The command that repeats the run, the version that made it, and facts on its training."""
    config = run.config
    yield "Command", opening.command(config)
    if run.made_by:
        yield "Made by", run.made_by
    own = {"Task": config.task, "Model": config.model, "Rule": config.rule, "Metric": run.metric, "Seed": config.seed}
    yield from ((name, str(value)) for name, value in own.items())
    for name, values in (schema.RULE_VALUES.read(run.folder) or {}).items():
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
