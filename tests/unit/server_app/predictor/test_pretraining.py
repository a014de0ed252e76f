"""Federated pretraining on the server: numbers worked out by hand, over groups that always take the same step.

Axis letters: G groups, V choices of what views count, P weights.
"""

import logging

import numpy as np
import pytest
from fakes import catalogue_of
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import strategy_utils
from runs import FakeGroups, federated

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol.messages import join_weights, split_weights
from appa_flwr.protocol.queries import UPDATE, VALIDATION
from pluralllm.residual import SHARES_KEY
from server_app import flower_quiet
from server_app.predictor.pretraining import PROXIMAL_MU, pretrain
from server_app.predictor.updates import Updates

CATALOGUE = catalogue_of([2] * 150, train=[True] * 100 + [False] * 50)  # more than all answers here
STEPS = [[0.25, -0.5], [-0.75, 0.125]]  # each group's change of the weights, the same in every round
COUNTS = (30, 10)
LOSSES = (0.5, 0.25, 0.125, 0.75, 0.3)


def training(steps_G, counts_G, gains_G):
    """Groups that change the weights by their steps, resting on so many answers each, and report these gains."""

    def numbers(query, name):
        g = "ABCDE".index(name)
        if query.kind == UPDATE:
            n = counts_G[g]
            return {"step": n * np.array(steps_G[g]), "answers": n, "loss": n * LOSSES[g]}
        (n, told), sums_2V = gains_G[g], np.zeros((2, query.count("size")))
        for v, sums in told.items():
            sums_2V[:, v] = sums
        return {"answers": n, "gain": sums_2V[0], "square": sums_2V[1]}

    return FakeGroups("ABCDE"[: len(steps_G)], numbers)


def record(**arrays):
    return ArrayRecord({name: Array(np.array(array, np.float32)) for name, array in arrays.items()})


def pretrained(steps_G=STEPS, counts_G=COUNTS, *, gains_G=None, start=None, **changes):
    """What weights at 0 become, the mean losses of the rounds, and what the first group is asked; it answers last."""
    keys = {"pluralllm." + name.replace("_", "-"): value for name, value in {"rounds": 2, **changes}.items()}
    config = Config.load(keys)
    together = training(steps_G, counts_G, gains_G or [(0, {})] * len(steps_G))
    nodes = {9 - g: FakeGroups(name, together.numbers) for g, name in enumerate(together.names)}
    start = start or record(w=np.zeros(len(steps_G[0])))
    weights, losses, _ = pretrain(federated(nodes, CATALOGUE), config, start, progress=lambda *_: None)
    return weights, losses, nodes[9].asked


def test_groups_weigh_as_many_answers_as_they_trained_on():
    weights, losses, asked = pretrained(rounds=3)
    mean = [0.0, -0.34375]  # (30 x .25 - 10 x .75) / 40 and (-30 x .5 + 10 x .125) / 40
    np.testing.assert_allclose(asked[1].arrays["weights"], mean, rtol=1e-6)
    np.testing.assert_allclose(weights["w"].numpy(), [0.0, -1.03125], rtol=1e-6)
    assert losses == pytest.approx([0.4375] * 3)  # (30 x .5 + 10 x .25) / 40
    # the last round trains on validation questions too
    assert [query.kind for query in asked] == [UPDATE, UPDATE, VALIDATION, UPDATE]
    assert [query.count("round") for query in asked if query.kind == UPDATE] == [1, 2, 3]


def test_single_groups_are_averaged_to_the_bits_of_flower_s_fedavg():
    rng = np.random.default_rng(0)
    start, counts_G = record(b=rng.normal(size=(30, 4)), a=rng.normal(size=50)), (7, 12, 31, 5, 26)
    steps_GP = rng.normal(size=(5, 170))
    weights, (loss,), _ = pretrained(steps_GP, counts_G, start=start, rounds=1)
    shapes = {name: array.shape for name, array in start.items()}
    start_P, contents = join_weights(start), []
    for n, step_P, one_loss in zip(counts_G, steps_GP, LOSSES, strict=True):
        own = split_weights((start_P + n * step_P / n).astype(np.float32), shapes)
        metrics = MetricRecord({"num-examples": n, "loss": n * one_loss / n})
        contents.append(RecordDict({"arrays": own, "metrics": metrics}))
    expected = strategy_utils.aggregate_arrayrecords(contents, "num-examples")
    assert [*weights] == [*expected] == ["b", "a"]
    for name in weights:
        assert weights[name].numpy().dtype == np.float32
        np.testing.assert_array_equal(weights[name].numpy(), expected[name].numpy())
    assert loss == strategy_utils.aggregate_metricrecords(contents, "num-examples")["loss"]


@pytest.mark.parametrize("strategy", ["fedprox", "fedadam", "fedyogi"])
def test_flower_s_other_strategies_make_their_own_steps(strategy):
    """Both groups move the weights by the same (.1, -.2) in a single round."""
    weights, _, asked = pretrained([[0.1, -0.2]] * 2, rounds=1, strategy=strategy, start=record(w=[1, 1]))
    moved = weights["w"].numpy().astype(float) - 1
    assert asked[0].setting("proximal", float) == (PROXIMAL_MU if strategy == "fedprox" else 0.0)
    if strategy == "fedprox":
        np.testing.assert_allclose(moved, [0.1, -0.2], rtol=1e-6)
        return
    # the first round of one: a fifth of the step, the warm-up; m = .1 d and v = .01 d^2 are not corrected for their
    # start but by Flower's sqrt(1 - .99^2) / (1 - .9^2), so each weight moves by that times sign(d)
    expected = 3e-3 / 5 * (1 - 0.99**2) ** 0.5 / (1 - 0.9**2) * 0.1 / 0.01**0.5
    if strategy == "fedyogi":  # Flower's Yogi corrects nothing; its v of the first round is Adam's
        expected = 3e-3 / 5 * 0.1 / 0.01**0.5
    np.testing.assert_allclose(moved, [expected, -expected], rtol=1e-3)
    assert weights["w"].numpy().dtype == np.float32


HONEST = ((3, 4), (3, 4), (3, 4), (3, 4))


@pytest.mark.parametrize(
    ("steps_G", "mean", "named"),
    [
        # 5 is the median's length, so 7.5 is the longest: (4.5, -6); the mean of four (3, 4) and this
        ((*HONEST, (36, -48)), [16.5 / 5, 10 / 5], "E"),
        # of two the shorter step is the measure
        (((0.3, 0.4), (30.0, 40.0)), [0.75 / 2, 1.0 / 2], "B"),
        # half as long again is let through, and where nobody moves a group that does is no mistake
        ((*HONEST, (4.5, 6)), [16.5 / 5, 22 / 5], ""),
        (((0, 0), (0, 0), (3, 4)), [1, 4 / 3], ""),
    ],
)
def test_one_group_s_long_step_is_cut_and_named(steps_G, mean, named, caplog):
    weights, *_ = pretrained(steps_G, [10] * len(steps_G), rounds=1)
    np.testing.assert_allclose(weights["w"].numpy(), mean, rtol=1e-5)
    assert [message.partition(":")[0] for message in caplog.messages] == [f"group {name}" for name in named]


def test_distances_are_to_the_mean_of_the_others_in_its_lengths_and_kept_for_each_round(tmp_path):
    # A (3, 0) to (0, 4): 5 / 4; B and C (0, 4) to (1.5, 2): 2.5 / 2.5
    node = training([(3, 0), (0, 4), (0, 4)], (10, 20, 0), [(0, {})] * 3)  # C has no answers to train on
    config = Config.load({"pluralllm.rounds": 2, "pluralllm.architecture": "attention"})
    *_, rounds = pretrain(federated({1: node}, CATALOGUE), config, record(w=[0, 0]), progress=lambda *_: None)
    assert rounds == [{"A": 5 / 4, "B": 5 / 3}] * 2
    # of the first group: nobody else moves, or there is nobody
    for steps_G, distance in (([(3, 4), (0, 0), (0, 0)], np.nan), ([(0, 0), (3, 4)], 1), ([(3, 4)], np.nan)):
        with Updates(tmp_path, groups="ABC", size=2) as updates:
            for g, step_P in enumerate(steps_G):
                updates.put("ABC"[g], np.array(step_P), count=1.0, loss=0.0)
            np.testing.assert_array_equal(updates.distances()[0], distance)


def test_how_much_a_view_counts_is_no_group_s_to_change():
    """A share beyond [0, 1] makes predictions that are none."""
    start = record(**{SHARES_KEY: [0.5, 0.25], "w": [0, 0]})
    steps_G = [[-7, -7, 1, 1], [0, 0, 2, 2]]  # by the arrays' names
    assert sorted(start) == [SHARES_KEY, "w"]
    weights, _, asked = pretrained(steps_G, start=start)
    assert weights[SHARES_KEY].numpy().tolist() == asked[1].arrays["weights"][:2].tolist() == [0.5, 0.25]
    assert weights["w"].numpy()[0] != 0


def test_groups_without_an_answer_are_left_out_and_one_must_have_some():
    weights, *_ = pretrained(rounds=1, counts_G=(0, 10))
    np.testing.assert_allclose(weights["w"].numpy(), STEPS[1])
    with pytest.raises(UserError, match="round 1: no group trained"):
        pretrained(counts_G=(0, 0))


CHANCE = {1: (1, 0.425)}


@pytest.mark.parametrize(
    ("gains_G", "shares"),
    [
        # 10 answers, 5 a group: the mean is .2, its standard error ((.085 - .2 ** 2) / (5 - 1)) ** .5 = .106
        ([(5, CHANCE), (5, CHANCE)], [0.5, 0.5]),
        ([(8, {1: (1.9, 0.6)}), (2, {1: (0.1, 0.1)})], [0.0, 0.5]),  # the same mean, ((.07 - .04) / 4) ** .5 = .087
        # beside chance .1 with .035, and .15 with .043
        ([(5, CHANCE | {2: (0.5, 0.075), 3: (0.75, 0.15)})] * 2, [0.0, 0.0]),
        ([(5, {1: (-1, 0.21)})] * 2, [0.5, 0.5]),
        ([(10, {1: (2, 0.85)}), (0, {})], [0.0, 0.5]),  # a single group: ((.085 - .04) / 9) ** .5 = .071
        ([(1, {1: (0.5, 0.25)})] * 2, [0.5, 0.5]),  # one answer each tells nothing of chance
        ([(0, {})] * 2, [0.25, 0.25]),  # nobody has answers to say
    ],
)
def test_a_choice_of_how_much_each_view_counts_must_be_better_than_by_chance(gains_G, shares):
    start = record(**{"w": [0, 0], SHARES_KEY: [0.25, 0.25]})
    weights, *_ = pretrained([[0, 0, 1, 1]] * 2, gains_G=gains_G, start=start)
    chosen = weights[SHARES_KEY].numpy()
    assert (chosen.dtype, chosen.tolist()) == (np.float32, shares)
    assert weights["w"].numpy().tolist() == [2, 2]


def test_a_network_without_choices_has_none():
    weights, _, asked = pretrained(gains_G=[(5, CHANCE)] * 2, architecture="attention")
    assert (weights.keys(), {query.kind for query in asked}) == ({"w"}, {UPDATE})


def test_no_rounds_leave_the_start():
    weights, losses, asked = pretrained(rounds=0)
    assert (weights["w"].numpy().tolist(), losses, asked) == ([0.0, 0.0], [], [])


def test_a_number_of_answers_that_is_not_whole_spoils_nothing(caplog):
    """A step divided by next to nothing would be infinite, and make every weight NaN."""
    weights, *_ = pretrained(counts_G=(1e-320, 10), rounds=1)
    np.testing.assert_allclose(weights["w"].numpy(), STEPS[1])
    assert "not whole" in caplog.text


def test_flower_is_silent_during_its_rounds_alone(caplog):
    caplog.set_level(logging.INFO, "flwr")
    flower = logging.getLogger("flwr")
    with flower_quiet():
        assert not flower.isEnabledFor(logging.INFO)
    assert flower.isEnabledFor(logging.INFO)
