"""Parameters of the paper's equations: config and rules take the same ones, with the same ranges and defaults."""

from __future__ import annotations

import math

import pytest

from appa_flwr.analysis.aggregation import RULES, make
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ema_decay", 1.0),
        ("ema_decay", -0.1),
        ("temperature", 0.0),
        ("temperature", math.inf),
        ("fairness_threshold", -0.1),
        ("alpha", math.nan),
        ("worst_share", 1.1),
    ],
)
def test_config_and_rules_refuse_the_same_values(name, value):
    key = f"appa.{name.replace('_', '-')}"
    with pytest.raises(UserError, match=f"{key} = .* is not valid"):
        Config.load({key: value})
    takers = [rule for rule in RULES if name in RULES[rule].model_fields]
    assert takers
    for rule in takers:
        with pytest.raises(UserError, match=f"rule '{rule}': {name}: Input should be"):
            make(rule, **{name: value})


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "alpha"])
def test_rules_default_to_the_numbers_of_runs(rule):
    made, of_config = make(rule), Config.load({}).appa
    for name in RULES[rule].model_fields:
        assert getattr(made, name) == getattr(of_config, name)
