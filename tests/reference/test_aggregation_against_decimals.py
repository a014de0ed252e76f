"""Whole runs of every rule against scalar loops in 50-digit decimals."""

from decimal import Decimal, localcontext

import numpy as np
import pytest

from appa_flwr.analysis.rule_choice import make

DIGITS = 50


def _mean(values):
    return sum(values, Decimal(0)) / len(values)


def _fairness(rows):
    per_question = []
    for column in zip(*rows, strict=True):
        mean = _mean(column)
        variance = _mean([(value - mean) ** 2 for value in column])
        per_question.append(1 / (1 + variance / mean**2))
    return _mean(per_question)


PRINTED = {"temperature": "0.1", "fairness_threshold": "0.99"}


def _combine(name, params, rows, history, fairness):
    alphas = None
    if name == "appa":
        powers = [((1 - h) / Decimal(params["temperature"])).exp() for h in history]
        alphas = [power / sum(powers) for power in powers]
    aggregates = []
    for column in zip(*rows, strict=True):
        if name == "average" or (name == "appa" and fairness >= Decimal(params["fairness_threshold"])):
            aggregates.append(_mean(column))
        elif name == "min":
            aggregates.append(sorted(column)[0])
        elif name == "alpha":
            alpha = Decimal(params["alpha"])
            aggregates.append(_mean([(alpha * value).exp() for value in column]).ln() / alpha)
        else:
            aggregates.append(_mean([(a * value).exp() for a, value in zip(alphas, column, strict=True)]).ln())
    return aggregates, alphas


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("average", {}),
        ("min", {}),
        ("alpha", {"alpha": "-7.5"}),
        ("alpha", {"alpha": "0.000001"}),
        ("alpha", {"alpha": "40"}),
        ("appa", PRINTED),
        ("appa", {"temperature": "0.02", "fairness_threshold": "1.5"}),
    ],
)
def test_a_run_of_ten_iterations_with_gaps(name, params):
    rng = np.random.default_rng(7)
    num_groups, num_rollouts = 5, 6
    rule = make(name, **{key: float(value) for key, value in params.items()})
    state = rule.init(num_groups)
    branches = set()
    with localcontext() as context:
        context.prec = DIGITS
        history: dict[int, Decimal] = {}
        for iteration in range(10):
            spread = 0.05 if iteration % 2 else 0.4
            reward_GJ = 0.5 + spread * rng.uniform(-1, 1, size=(num_groups, num_rollouts))
            training_GJ = 0.85 * reward_GJ + 0.15 * rng.random(num_rollouts)
            # Groups 3 and 4 join at iteration 3, while 0 is away; later any drops out and comes back.
            absent = set(np.flatnonzero(rng.random(num_groups) < 0.2).tolist())
            if iteration <= 3:
                absent = {3, 4} if iteration < 3 else {0}
            for group in absent:
                reward_GJ[group] = training_GJ[group] = np.nan
            present = [group for group in range(num_groups) if group not in absent]

            rows = [[Decimal(float(value)) for value in reward_GJ[group]] for group in present]
            training = [[Decimal(float(value)) for value in training_GJ[group]] for group in present]
            start = _mean(list(history.values())) if history else Decimal(0)
            before = {group: history.get(group, start) for group in present}
            fairness = _fairness(rows)
            aggregates, alphas = _combine(name, params, training, list(before.values()), fairness)
            for group, row in zip(present, rows, strict=True):
                history[group] = Decimal("0.8") * before[group] + Decimal("0.2") * _mean(row)

            result = rule.apply(state, reward_GJ, training_GJ)
            state = result.state
            branches.add(result.fell_back)
            assert result.fairness_index == pytest.approx(float(fairness), rel=1e-12)
            np.testing.assert_allclose(result.aggregate_J, [float(value) for value in aggregates], rtol=1e-13)
            expected_history = [float(history.get(group, 0)) for group in range(num_groups)]
            np.testing.assert_allclose(state.history_G, expected_history, rtol=1e-13)
            assert result.weight_G.sum() == pytest.approx(1.0)
            assert not result.weight_G[sorted(absent)].any()
            if alphas:
                np.testing.assert_allclose(result.weight_G[present], [float(value) for value in alphas], rtol=1e-12)
    if params is PRINTED:
        assert branches == {True, False}


def test_many_groups_keep_their_digits():
    # alpha_g is about 1/1024 and exp(alpha_g r) about 1.0005: its digits behind the one carry the reward.
    reward_GJ = np.random.default_rng(8).random((1024, 4))
    rule = make("appa", fairness_threshold=2.0)
    aggregate_J = rule.apply(rule.init(1024), reward_GJ, reward_GJ).aggregate_J
    with localcontext() as context:
        context.prec = DIGITS
        share = 1 / Decimal(1024)
        for rollout, got in enumerate(aggregate_J):
            expected = _mean([(share * Decimal(float(value))).exp() for value in reward_GJ[:, rollout]]).ln()
            assert got == pytest.approx(float(expected), rel=1e-14, abs=0.0)
