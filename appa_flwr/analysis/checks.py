"""Checks of a run's rules and groups, for whatever starts a run."""

from __future__ import annotations

from collections.abc import Sequence

from appa_flwr.analysis import aggregation
from appa_flwr.config import Config, check_groups
from appa_flwr.secure.rule_sums import check_config


def check_methods(config: Config, groups: Sequence[str] = ()) -> None:
    """Check what a run's keys name before anything expensive begins, in a few milliseconds.

    Args:
        config: the run's.
        groups: names of all that take part; while none are known, what needs them is left unchecked.

    Raises:
        UserError: a rule cannot be used, keys do not fit the groups, or secure sums cannot be over them.
    """
    for name in config.rules:
        rule = aggregation.configured(name, config.appa)
        if groups:
            aggregation.try_out(rule, num_groups=len(groups))
    check_config(config, groups=len(groups) or None)
    if groups:
        check_groups(config, groups)
