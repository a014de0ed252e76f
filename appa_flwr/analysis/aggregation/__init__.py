"""Rules that turn the groups' rewards into the one reward PPO trains on, and the paper's equations they consist of.

A new rule is a subclass of `Rule`, its parameters being its fields, and an entry in `RULES`; or it lies in
somebody's own module and is named `module:Class`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from appa_flwr.analysis.aggregation.rules import (
    Alpha,
    Appa,
    Average,
    Combination,
    Minimum,
    Mix,
    Past,
    PrintedAppa,
    Result,
    Rule,
    State,
)
from appa_flwr.analysis.equations import (
    adaptive_aggregate,
    alpha_aggregate,
    alpha_weights,
    historical_alignment,
    reversed_softmax,
)
from appa_flwr.config import Config, check_groups
from appa_flwr.core import own_code
from appa_flwr.core.errors import UserError, first_problem, unknown_name
from appa_flwr.secure.rule_sums import check_config

__all__ = [
    "RULES",
    "Alpha",
    "Appa",
    "Average",
    "Combination",
    "Minimum",
    "Mix",
    "Past",
    "PrintedAppa",
    "Result",
    "Rule",
    "State",
    "adaptive_aggregate",
    "alpha_aggregate",
    "alpha_weights",
    "check_methods",
    "configured",
    "find",
    "historical_alignment",
    "make",
    "reversed_softmax",
    "try_out",
]

_NUM_TRIED = 16  # rollouts that a rule of the user's own is tried on

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Average, Minimum, Alpha, Appa, PrintedAppa, Mix)}
"""Rules by the name they have in config and reports."""


def find(name: str) -> type[Rule]:
    """The rule of that name: one of `RULES`, or for "module:Class" that class of a module that can be imported.

    Raises:
        UserError: an unknown rule, a module that cannot be imported, or no `Rule` of that name in it.
    """
    if name in RULES:
        return RULES[name]
    module, _, class_name = name.partition(":")
    if not class_name:
        raise unknown_name("rule", name, valid=RULES)
    rule = own_code.load(name)
    if not (isinstance(rule, type) and issubclass(rule, Rule) and not inspect.isabstract(rule)):
        raise UserError(
            f'rule "{name}": {module} has no class {class_name} that extends appa_flwr.analysis.aggregation.Rule and '
            "has its `combine`"
        )
    return rule


def configured(name: str, settings: BaseModel) -> Rule:
    """The rule with those of its parameters that a config's section `appa` has; others keep their defaults.

    Raises:
        UserError: see `make`.
    """
    return make(name, **{key: getattr(settings, key) for key in find(name).model_fields if hasattr(settings, key)})


def try_out(rule: Rule, *, num_groups: int) -> None:
    """See before a run that a rule of the user's own works; UserError as in `Rule.apply`."""
    reward_GJ = np.linspace(0.1, 0.9, num_groups * _NUM_TRIED).reshape(num_groups, _NUM_TRIED)
    rule.apply(rule.init(num_groups), reward_GJ, reward_GJ)


def check_methods(config: Config, groups: Sequence[str] = ()) -> None:
    """Check what a run's keys name before anything expensive begins, in a few milliseconds.

    While no names of groups are known, what needs them is left unchecked.

    Raises:
        UserError: a rule cannot be used, keys do not fit the groups, or secure sums cannot be over them.
    """
    for name in config.rules:
        rule = configured(name, config.appa)
        if groups:
            try_out(rule, num_groups=len(groups))
    check_config(config, groups=len(groups) or None)
    if groups:
        check_groups(config, groups)


def make(name: str, **params: Any) -> Rule:
    """The rule of that name, to be used as `state = rule.init(G)`, `result = rule.apply(state, rewards, training)`.

    `params` are numbers, the fields of that rule; only `alpha` of rule `alpha` has no default.

    Raises:
        UserError: an unknown rule or parameter, a missing `alpha`, or a value that is no number or out of range.
    """
    try:
        return find(name).model_validate(params)
    except ValidationError as error:
        raise UserError(f"rule {name!r}: {first_problem(error)}") from None
