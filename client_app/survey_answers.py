"""A group's private survey answers: where they lie, and how they are cut to the server's public questions.

Axis letters: Q public questions, N questions a group answered, K options.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache

from flwr.app import Context

from appa_flwr.config import GENERATED_SURVEY, Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.own_code import reader_of
from appa_flwr.owner.owner_policy import OwnerPolicy
from appa_flwr.protocol import wire
from appa_flwr.survey import generate, read
from appa_flwr.survey.types import FloatArray, Question, Survey
from client_app.outgoing import Refused

Answers = Mapping[str, FloatArray]

log = logging.getLogger("appa.client")


def deployed(node_config: Mapping[str, object]) -> bool:
    """True if the node is a party of its own, and not a part of a simulation."""
    return bool(node_config.get("group"))


def check_allowed(config: Config, owner_policy: OwnerPolicy) -> None:
    """Refuse a run that asks for training answers, predictions or a foreign metric where the owner has not allowed it.

    Raises:
        Refused: `sft.target` is a mean, or `metric` is foreign.
    """
    if not owner_policy.allows(config.reward_metric):
        raise Refused(wire.METRIC_REFUSED)
    if config.sft.target == "mean" and not owner_policy.mean:
        raise Refused(wire.MEAN_REFUSED)
    # The mean of predictions over groups that the owner knows tells no group's own.
    if config.sft.target == "predicted-mean" and not (owner_policy.probes or owner_policy.roster):
        raise Refused(wire.PREDICTIONS_REFUSED)


def check_training(config: Config, owner_policy: OwnerPolicy) -> None:
    """Refuse to train PluralLLM as the owner has not allowed it.

    Raises:
        Refused: at all, by plain SGD, or by so few steps that what changes is a sum of single answers.
    """
    if not owner_policy.training:
        raise Refused(wire.TRAINING_REFUSED)
    sgd = config.pluralllm.local_optimizer == "sgd"
    if (sgd and not owner_policy.sgd) or config.pluralllm.local_steps < owner_policy.least_steps:
        raise Refused(wire.WEAK_TRAINING)


def my_groups(config: Config, node_config: Mapping[str, object]) -> tuple[str, ...]:
    """The groups this node speaks for.

    In simulation node `partition-id` of `num-partitions` hosts every `num-partitions`-th group; deployed, the node's
    own config names its group or groups (`group = "Kenya"`, several separated by semicolons), or a UserError says so.
    """
    if deployed(node_config):
        return tuple(name for part in str(node_config["group"]).split(";") if (name := part.strip()))
    if "partition-id" not in node_config:
        raise UserError('node-config lacks `group`: start the SuperNode with --node-config \'group="..." data="..."\'')
    first, step = int(str(node_config["partition-id"])), int(str(node_config["num-partitions"]))
    return all_groups(config)[first::step]


def all_groups(config: Config) -> tuple[str, ...]:
    """Every group of a simulated run, in the order all nodes agree on."""
    if config.group_names:
        return config.group_names
    if config.survey == GENERATED_SURVEY:
        return _generated(config).groups
    return read.group_names(read.Source.of(config.survey, config.data))


def answers(
    config: Config, node_config: Mapping[str, object], groups: Sequence[str], public: tuple[Question, ...]
) -> dict[str, Answers | UserError]:
    """These groups' answers to the public questions, from the node's own file (`data`) or the run's survey, read once.

    An answer counts if the file has the question with the same options in the same order.

    Returns:
        Each group's answers, or why it has none that can be used.

    Raises:
        UserError: the file cannot be read at all.
    """
    path = str(node_config.get("data", "")) or config.survey
    if deployed(node_config) and not node_config.get("data") and reader_of(path).name:
        raise UserError("survey is somebody's code, which runs in simulations only; name the node's own file as data")
    if path == GENERATED_SURVEY:
        everyone = _generated(config).answers
        known = f"not in the generated survey, which has {', '.join(everyone)}"
        options = {question.question_id: question.options for question in public}
        found: dict[str, Answers | UserError] = {
            group: everyone.get(group) or UserError(f"group '{group}' is {known}") for group in groups
        }
    else:
        answer_filter = read.AnswerFilter(config.data.refusals, config.data.min_respondents)
        source = read.Source.of(path, config.data)
        try:
            found, options = read.read_groups(source, groups, answer_filter=answer_filter)
        except ModuleNotFoundError as missing:
            raise UserError(
                f"{path} cannot be read without {missing.name}, which is not among a group's requirements; "
                f"pip install {missing.name}, or give the answers as .jsonl or .csv"
            ) from None
    return {
        group: mine if isinstance(mine, UserError) else _about(public, mine, options) for group, mine in found.items()
    }


def _about(public: tuple[Question, ...], private: Answers, options: Mapping[str, tuple[str, ...]]) -> Answers:
    wanted = {question.question_id: question.options for question in public}
    kept = {key: value for key, value in private.items() if key in wanted and options[key] == wanted[key]}
    reordered = sum(key in wanted for key in private) - len(kept)
    if reordered:
        log.warning("%d answers are left out: their options differ from the server's public questions", reordered)
    return kept


_generate = lru_cache(maxsize=2)(generate.generate)


def _generated(config: Config) -> Survey:
    return _generate(**generate.population(config.data, config.seed))


def context_config(context: Context) -> Config:
    """The run's config, checked at this door too."""
    given = context.run_config.items()
    return Config.load({key: value for key, value in given if isinstance(value, bool | int | float | str)})
