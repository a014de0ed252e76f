"""Choice of aggregation rules: rules by name, with the parameters of a config, and their checks before a run.

A rule is an entry of `appa_flwr.analysis.rules.RULES`, or a user's class or instance "module:name".
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from appa_flwr.analysis.rules import RULES, Rule
from appa_flwr.config import Config
from appa_flwr.config.sections import APPA_DEFAULTS, APPASection
from appa_flwr.core.errors import UserError, first_problem, in_words, unknown_name
from appa_flwr.core.files import sha256_of

CODE_FOLDER: Final = "APPA_CODE"
"""Environment variable that tells the server's process the folder in which the run was started."""

_NUM_TRIED = 16  # rollouts on which a user's rule is tried


def find(name: str) -> tuple[type[Rule], dict[str, Any]]:
    """Find a rule's class by name, and the values that an instance sets: an entry of `RULES`, or "module:name".

    Raises:
        UserError: an unknown rule, a module that cannot be imported, or no rule of that name in it.
    """
    module, _, name_there = name.partition(":")
    if name not in RULES and not name_there:
        raise unknown_name("rule", name, valid=RULES)
    rule = RULES[name] if name in RULES else _load(name)
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
    return make(name, **{key: getattr(settings, key) for key in _keys(name)})


def unread(config: Config) -> list[str]:
    """Keys of rules' parameters that the config changes, and that none of its rules takes from the config."""
    taken = {key for name in config.rules for key in _keys(name)}
    other = {key for name in RULES for key in _keys(name)} - taken
    changed = (key for key in sorted(other) if getattr(config.appa, key) != getattr(APPA_DEFAULTS, key))
    return [f"appa.{key.replace('_', '-')}" for key in changed]


def _keys(name: str) -> list[str]:
    rule, values = find(name)
    return [key for key in (rule.model_fields if name in RULES else ("ema_decay",)) if key not in values]


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
                cause = f"{in_words(error)} ({at.filename}, line {at.lineno})"
                raise UserError(f'rule "{name}" does not work: {cause}') from error
    if groups and len(groups) < config.run.min_groups:
        raise UserError(
            f"run.min-groups = {config.run.min_groups} must be at most the number of groups, which is {len(groups)}"
        )
    return rules


def text_hash(name: str) -> str:
    """Hash of the file of the module of a loaded "module:name"; empty for the name of a rule of this package."""
    file = Path(getattr(sys.modules.get(name.partition(":")[0]), "__file__", None) or "")
    return sha256_of(file) if ":" in name and file.is_file() else ""


def _load(name: str) -> object:
    """Load a rule's "module:name", also from the folder where the run was started; None if the module lacks the name.

    Raises:
        UserError: the module cannot be imported.
    """
    module, _, held = name.partition(":")
    try:
        if (folder := os.environ.get(CODE_FOLDER) or os.getcwd()) not in sys.path:
            sys.path.append(folder)
        return getattr(importlib.import_module(module), held, None)
    except (Exception, SystemExit) as error:  # the module's code can raise anything
        there = not (isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0])
        advice = "" if there else "; it has to lie in the folder where the run starts, or be installed"
        raise UserError(f'rule "{name}": {module} cannot be imported ({in_words(error)}){advice}') from error
