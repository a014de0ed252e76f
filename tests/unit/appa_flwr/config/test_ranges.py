"""Parameters of the paper's equations: config and rules take the same ones, with the same ranges and defaults."""

from __future__ import annotations

import math

import pytest

from appa_flwr.analysis.aggregation import RULES, make, parameters
from appa_flwr.config import Config, preset
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
    takers = [rule for rule in RULES if name in parameters(rule)]
    assert takers
    for rule in takers:
        with pytest.raises(UserError, match=f"parameter '{name}' of rule '{rule}' must be"):
            make(rule, **{name: value})


@pytest.mark.parametrize("rule", RULES)
def test_rules_default_to_the_papers_numbers_as_its_preset_does(rule):
    made = make(rule, alpha=0.0) if rule == "alpha" else make(rule)
    of_config = Config.load(preset("paper")).appa
    for name in parameters(rule):
        assert getattr(made, name) == getattr(of_config, name)
