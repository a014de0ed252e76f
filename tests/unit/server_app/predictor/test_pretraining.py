"""Federated pretraining on the server: numbers worked out by hand, over groups that always take the same step.

Axis letters: G groups, V choices of what views count.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from in_process import flower_task

from appa_flwr.config import Config
from appa_flwr.config.sections import PluralLLMSection
from appa_flwr.core.errors import UserError
from appa_flwr.protocol.asks import UPDATE, VALIDATION, Number, flatten
from pluralllm.residual import SHARES_KEY
from server_app.federation.ask import Replies
from server_app.predictor.pretraining import pretrain

STRATEGIES = get_args(PluralLLMSection.model_fields["strategy"].annotation)
STEPS = np.array([[0.25, -0.5], [-0.75, 0.125]])  # each group's change of the weights, the same in every round
COUNTS = (30, 10)
LOSS = 0.5


class Training:
    """Groups that change the weights by their steps, resting on so many answers each, and report these errors.

    Attributes:
        asked: every request for numbers.
    """

    def __init__(self, config, steps_G, counts_G, errors_G, *, plain):
        self.config, self.plain, self.asked = config, plain, []
        self.names = tuple("ABCDE"[: len(steps_G)])
        self._steps_G, self._counts_G, self._errors_G = steps_G, counts_G, errors_G

    def ask(self, ask, *, meanwhile=None):
        self.asked.append(ask)
        one = Number((1,), -np.inf, np.inf)
        if ask.kind == UPDATE:
            shape = ask.array("weights", np.float32, axes=1).shape
            numbers = {"step": Number(shape, -np.inf, np.inf), "answers": one, "loss": one}
            rows = [
                {"step": n * np.array(step), "answers": [n], "loss": [n * LOSS]}
                for step, n in zip(self._steps_G, self._counts_G, strict=True)
            ]
        else:
            size = ask.count("size")
            numbers = {"answers": one, "error": Number((size,), -np.inf, np.inf)}
            rows = [
                {"answers": [n], "error": n * np.array([*error_V, *[0.7] * size][:size])}
                for n, error_V in self._errors_G
            ]
        data = np.stack([flatten(row, numbers) for row in rows])
        return Replies(self.names, numbers, data if self.plain else data.sum(0), "")


def pretrained(steps_G=STEPS, counts_G=COUNTS, *, errors_G=None, start=None, plain=True, **changes):
    """What weights at 0 become, the groups' requests with it."""
    keys = {"pluralllm." + name.replace("_", "-"): value for name, value in {"rounds": 2, **changes}.items()}
    config = Config.load({"run.sums": "plain" if plain else "secure", **keys})
    nothing = [(0, ())] * len(steps_G)
    groups = Training(config, steps_G, counts_G, errors_G or nothing, plain=plain)
    start = start or ArrayRecord({"w": Array(np.zeros(len(steps_G[0]), dtype=np.float32))})
    with flower_task():
        return pretrain(groups, config, start, progress=lambda *_: None), groups


def rounds(**changes):
    """Weights after each of 2 rounds."""
    done, groups = pretrained(**changes)
    second = [ask for ask in groups.asked if ask.kind == UPDATE][1]
    return second.arrays["weights"], done.weights["w"].numpy(), groups.asked


MEAN = (30 * STEPS[0] + 10 * STEPS[1]) / 40


@pytest.mark.parametrize("plain", [True, False])
def test_groups_weigh_as_many_answers_as_they_trained_on(plain):
    first, second, asked = rounds(plain=plain)
    np.testing.assert_allclose([first, second], [MEAN, 2 * MEAN], rtol=1e-6)
    assert MEAN.tolist() == [0.0, -0.34375]
    assert [ask.kind for ask in asked] == [UPDATE, UPDATE, VALIDATION]
    assert [ask.count("round") for ask in asked[:2]] == [1, 2]


# What Flower's fedadam corrects the first and the second step by: sqrt(1 - .99^(t+1)) / (1 - .9^(t+1))
FIRST, SECOND = (np.sqrt(1 - 0.99**t) / (1 - 0.9**t) for t in (2, 3))


def test_fedadam_steps_as_its_paper_says():
    # eta is .003 x 1/5 in the first round; the second and last of two falls again: .003 x 2/5 x min(1, 1 / (2/3)).
    # m = .1 d, v = .01 d^2; then m = .19 d, v = .0199 d^2
    first_step, second_step = 6e-4 * FIRST, 1.2e-3 * SECOND * 0.19 / np.sqrt(0.0199)
    first, second, _ = rounds(strategy="fedadam")
    # where the mean change is 0, nothing moves; elsewhere the size of the change cancels
    np.testing.assert_allclose(first, [0.0, -first_step], rtol=1e-4, atol=1e-12)
    np.testing.assert_allclose(second, [0.0, -first_step - second_step], rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_from_the_groups_sum_comes_what_comes_from_each(strategy):
    steps_G = np.random.default_rng(0).normal(size=(5, 1000))
    plain, summed = (pretrained(steps_G, range(10, 15), plain=plain, strategy=strategy)[0] for plain in (True, False))
    assert np.abs(plain.weights["w"].numpy()).max() > 1e-4
    np.testing.assert_allclose(summed.weights["w"].numpy(), plain.weights["w"].numpy(), rtol=1e-4, atol=1e-6)
    assert (summed.losses, plain.losses) == (pytest.approx((LOSS, LOSS)),) * 2


HONEST = ((3, 4), (3, 4), (3, 4), (3, 4))


@pytest.mark.parametrize(
    ("steps_G", "mean", "named"),
    [
        # 5 is the median's length, so 50 is the longest: (30, -40); the mean of four (3, 4) and this
        ((*HONEST, (3e7, -4e7)), [42 / 5, -24 / 5], "E"),
        # of two the shorter step is the measure
        (((0.3, 0.4), (3000.0, 4000.0)), [3.3 / 2, 4.4 / 2], "B"),
        # ten times is let through, and where nobody moves a group that does is no mistake
        ((*HONEST, (30, 40)), [42 / 5, 56 / 5], ""),
        (((0, 0), (0, 0), (3, 4)), [1, 4 / 3], ""),
    ],
)
def test_one_group_s_huge_step_counts_for_ten_and_is_named(steps_G, mean, named, caplog):
    done, _ = pretrained(np.array(steps_G), [10] * len(steps_G), strategy="fedavg", rounds=1)
    np.testing.assert_allclose(done.weights["w"].numpy(), mean, rtol=1e-5)
    assert [message.partition(":")[0] for message in caplog.messages] == [f"group {name}" for name in named]


def test_how_much_a_view_counts_is_no_group_s_to_change():
    """A share beyond [0, 1] makes predictions that are none."""
    shares = Array(np.array([0.5, 0.25], np.float32))
    start = ArrayRecord({SHARES_KEY: shares, "w": Array(np.zeros(2, np.float32))})
    steps_G = [[-7, -7, 1, 1], [0, 0, 2, 2]]  # by the arrays' names
    assert sorted(start) == [SHARES_KEY, "w"]
    done, _ = pretrained(steps_G, start=start, strategy="fedavg")
    assert done.weights[SHARES_KEY].numpy().tolist() == [0.5, 0.25]
    assert done.weights["w"].numpy()[0] != 0


def test_a_group_without_an_answer_is_left_out_and_one_must_have_some():
    done, _ = pretrained(STEPS, (0, 10), strategy="fedavg", rounds=1)
    np.testing.assert_allclose(done.weights["w"].numpy(), STEPS[1])
    for plain in (True, False):
        with pytest.raises(UserError, match="round 1: no group trained"):
            pretrained(STEPS, (0, 0), plain=plain)


def same(*errors):
    """The same error for each choice."""
    return [(count, [error] * 7) for count, error in zip((20, 10), errors, strict=True)]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("errors_G", "validation", "shares"),
    [
        (same(0.1, 0.4), 0.2, [0.0, 0.0]),  # (20 x .1 + 10 x .4) / 30; of equals the first choice
        # (20 x .3 + 10 x .6) / 30 for the first choice, .3 for the second, (20 x .6 + 10 x .3) / 30 for the third
        ([(20, (0.3, 0.3, 0.6)), (10, (0.6, 0.3, 0.3))], 0.3, [0.5, 0.0]),
        ([(20, (0.4, 0.3, 0.2)), (10, (0.1, 0.3, 0.6))], 0.3, [0.0, 0.0]),
        ([(20, (0.3, 0.3, 0.3, 0.3, 0.3, 0.2)), (10, (0.3, 0.3, 0.3, 0.3, 0.3, 0.2))], 0.2, [1.0, 0.5]),
        ([(0, ()), (0, ())], None, [0.25, 0.25]),  # nobody has answers to say
    ],
)
def test_the_kept_weights_say_how_much_each_view_counts(errors_G, validation, shares, plain):
    kept = Array(np.array([0.25, 0.25], np.float32))
    start = ArrayRecord({"w": Array(np.zeros(2, np.float32)), SHARES_KEY: kept})
    steps_G = [[0, 0, 1, 1]] * 2
    done, _ = pretrained(steps_G, errors_G=errors_G, start=start, strategy="fedavg", plain=plain)
    assert done.validation == (None if validation is None else pytest.approx(validation))
    found = done.weights[SHARES_KEY].numpy()
    assert (found.dtype, found.tolist()) == (np.float32, shares)
    assert done.weights["w"].numpy().tolist() == [2, 2]


def test_a_network_without_choices_is_validated_by_a_single_error():
    done, _ = pretrained(errors_G=[(20, (0.2,)), (10, (0.5,))], architecture="attention")
    assert done.validation == pytest.approx(0.3)
    assert done.weights.keys() == {"w"}


def test_no_rounds_leave_the_start():
    done, groups = pretrained(rounds=0)
    assert (done.weights["w"].numpy().tolist(), done.losses, done.validation) == ([0.0, 0.0], (), None)
    assert not groups.asked
