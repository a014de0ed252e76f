"""Rules that turn the groups' rewards into the one reward PPO trains on, and the paper's equations they consist of.

A new rule is a subclass of `Rule`, its parameters being its fields, and an entry in `RULES`.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from appa_flwr.analysis.aggregation.beyond import GroupDRO, Mix, Nash, Worst
from appa_flwr.analysis.aggregation.equations import (
    adaptive_aggregate,
    alpha_aggregate,
    alpha_weights,
    historical_alignment,
    reversed_softmax,
)
from appa_flwr.analysis.aggregation.paper import Alpha, Appa, Average, Minimum
from appa_flwr.analysis.aggregation.rule import Combination, Past, Result, Rule, State
from appa_flwr.config import ranges
from appa_flwr.core.errors import UserError, unknown_name

__all__ = [
    "RULES",
    "Alpha",
    "Appa",
    "Average",
    "Combination",
    "GroupDRO",
    "Minimum",
    "Mix",
    "Nash",
    "Past",
    "Result",
    "Rule",
    "State",
    "Worst",
    "adaptive_aggregate",
    "alpha_aggregate",
    "alpha_weights",
    "historical_alignment",
    "make",
    "parameters",
    "reversed_softmax",
]

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Average, Minimum, Alpha, Appa, Mix, GroupDRO, Nash, Worst)}
"""Rules by the name they have in config and reports."""


def parameters(name: str) -> tuple[str, ...]:
    """Names of the parameters that `make(name, ...)` takes.

    Raises:
        UserError: an unknown rule.
    """
    if name not in RULES:
        raise unknown_name("rule", name, valid=RULES)
    return tuple(RULES[name].model_fields)


def make(name: str, **params: Any) -> Rule:
    """The rule of that name, to be used as `state = rule.init(G)`, `result = rule.apply(state, rewards, training)`.

    `params` are numbers, the fields of that rule; only `alpha` of rule `alpha` has no default.

    Raises:
        UserError: an unknown rule or parameter, a missing `alpha`, or a value that is no number or out of range.
    """
    valid = parameters(name)
    for key in params:
        if key not in valid:
            raise unknown_name(f"parameter of rule {name!r}", key, valid=valid)
    try:
        return RULES[name].model_validate(params)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            raise UserError(f"rule {name!r} needs parameter {first['loc'][0]!r}, a number") from None
        raise UserError(f"parameter {first['loc'][0]!r} of rule {name!r} {ranges.complaint(error)}") from None
