"""What a run can have beside secure sums, told before it starts."""

from __future__ import annotations

from collections.abc import Iterator

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.secure.fixed_point import MOST_GROUPS
from appa_flwr.secure.roster import LEAST_GROUPS, two_thirds
from appa_flwr.secure.terms import check_rule


def check_config(config: Config, *, groups: int | None = None) -> None:
    """Raise a UserError where a run with `run.sums` = "secure" asks for what no sum holds.

    `groups` is their number, where it is known.
    """
    if config.run.sums == "plain":
        return
    for rule in filter(None, (config.rule, config.baseline_rule)):
        check_rule(rule, config.appa)
    for key, why in _beside(config, groups):
        raise UserError(
            f"{key} cannot be beside run.sums = secure, the default of appa deploy: {why}; change it, or choose "
            "run.sums=plain, where the server sees each group's numbers"
        )


def _beside(config: Config, groups: int | None) -> Iterator[tuple[str, str]]:
    trains = config.pluralllm.rounds > 0 and not config.pluralllm.checkpoint
    if config.sft.target == "mean":
        yield "sft.target = mean", "it is made of training answers themselves; predicted-mean is of predictions"
    if config.task == "opa" and config.sft.target == "majority":
        yield "sft.target = majority with task = opa", "the most frequent ranking is no sum; votes is the mean rank"
    if config.run.phases == "serve":
        yield "run.phases = serve", "the service gives other trainers single groups' rewards"
    if groups is not None and not LEAST_GROUPS <= groups <= MOST_GROUPS:
        yield f"{groups} groups", f"sums are over {LEAST_GROUPS} to {MOST_GROUPS}"
    unseen = len(config.unseen_group_names)
    if groups is not None and unseen and trains and two_thirds(groups) - unseen < LEAST_GROUPS:
        yield f"{unseen} pluralllm.unseen-groups of {groups}", "too few would be left in the sum of those that train"
