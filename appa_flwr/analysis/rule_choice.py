"""Choice of aggregation rules: rules by name, with the parameters of a config, and their checks before a run.

A rule is an entry of `appa_flwr.analysis.rules.RULES`, or a user's class or instance "module:name".
"""

import inspect
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from appa_flwr.analysis.rules import RULES, Rule
from appa_flwr.config import Config
from appa_flwr.config.sections import APPASection
from appa_flwr.core import own_code
from appa_flwr.core.errors import UserError, first_problem, unknown_name

_NUM_TRIED = 16  # rollouts on which a user's rule is tried


def find(name: str) -> tuple[type[Rule], dict[str, Any]]:
    """Find a rule's class by name, and the values that a user's instance sets: an entry of `RULES`, or "module:name".

    Raises:
        UserError: an unknown rule, a module that cannot be imported, or no rule of that name in it.
    """
    if name in RULES:
        return RULES[name], {}
    module, _, name_there = name.partition(":")
    if not name_there:
        raise unknown_name("rule", name, valid=RULES)
    rule = own_code.load(name)
    if isinstance(rule, Rule):
        return type(rule), {key: getattr(rule, key) for key in rule.model_fields_set}
    if not (isinstance(rule, type) and issubclass(rule, Rule) and not inspect.isabstract(rule)):
        raise UserError(
            f'rule "{name}": {module} has no class {name_there} that extends appa_flwr.analysis.rules.Rule and '
            "has its `combine`, and no instance of such a class"
        )
    return rule, {}


def make(name: str, **params: Any) -> Rule:
    """Make a rule by name, for use as `state = rule.init(G)`, `result = rule.apply(state, rewards, training)`.

    `params` are fields of the rule, in place of an instance's values; only `alpha` of rule `alpha` has no default.

    Raises:
        UserError: an unknown rule or parameter, a missing `alpha`, or a value that is no number or out of range.
    """
    rule, values = find(name)
    try:
        return rule.model_validate({**values, **params})
    except ValidationError as error:
        raise UserError(f"rule {name!r}: {first_problem(error)}") from None


def configured(name: str, settings: APPASection) -> Rule:
    """`make` a rule with its parameters from a config's section `appa`; a user's rule takes `ema_decay` alone.

    Values that an instance sets come first.
    """
    rule, values = find(name)
    keys = rule.model_fields if name in RULES else ("ema_decay",)
    return make(name, **{key: getattr(settings, key) for key in keys if key not in values})


def check_rules(config: Config, groups: Sequence[str] = ()) -> dict[str, Rule]:
    """Make a run's rules, and check them and the groups before anything expensive begins, in a few milliseconds.

    Without the names of the groups, checks that need them are skipped.

    Raises:
        UserError: a rule cannot be used, or keys do not fit the groups.
    """
    rules = {name: configured(name, config.appa) for name in config.rules}
    for name, rule in rules.items():
        if groups:  # a user's rule may fail
            reward_GJ = np.linspace(0.1, 0.9, len(groups) * _NUM_TRIED).reshape(len(groups), _NUM_TRIED)
            try:
                rule.apply(rule.init(len(groups)), reward_GJ, reward_GJ)
            except UserError:
                raise
            except Exception as error:
                at = traceback.extract_tb(error.__traceback__)[-1]
                cause = f"{own_code.in_words(error)} ({at.filename}, line {at.lineno})"
                raise UserError(f'rule "{name}" does not work: {cause}') from error
    if groups and len(groups) < config.run.min_groups:
        raise UserError(
            f"run.min-groups = {config.run.min_groups} must be at most the number of groups, which is {len(groups)}"
        )
    return rules
