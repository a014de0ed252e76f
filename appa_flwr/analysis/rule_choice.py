"""Choice of aggregation rules: rules by name, with the parameters of a config, and their checks before a run.

A rule is an entry of `appa_flwr.analysis.rules.RULES`, or "module:Class" for a class of an importable module.
"""

import inspect
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from appa_flwr.analysis.rules import RULES, Rule
from appa_flwr.config import Config
from appa_flwr.core import own_code
from appa_flwr.core.errors import UserError, first_problem, unknown_name

_NUM_TRIED = 16  # rollouts on which a user's rule is tried


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
            f'rule "{name}": {module} has no class {class_name} that extends appa_flwr.analysis.rules.Rule and '
            "has its `combine`"
        )
    return rule


def configured(name: str, settings: BaseModel) -> Rule:
    """`make` a rule with its parameters from a config's section `appa`; other parameters keep their defaults."""
    return make(name, **{key: getattr(settings, key) for key in find(name).model_fields if hasattr(settings, key)})


def check_rules(config: Config, groups: Sequence[str] = ()) -> None:
    """Check a run's rules and groups before anything expensive begins, in a few milliseconds.

    Without the names of the groups, checks that need them are skipped.

    Raises:
        UserError: a rule cannot be used, or keys do not fit the groups.
    """
    for name in config.rules:
        rule = configured(name, config.appa)
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
