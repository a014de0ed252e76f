"""Aggregation rules, which combine the groups' rewards into one reward for PPO, and the paper's equations.

To add a rule, subclass `Rule` with the rule's parameters as fields, and add the class to `RULES`; or keep the class in
your own module and name it `module:Class`.
"""

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

_NUM_TRIED = 16  # rollouts on which a user's rule is tried

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Average, Minimum, Alpha, Appa, PrintedAppa, Mix)}
"""Rules by their names in config and reports."""


def find(name: str) -> type[Rule]:
    """Find a rule's class by name: an entry of `RULES`, or "module:Class" for a class of an importable module.

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
    """Make a rule with its parameters from a config's section `appa`; other parameters keep their defaults.

    Raises:
        UserError: see `make`.
    """
    return make(name, **{key: getattr(settings, key) for key in find(name).model_fields if hasattr(settings, key)})


def try_out(rule: Rule, *, num_groups: int) -> None:
    """Check before a run that a user's rule works; raises UserError as `Rule.apply` does."""
    reward_GJ = np.linspace(0.1, 0.9, num_groups * _NUM_TRIED).reshape(num_groups, _NUM_TRIED)
    rule.apply(rule.init(num_groups), reward_GJ, reward_GJ)


def check_methods(config: Config, groups: Sequence[str] = ()) -> None:
    """Check a run's rules and groups before anything expensive begins, in a few milliseconds.

    Without the names of the groups, checks that need them are skipped.

    Raises:
        UserError: a rule cannot be used, keys do not fit the groups, or secure sums do not fit the config.
    """
    for name in config.rules:
        rule = configured(name, config.appa)
        if groups:
            try_out(rule, num_groups=len(groups))
    check_config(config, groups=len(groups) or None)
    if groups:
        check_groups(config, groups)


def make(name: str, **params: Any) -> Rule:
    """Make a rule by name, for use as `state = rule.init(G)`, `result = rule.apply(state, rewards, training)`.

    `params` are numbers, the fields of the rule; only `alpha` of rule `alpha` has no default.

    Raises:
        UserError: an unknown rule or parameter, a missing `alpha`, or a value that is no number or out of range.
    """
    try:
        return find(name).model_validate(params)
    except ValidationError as error:
        raise UserError(f"rule {name!r}: {first_problem(error)}") from None
