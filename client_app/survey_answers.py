"""A group's private survey answers, from the only file that its node reads, cut to the server's public questions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from flwr.app import Context

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.survey import store
from appa_flwr.survey.types import FloatArray, Question, Survey
from client_app import state

Answers = Mapping[str, FloatArray]

log = logging.getLogger("appa.client")


def deployed(node_config: Mapping[str, object]) -> bool:
    """True if the node is a party of its own, and not a part of a simulation."""
    return bool(node_config.get("group"))


def my_groups(context: Context) -> tuple[str, ...]:
    """The groups this node speaks for.

    In simulation node `partition-id` of `num-partitions` hosts every `num-partitions`-th group of the run's survey;
    deployed, the node's own config names its group or groups (`group = "Kenya"`, several separated by semicolons).

    Raises:
        UserError: a deployed node's config names none, or the run's survey cannot be read.
    """
    own = context.node_config
    if deployed(own):
        return tuple(name for part in str(own["group"]).split(";") if (name := part.strip()))
    if "partition-id" not in own:
        raise UserError('node-config lacks `group`: start the SuperNode with --node-config \'group="..." data="..."\'')
    return _survey(context).groups[int(str(own["partition-id"])) :: int(str(own["num-partitions"]))]


def answers(context: Context, groups: Sequence[str], public: tuple[Question, ...]) -> dict[str, Answers | UserError]:
    """These groups' answers to the public questions; one counts if its options are the public ones, in their order.

    Returns:
        Each group's answers, or why it has none that can be used.

    Raises:
        UserError: the file cannot be read.
    """
    survey = _survey(context)
    wanted = {question.question_id: question.options for question in public}
    same = {q.question_id for q in survey.questions if wanted.get(q.question_id) == q.options}
    if reordered := sum(q.question_id in wanted for q in survey.questions) - len(same):
        log.warning("%d questions are left out: their options differ from the server's public ones", reordered)
    known = ", ".join(survey.groups)
    return {
        group: {key: shares for key, shares in survey.answers[group].items() if key in same}
        if group in survey.answers
        else UserError(f"group '{group}' is not in the survey file, which has {known}")
        for group in groups
    }


def _survey(context: Context) -> Survey:
    """A deployed node's own file, which only its owner names (`data`); in simulation the file of the run's folder."""
    if not deployed(context.node_config):
        path = state.survey_file(state.memory_of(context))
    elif not (path := str(context.node_config.get("data", ""))):
        raise UserError("node-config lacks `data`: name the group's own survey file, as `appa survey` writes it")
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


@lru_cache(maxsize=2)
def _read(path: str, changed: int) -> Survey:
    return store.read(path)


def context_config(context: Context) -> Config:
    """The run's config, checked at this door too."""
    items = context.run_config.items()
    return Config.load({key: value for key, value in items if isinstance(value, bool | int | float | str)})
