"""Reader of a run's folder as DataFrames, for reports, comparisons of runs and notebooks.

Files that a stopped run lacks give empty results. A broken file raises a `UserError` that names file, line or row, and
key.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from appa_flwr.config import Config
from appa_flwr.run import pair_scores, records, schema
from appa_flwr.run.pair_scores import PREDICTIONS
from appa_flwr.run.records import METHODS, MODEL, PPO
from appa_flwr.run.resume import finished
from appa_flwr.run.schema import read_config, rule_folder
from appa_flwr.run.served import read_runs
from appa_flwr.survey.store import read_about

GROUP, BY = "group/", " by "


@dataclass(frozen=True)
class RunReader:
    """Contents of a run's folder.

    Attributes:
        folder: the run's folder.
        config: the run's config.
        summary: one row per method, metric and kind of target (`against`), in the order of tables: `avg_as`, `min_as`,
            `fi`, `fi_readable`, `format_score`, `readable`, and each group's score as `group/NAME`. The policy
            trained by a baseline rule is the method "ppo by RULE".
        iterations: one row per PPO iteration, from metrics.jsonl; `rewards/NAME` is a group's mean reward.
        scores: one row per method, metric, kind of target, group and held-out question, with its reward.
        examples: the held-out questions with the methods' and groups' answers.
        served: trainer's run -> one row per round that was served to it.
        made_by: version and machine; empty if the run has not written them.
        noise: what groups' owners say of noise in their answers; empty if they say nothing.
        by_mean: groups that PluralLLM predicts by the mean of all, since their answers cannot be solved for.
        survey: origin of the survey, and how it was read.
        seconds: time that the run took so far, in all its sessions.
    """

    folder: Path
    config: Config
    summary: pd.DataFrame
    iterations: pd.DataFrame
    scores: pd.DataFrame
    examples: tuple[records.Example, ...]
    served: Mapping[str, pd.DataFrame]
    pluralllm: records.Card | None
    questions: records.QuestionCounts | None
    made_by: str
    noise: str
    by_mean: str
    survey: str
    seconds: float

    @property
    def groups(self) -> tuple[str, ...]:
        """Group names in the order in which the run first names them."""
        frames = (self.summary, self.iterations, *self.served.values())
        columns = [str(column) for frame in frames for column in frame]
        prefixes = (GROUP, "history/", "rewards/")
        names = (column.removeprefix(prefix) for prefix in prefixes for column in columns if column.startswith(prefix))
        return tuple(dict.fromkeys(names))

    @property
    def metric(self) -> str:
        """The metric of PPO's reward; if it has no rows, the first metric that has."""
        known = [*dict.fromkeys(self.summary["metric"])]
        wanted = self.config.reward_metric
        return wanted if wanted in known or not known else known[0]

    @property
    def group_scores(self) -> pd.DataFrame:
        """Scores by that metric: one row per kind of target (`against`) and method, one column per group."""
        rows = self.summary[self.summary["metric"] == self.metric].set_index(["against", "method"])
        scores = rows.reindex(columns=[GROUP + name for name in self.groups]).astype(float)
        return scores.set_axis([*self.groups], axis=1)


def read_run(folder: Path) -> RunReader:
    """Read the files that a run has written so far.

    Raises:
        UserError: see `appa_flwr.run.schema.read_config` and `read`.
    """
    config, progress = read_config(folder), schema.PROGRESS.read(folder)
    begins = max((k for k, line in enumerate(progress) if line.phase == schema.MACHINE), default=0)
    last = {line.phase: line.message for line in progress[begins:]}  # a resumed run may have other answers
    # A resumed run may repeat an iteration; training continued from the later line.
    lines = {line.iteration: line for line in schema.METRICS_FILE.read(folder)}
    summary, scores = [*_summary(folder)], [pair_scores.read(folder)]
    answers = {example.question_id: example for example in schema.EXAMPLES.read(folder) or ()}
    for rule in config.rules[1:]:
        if finished(other := folder / rule_folder(rule)):
            method = PPO + BY + rule
            summary += [{**row, "method": method} for row in _summary(other) if row["method"] == PPO]
            scores.append(pair_scores.read(other).query("method == @PPO").assign(method=method))
            for theirs in schema.EXAMPLES.read(other) or ():
                if ours := answers.get(theirs.question_id):
                    more = {method: theirs.answers[PPO]} if PPO in theirs.answers else {}
                    answers[ours.question_id] = ours.model_copy(update={"answers": ours.answers | more})
    return RunReader(
        folder=folder,
        config=config,
        summary=pd.DataFrame(sorted(summary, key=_place), columns=None if summary else ["method", "metric", "against"]),
        iterations=as_frame([lines[number] for number in sorted(lines)]),
        scores=pd.concat([rows for rows in scores if len(rows)] or scores[:1], ignore_index=True),
        served={name: as_frame(run.rounds) for name, run in read_runs(folder).items()},
        examples=tuple(answers.values()),
        pluralllm=schema.CARD.read(folder),
        questions=schema.QUESTIONS.read(folder),
        made_by=last.get(schema.MACHINE, ""),
        noise=last.get(schema.NOISE, ""),
        by_mean=last.get(schema.BY_MEAN, ""),
        survey=read_about(folder / schema.SURVEY_FILE).sentence(),
        seconds=progress[-1].seconds if progress else 0.0,
    )


def as_frame(lines: Sequence[records.RuleRound]) -> pd.DataFrame:
    """Convert rounds of a rule to one row each; values by group become columns such as `weights/NAME`."""
    return pd.json_normalize([line.model_dump() for line in lines], sep="/")


def _summary(folder: Path) -> Iterator[dict[str, Any]]:
    for row in schema.SUMMARY.read(folder) or ():
        yield row.model_dump(exclude={"per_group"}) | {GROUP + name: score for name, score in row.per_group.items()}


def _place(row: Mapping[str, Any]) -> tuple[int, bool, bool, bool]:
    """Sort key of rows in tables: policies, models of `appa eval`, methods without a model; survey answers first."""
    policy, _, rule = row["method"].partition(BY)
    after = METHODS.index(policy) if policy in METHODS else METHODS.index(PPO)
    return after, policy.startswith(MODEL), rule != "", row["against"] == PREDICTIONS
